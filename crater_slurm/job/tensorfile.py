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
    from typing import Any

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


class File:
    """A rank's file, open: its header, its metadata, and where each tensor lies."""

    def __init__(self, path: str, *, trust: bool = False) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._look(trust)
        except BaseException:
            self.close()
            raise

    def _look(self, trust: bool) -> None:
        facts = os.fstat(self.fd)
        if not stat.S_ISREG(facts.st_mode):
            raise DamagedError(f"{self.path} is no file")
        if facts.st_uid not in (os.getuid(), 0) and not trust:
            raise StateError(
                f"{self.path} belongs to user {facts.st_uid}. Loading a checkpoint can run what "
                "its writer put into it: if you trust them, copy it, or load(..., trust=True)."
            )
        self.size = facts.st_size
        head = os.pread(self.fd, 8, 0)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(_MOST_HEADER, self.size - 8):
            raise DamagedError(f"{self.path} is no safetensors file")
        self.base = 8 + length
        try:
            self.header = json.loads(os.pread(self.fd, length, 8))
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
        os.close(self.fd)
