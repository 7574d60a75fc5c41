"""Pieces of files, and small durable steps on them, for parts that come from elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator

from crater_slurm.checkpoint import finishing
from crater_slurm.job.layout import CHUNK_BYTES, FileEntry


def pieces(entry: FileEntry) -> Iterator[tuple[int, int, int]]:
    """(number, first byte, bytes) of each piece of a file."""
    for number in range(len(entry.sums)):
        at = number * CHUNK_BYTES
        yield number, at, min(CHUNK_BYTES, entry.size - at)


def write_all(fd: int, view: memoryview, at: int) -> None:
    """Write all of it at a place in a file; raises OSError."""
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def read_piece(fd: int, view: memoryview, at: int) -> bool:
    """Fill a view from a place in a file; False when the file ends early."""
    got = 0
    while got < len(view):
        read = os.preadv(fd, [view[got:]], at + got)
        if not read:
            return False
        got += read
    return True


def sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def put_in_place(partial: str, final: str) -> None:
    """Give a completed folder its final name beside it; see ``finishing``."""
    parent = os.open(os.path.dirname(final), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        finishing.put_in_place(parent, os.path.basename(partial), os.path.basename(final))
    finally:
        os.close(parent)
