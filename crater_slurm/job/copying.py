"""Bytes of a file that still lie in the tensors they come from, and copying them at memory speed.

An ``Image`` is a list of segments in file order. Host memory is copied by plain memmove, which
lets go of the interpreter's lock and passes the cache by for large blocks, in several threads;
what has strides or lies on a GPU goes through torch. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

#: What a thread takes at a time. Well above the size from which memmove passes the cache by (some
#: tens of MiB): smaller blocks read every line of the target first, which costs a third.
BLOCK_BYTES = 64 << 20
_MOST_THREADS = 8


class Segment:
    """``nbytes`` of a file from ``at``: at ``pointer`` in host memory, or what ``tensor`` holds.

    ``keep`` is whatever must stay alive so that the pointer stays good.
    """

    __slots__ = ("at", "keep", "nbytes", "pointer", "tensor")

    def __init__(
        self, at: int, nbytes: int, pointer: int = 0, keep: object = None, tensor: Any = None
    ) -> None:
        self.at = at
        self.nbytes = nbytes
        self.pointer = pointer
        self.keep = keep
        self.tensor = tensor


def pointer_of(data: bytes | bytearray) -> int:
    """Address of the bytes of an object, good as long as the object lives and keeps its size."""
    if isinstance(data, bytes):
        return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) if data else 0


def memory_at(address: int, nbytes: int) -> memoryview:
    """Memory as a writable view of bytes. The caller keeps it alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def cpu_count() -> int:
    """Threads worth starting to copy: half the CPUs of this process, since the two threads of a
    core share what it can move."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2))


class Image:
    """The bytes of one file, from segments in order that don't overlap."""

    def __init__(self, segments: list[Segment]) -> None:
        self.segments = [segment for segment in segments if segment.nbytes]
        self.starts = [segment.at for segment in self.segments]
        last = self.segments[-1] if self.segments else None
        self.size = last.at + last.nbytes if last else 0
        self._lock = threading.Lock()
        self._flat: tuple[Segment, Any] | None = None

    def copy(self, at: int, nbytes: int, address: int) -> None:
        """Put bytes ``at`` to ``at + nbytes`` of the file at an address of host memory."""
        host: list[tuple[int, int, int]] = []
        devices: set[Any] = set()
        for segment, start, count in self._within(at, nbytes):
            target = address + segment.at + start - at
            if segment.tensor is None:
                host.append((target, segment.pointer + start, count))
            elif count == segment.nbytes:
                _copy_tensor(segment.tensor, target, count)
                devices.add(segment.tensor.device)
            else:
                with self._lock:
                    host_copy = self._flattened(segment)
                    ctypes.memmove(target, host_copy.data_ptr() + start, count)
        copy_blocks(host)
        for device in devices:
            _synchronize(device)

    def fill(self, at: int, nbytes: int, address: int) -> None:
        """The other way round: bytes of the file that lie at an address go into the segments,
        which are host memory."""
        for segment, start, count in self._within(at, nbytes):
            ctypes.memmove(segment.pointer + start, address + segment.at + start - at, count)

    def view(self, at: int, nbytes: int) -> memoryview | None:
        """The bytes without a copy, where they lie in one piece of host memory."""
        within = list(self._within(at, nbytes))
        if len(within) != 1 or within[0][0].tensor is not None:
            return None
        segment, start, count = within[0]
        return memory_at(segment.pointer + start, count)

    def _within(self, at: int, nbytes: int) -> Iterator[tuple[Segment, int, int]]:
        """Segments of a range, with the first byte of each that belongs to it and how many."""
        first = max(0, bisect.bisect_right(self.starts, at) - 1)
        for index in range(first, len(self.segments)):
            segment = self.segments[index]
            if segment.at >= at + nbytes:
                break
            start = max(0, at - segment.at)
            count = min(segment.nbytes, at + nbytes - segment.at) - start
            if count > 0:
                yield segment, start, count

    def _flattened(self, segment: Segment) -> Any:
        """One tensor's contents in host memory; the last one is kept for its next piece."""
        if self._flat is None or self._flat[0] is not segment:
            self._flat = (segment, segment.tensor.contiguous().cpu())
        return self._flat[1]


def copy_blocks(blocks: list[tuple[int, int, int]]) -> None:
    """memmove of (to, from, bytes) each; large ones are cut and shared among threads."""
    large = [block for block in blocks if block[2] >= BLOCK_BYTES]
    threads = cpu_count() if large else 1
    pieces = [piece for block in large for piece in _cut(block)] if threads > 1 else []
    helpers = start_threads(min(threads - 1, len(pieces)), lambda: _move_all(pieces))
    move = ctypes.memmove
    for target, source, count in blocks:
        if threads == 1 or count < BLOCK_BYTES:
            move(target, source, count)
    _move_all(pieces)
    for helper in helpers:
        helper.join()


def _cut(block: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    target, source, count = block
    return [
        (target + at, source + at, min(BLOCK_BYTES, count - at))
        for at in range(0, count, BLOCK_BYTES)
    ]


def _move_all(pieces: list[tuple[int, int, int]]) -> None:
    while True:
        try:
            target, source, count = pieces.pop()
        except IndexError:
            return
        ctypes.memmove(target, source, count)


def start_threads(count: int, work: Any) -> list[threading.Thread]:
    """Threads that do ``work()``; fewer, or none, where the interpreter gives no more (at its
    exit, or at the limit of processes), since the caller does the work itself too."""
    started = []
    for _ in range(count):
        thread = threading.Thread(target=work, daemon=True, name="crater-copy")
        try:
            thread.start()
        except RuntimeError:
            break
        started.append(thread)
    return started


def _copy_tensor(tensor: Any, address: int, nbytes: int) -> None:
    import torch

    memory = (ctypes.c_char * nbytes).from_address(address)
    target = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    target.copy_(tensor, non_blocking=True)


def _synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        import torch

        backend: Any = getattr(torch, device.type, None)
        if hasattr(backend, "synchronize"):
            backend.synchronize()
