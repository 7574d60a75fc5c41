"""Reads a machine: topology from /sys and /proc, GPUs from the driver. Knows no store."""
