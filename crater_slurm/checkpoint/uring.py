"""Writing with io_uring: raw system calls and mapped rings, no library.

One thread makes the ring and alone uses it (SINGLE_ISSUER, DEFER_TASKRUN): completions are then
posted by that thread's own system calls, so plain reads of the rings are ordered on every
processor. Kernels before 6.1, and sites that forbid io_uring, have no such ring: OSError, and the
caller takes threads instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct

from crater_slurm.checkpoint import syscalls

_SETUP, _ENTER = 425, 426
_SETUP_FLAGS = (1 << 12) | (1 << 13)  # SINGLE_ISSUER | DEFER_TASKRUN
_FEAT_SINGLE_MMAP, _FEAT_EXT_ARG = 1, 1 << 8
_ENTER_GETEVENTS, _ENTER_EXT_ARG = 1, 1 << 3
_OFF_SQES = 0x10000000
_OP_READ, _OP_WRITE = 22, 23
_SQE_BYTES, _CQE_BYTES = 64, 16
_PARAMS = struct.Struct("=10I10I10I")
_SQE = struct.Struct("=BBHiQQIIQ24x")
_CQE = struct.Struct("=QiI")
_SPAN = struct.Struct("=qq")
_EXTRA = struct.Struct("=QIIQ")  # struct io_uring_getevents_arg
_SIGSET_BYTES = 8
_WAKE = 0


class Uring:
    """A ring for ``depth`` writes at once. Used by the thread that made it, ``wake`` by any."""

    def __init__(self, depth: int) -> None:
        params = ctypes.create_string_buffer(_PARAMS.size)
        entries = max(8, depth + 2)
        struct.pack_into("=4I", params, 0, 0, 0, _SETUP_FLAGS, 0)
        self._fd = syscalls.checked(_call(_SETUP, entries, params), "io_uring_setup")
        try:
            self._map(_PARAMS.unpack(params.raw))
            self._event = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError:
            os.close(self._fd)
            raise
        self.depth = depth
        self._number = 0
        self._waiting: dict[int, object] = {}
        self._drained = ctypes.create_string_buffer(8)
        self._arm()

    def _map(self, params: tuple[int, ...]) -> None:
        features = params[5]
        if not features & _FEAT_SINGLE_MMAP or not features & _FEAT_EXT_ARG:
            raise OSError(errno.ENOSYS, "this kernel's io_uring is too old")
        entries, cq_entries = params[0], params[1]
        sq, cq = params[10:20], params[20:30]
        bytes_ = max(sq[6] + entries * 4, cq[5] + cq_entries * _CQE_BYTES)
        self._ring = mmap.mmap(self._fd, bytes_, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._sqes = mmap.mmap(
            self._fd, entries * _SQE_BYTES, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=_OFF_SQES
        )
        words = memoryview(self._ring)[: bytes_ // 4 * 4].cast("I")
        self._words = words
        self._sq_head, self._sq_tail = sq[0] // 4, sq[1] // 4
        self._cq_head, self._cq_tail = cq[0] // 4, cq[1] // 4
        self._sq_mask, self._cq_mask = words[sq[2] // 4], words[cq[2] // 4]
        self._cqes = cq[5]
        for index in range(entries):  # entry i of the queue is always slot i
            words[sq[6] // 4 + index] = index

    def _push(self, opcode: int, fd: int, offset: int, address: int, length: int, id_: int) -> None:
        tail = self._words[self._sq_tail]
        at = (tail & self._sq_mask) * _SQE_BYTES
        _SQE.pack_into(self._sqes, at, opcode, 0, 0, fd, offset, address, length, 0, id_)
        self._words[self._sq_tail] = (tail + 1) & 0xFFFFFFFF

    def _arm(self) -> None:
        self._push(_OP_READ, self._event, 0, ctypes.addressof(self._drained), 8, _WAKE)

    def write(self, fd: int, offset: int, address: int, length: int, tag: object) -> None:
        """Queue a write; ``tag`` comes back with its result. At most ``depth`` at once."""
        self._number += 1
        self._waiting[self._number] = tag
        self._push(_OP_WRITE, fd, offset, address, length, self._number)

    def wait(self, seconds: float | None) -> list[tuple[object, int]]:
        """Send all, wait for a result, a ``wake`` or the time: (tag, bytes or -errno)."""
        span = 0
        if seconds is not None:
            kept = ctypes.create_string_buffer(_SPAN.pack(int(seconds), int(seconds % 1 * 1e9)))
            span = ctypes.addressof(kept)
        extra = _EXTRA.pack(0, _SIGSET_BYTES, 0, span)
        queued = (self._words[self._sq_tail] - self._words[self._sq_head]) & 0xFFFFFFFF
        flags = _ENTER_GETEVENTS | _ENTER_EXT_ARG
        try:
            sent = _call(_ENTER, self._fd, queued, 1, flags, extra, len(extra))
            syscalls.checked(sent, "io_uring_enter")
        except OSError as error:
            # Nothing is lost by these: what the kernel did not take is still queued.
            if error.errno not in (errno.EINTR, errno.ETIME, errno.EAGAIN, errno.EBUSY):
                raise
        return self._reap()

    def _reap(self) -> list[tuple[object, int]]:
        results = []
        head, tail = self._words[self._cq_head], self._words[self._cq_tail]
        while head != tail:
            at = self._cqes + (head & self._cq_mask) * _CQE_BYTES
            id_, result, _ = _CQE.unpack_from(self._ring, at)
            head = (head + 1) & 0xFFFFFFFF
            if id_ == _WAKE:
                self._arm()
            else:
                results.append((self._waiting.pop(id_), result))
        self._words[self._cq_head] = head
        return results

    def wake(self) -> None:
        """Make ``wait`` return; from any thread."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Give the ring back; nothing may be under way."""
        self._words.release()
        self._ring.close()
        self._sqes.close()
        os.close(self._fd)
        os.close(self._event)


def _call(number: int, *arguments: object) -> int:
    return int(syscalls.libc.syscall(ctypes.c_long(number), *map(_long, arguments)))


def _long(value: object) -> object:
    return ctypes.c_long(value) if isinstance(value, int) else value
