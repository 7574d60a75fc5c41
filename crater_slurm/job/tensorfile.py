"""A rank's file, open: whose it is, its header, and where each tensor lies in it."""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib

from crater_slurm.job.pack import FORMAT, SKELETON
from crater_slurm.job.tree import StateError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    class Source(Protocol):
        """Where a file's bytes come from: a folder, or the worker. Reads from several threads."""

        path: str
        size: int

        def read(self, view: memoryview, at: int) -> int: ...
        def close(self) -> None: ...


_MOST_HEADER = 100 << 20


class DamagedError(Exception):
    """A file is not what its manifest says; a clause that begins with the file's name."""


def crc32() -> Callable[[Any], int]:
    """The fastest CRC-32 that is there; all give the same."""
    try:
        from importlib import import_module

        fast: Callable[[Any], int] = import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return fast


class OnDisk:
    """A file in a folder. Raises DamagedError, StateError for another user's, OSError."""

    def __init__(self, path: str, *, trust: bool = False) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        facts = os.fstat(self.fd)
        self.size = facts.st_size
        if stat.S_ISREG(facts.st_mode) and (facts.st_uid in (os.getuid(), 0) or trust):
            return
        self.close()
        if not stat.S_ISREG(facts.st_mode):
            raise DamagedError(f"{path} is no file")
        raise StateError(
            f"{path} belongs to user {facts.st_uid}. Loading a checkpoint can run what "
            "its writer put into it: if you trust them, copy it, or load(..., trust=True)."
        )

    def read(self, view: memoryview, at: int) -> int:
        """Fill a view from a place in the file; how many bytes there were."""
        got = 0
        while got < len(view):
            read = os.preadv(self.fd, [view[got:]], at + got)
            if not read:
                break
            got += read
        return got

    def close(self) -> None:
        os.close(self.fd)


class File:
    """A rank's file, open: its header, its metadata, and where each tensor lies. Its bytes come
    from ``source``, which is closed with it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.path, self.size = source.path, source.size
        try:
            self._look()
        except BaseException:
            self.close()
            raise

    def take(self, at: int, count: int) -> bytes:
        """Bytes of the file, fewer at its end."""
        data = bytearray(min(count, max(0, self.size - at)))
        return bytes(data[: self.source.read(memoryview(data), at)])

    def _look(self) -> None:
        head = self.take(0, 8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(_MOST_HEADER, self.size - 8):
            raise DamagedError(f"{self.path} is no safetensors file")
        self.base = 8 + length
        try:
            self.header = json.loads(self.take(8, length))
            self.metadata = self.header.pop("__metadata__", {})
            spans = {name: tuple(row["data_offsets"]) for name, row in self.header.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedError(f"{self.path} has a header that can't be read") from error
        room = self.size - self.base
        for name, span in spans.items():
            good = len(span) == 2 and all(type(n) is int for n in span)
            if not good or not 0 <= span[0] <= span[1] <= room:
                raise DamagedError(f"{self.path} has no place for {name!r:.80}")
        if SKELETON not in spans or self.metadata.get("crater") != FORMAT:
            raise StateError(f"{self.path} is no checkpoint of crater's; read it with safetensors.")
        self.skeleton = spans.pop(SKELETON)
        #: First and last byte of each entry in the file, in order.
        self.spans = sorted((self.base + a, self.base + b) for a, b in spans.values())

    def close(self) -> None:
        self.source.close()
