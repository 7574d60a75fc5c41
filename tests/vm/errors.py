# SPDX-License-Identifier: Apache-2.0
"""The two ways in which the test bed fails, kept apart because pytest must treat them apart."""

from __future__ import annotations


class BedUnavailableError(Exception):
    """This machine cannot have a guest (no QEMU, no mirror, not root): the tests are skipped."""


class GuestError(Exception):
    """A guest was there and something in it went wrong: the tests fail."""
