"""A lane's memory: made here and sealed, or a trainer's from before, checked and mapped read-only.

Its size can't change, so no read of it can fail for a page that went away. It refuses any file
but a memfd: only the kernel's own seals are believed. The one memory that is written here is the
small buffer of a trainer that reads past the cache (``away``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat

from crater_slurm.checkpoint import syscalls
from crater_slurm.job import layout

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_TMPFS, _HUGETLBFS = 0x01021994, 0x958458F6
_HUGE_BYTES = 2 << 20


class LaneError(Exception):
    """A lane that can't be had or is not one; the message is a whole sentence."""


class Memory:
    """Mapped pages of a lane: ``view`` and ``address`` of its first byte; ``length`` in bytes."""

    def __init__(self, fd: int, length: int) -> None:
        """Map an open file, which stays the caller's; raises OSError."""
        self.length = length
        self._map = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ)
        self.view = memoryview(self._map)
        self.address = syscalls.address_of(self._map)

    def advise_huge(self) -> None:
        """Ask for huge pages; a kernel that has none for shared memory keeps small ones."""
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def close(self) -> None:
        """Unmap; nothing may be reading it."""
        self.view.release()
        self._map.close()


def create(length: int, huge_pages: str = "advise") -> tuple[Memory, int]:
    """A new lane of at least a page, and its open file. Raises LaneError.

    ``huge_pages``: ``hugetlb`` takes reserved huge pages where enough are free, ``advise`` asks
    for transparent ones, ``off`` does neither. The length is rounded down to whole pages.
    """
    if huge_pages == "hugetlb" and length >= _HUGE_BYTES:
        with contextlib.suppress(OSError):
            flags = os.MFD_HUGETLB | os.MFD_HUGE_2MB
            return _made(length - length % _HUGE_BYTES, flags)
    try:
        memory, fd = _made(length - length % layout.ALIGN, 0)
    except (OSError, ValueError) as error:
        raise LaneError(f"No shared memory of {length} bytes can be had: {error}.") from error
    if huge_pages != "off":
        memory.advise_huge()
    return memory, fd


def _made(length: int, flags: int) -> tuple[Memory, int]:
    if length <= 0:
        raise OSError(errno.EINVAL, "the lane would have no page")
    fd = os.memfd_create("crater-lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, length)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
        return Memory(fd, length), fd
    except OSError:
        os.close(fd)
        raise


def adopt(fd: int, length: int) -> Memory:
    """A trainer's lane from before. Raises LaneError unless it is a sealed memfd of that size."""
    size = _sealed_size(fd)
    if size != length or length % layout.ALIGN or not length:
        raise LaneError(f"The lane offered has {size} bytes, not {length}.")
    try:
        return Memory(fd, length)
    except (OSError, ValueError) as error:
        raise LaneError(f"The lane offered can't be mapped: {error}.") from error


def buffer(fd: int, most: int) -> mmap.mmap:
    """A trainer's memory to write into, a sealed memfd of whole chunks. Raises LaneError."""
    size = _sealed_size(fd)
    if not 0 < size <= most or size % layout.CHUNK_BYTES:
        raise LaneError(f"The buffer offered has {size} bytes; whole chunks up to {most} belong.")
    try:
        return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise LaneError(f"The buffer offered can't be mapped: {error}.") from error


def _sealed_size(fd: int) -> int:
    """Bytes of a memfd that is sealed against a change of its size. Raises LaneError."""
    try:
        status = os.fstat(fd)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        kind = syscalls.fs_type(fd)
    except OSError as error:
        raise LaneError("The lane offered is no shared memory with seals.") from error
    if not stat.S_ISREG(status.st_mode) or kind not in (_TMPFS, _HUGETLBFS):
        raise LaneError("The lane offered is no shared memory.")
    if seals & SEALS != SEALS:
        raise LaneError("The lane offered is not sealed against a change of its size.")
    return status.st_size
