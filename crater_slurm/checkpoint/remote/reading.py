"""Bytes from a destination, compared with the manifest before anybody uses them."""

from __future__ import annotations

from crater_slurm.checkpoint import checksum
from crater_slurm.checkpoint.remote.store import Limiter, RemoteError, Store
from crater_slurm.job import layout

#: A body may be damaged on the way; what lies there damaged stays so.
_TRIES = 2


def get_chunk(
    store: Store,
    folder: str,
    entry: layout.FileEntry,
    start: int,
    into: memoryview,
    limiter: Limiter,
) -> None:
    """Fill a buffer with one chunk of a file, from ``start`` on. Raises RemoteError."""
    limiter.take(len(into))
    for _ in range(_TRIES):
        store.get_range(f"{folder}/{entry.name}", start, into)
        if agrees(entry, start, into):
            return
    raise RemoteError(
        f"{store.where}: {folder}/{entry.name} is damaged between byte {start} and "
        f"{start + len(into)}; an older step may be whole.",
        lasting=True,
    )


def agrees(entry: layout.FileEntry, start: int, data: memoryview) -> bool:
    """Whether a chunk is what the manifest says."""
    return checksum.wrong_chunk(entry, start, data) is None
