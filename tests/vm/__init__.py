# SPDX-License-Identifier: Apache-2.0
"""Tests that need a real machine: two NUMA nodes, cgroup v2, NVMe. See conftest.py for how."""
