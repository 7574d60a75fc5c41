"""inotify by ctypes: the standard library has none, and one dependency less runs on more nodes."""

from __future__ import annotations

import ctypes
import os
import select
import struct
from dataclasses import dataclass
from pathlib import Path

MODIFY = 0x00000002
CREATE = 0x00000100
DELETE = 0x00000200
MOVED_TO = 0x00000080
Q_OVERFLOW = 0x00004000
IGNORED = 0x00008000
ISDIR = 0x40000000
_ONLYDIR = 0x01000000
_DONT_FOLLOW = 0x02000000
_HEADER = struct.Struct("iIII")


@dataclass(frozen=True, slots=True)
class Event:
    """``watch`` is what ``add`` returned (-1 on overflow), ``name`` the entry in that folder."""

    watch: int
    mask: int
    name: str


class Inotify:
    """One inotify instance. ``read`` waits, ``wake`` ends the wait from another thread."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1: " + os.strerror(ctypes.get_errno()))
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)

    def add(self, folder: Path) -> int:
        """Watch a folder; returns its watch number. Raises OSError (ENOSPC: no watches left)."""
        mask = MODIFY | CREATE | DELETE | MOVED_TO | _ONLYDIR | _DONT_FOLLOW
        watch: int = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), mask)
        if watch < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
        return watch

    def read(self, seconds: float) -> list[Event]:
        """Events since the last call; waits up to ``seconds`` for the first one."""
        self._poll.poll(seconds * 1000)
        events: list[Event] = []
        while True:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return events
            position = 0
            while position < len(data):
                watch, mask, _, length = _HEADER.unpack_from(data, position)
                position += _HEADER.size
                name = data[position : position + length].split(b"\0")[0]
                position += length
                events.append(Event(watch, mask, os.fsdecode(name)))

    def wake(self) -> None:
        """End a wait in ``read``; harmless at any time."""
        os.write(self._wake_write, b"x")

    def close(self) -> None:
        for fd in (self._fd, self._wake_read, self._wake_write):
            os.close(fd)
