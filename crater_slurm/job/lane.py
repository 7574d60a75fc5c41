"""One rank's ring memory: where the stream has come to, what is free, and touching its pages.

Positions count bytes of the stream from the beginning; position ``p`` lies at byte ``p`` modulo
the lane's length. Pieces begin at multiples of ALIGN and don't wrap. Not thread-safe by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

from crater_slurm.job.copying import start_threads
from crater_slurm.job.layout import ALIGN

_POPULATE_WRITE = 23
_HUGE = 14
_STRIP = 64 << 20


def rounded(size: int) -> int:
    """Bytes that a piece takes in the stream."""
    return -(-size // ALIGN) * ALIGN


class Lane:
    """A mapped lane. ``head``: the stream has been written up to here; ``tail``: before it, all
    may be overwritten."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map a lane that was handed over; the descriptor is this object's now, also on failure.

        Raises ValueError or OSError when it is not as large as was said.
        """
        self.fd = fd
        self.registered = False
        self.length = nbytes // ALIGN * ALIGN
        try:
            if os.fstat(fd).st_size < self.length or self.length <= 0:
                raise ValueError(f"the lane is not as large as {nbytes} bytes")
            self.memory = mmap.mmap(fd, self.length)
        except BaseException:
            self.close()
            raise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.head = 0
        self.tail = 0

    @property
    def room(self) -> int:
        """Bytes that may be written now."""
        return self.length - (self.head - self.tail)

    def take(self, size: int, at: int = 0) -> list[tuple[int, int, int]]:
        """Move the head past ``size`` bytes of a file from ``at``; their pieces as (place in the
        file, position, bytes): one, or two where the lane's end lies between."""
        pieces, left, start = [], size, at
        while left:
            to_end = self.length - self.head % self.length
            count = min(left, to_end)
            pieces.append((start, self.head, count))
            self.head += rounded(count)
            start, left = start + count, left - count
        return pieces

    def skip_to_start(self, size: int) -> None:
        """Leave the lane's end unused where a piece of ``size`` would be cut by it and there is
        room to begin anew: one long copy is faster than two, and to the same place each time."""
        to_end = self.length - self.head % self.length
        if to_end < rounded(size) <= self.room - to_end:
            self.head += to_end

    def place(self, position: int) -> int:
        """Address of a position."""
        return self.address + position % self.length

    def close(self) -> None:
        """Close the file. The mapping goes with the last object that uses it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "registered", False):
            unregister(self.address)
        with contextlib.suppress(OSError):
            self.close()


def prefault(lane: Lane, threads: int) -> None:
    """Have the kernel give the lane its pages, from this process, so that they lie next to its
    cores and no save waits for them. Contents stay as they are."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise(lane.address, lane.length, _HUGE)
    strips = list(range(0, lane.length, _STRIP))[::-1]

    def work() -> None:
        while True:
            try:
                at = strips.pop()
            except IndexError:
                return
            count = min(_STRIP, lane.length - at)
            if libc.madvise(lane.address + at, count, _POPULATE_WRITE):
                _touch(lane, at, count)

    helpers = start_threads(threads - 1, work)
    work()
    for helper in helpers:
        helper.join()


def _touch(lane: Lane, at: int, count: int) -> None:
    """Kernels before 5.14: reading a page of shared memory is enough to make it."""
    memory = lane.memory
    for offset in range(at, at + count, mmap.PAGESIZE):
        _ = memory[offset]


def register(lane: Lane) -> bool:
    """Pin the lane for copies from a GPU, if this process uses CUDA already; whether it is."""
    import sys

    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        result = torch.cuda.cudart().cudaHostRegister(lane.address, lane.length, 0)
        lane.registered = int(result) == 0
    except (RuntimeError, AttributeError, TypeError, ValueError):
        lane.registered = False
    return lane.registered


def unregister(address: int) -> None:
    """Undo ``register``."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None:
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):
            torch.cuda.cudart().cudaHostUnregister(address)
