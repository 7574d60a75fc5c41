"""CRC-32 of files and their ranges out of a manifest's sums, and comparing bytes with them."""

from __future__ import annotations

from collections.abc import Iterable

from crater_slurm.checkpoint.sums import combined, crc32
from crater_slurm.job import layout


def of_pieces(pieces: Iterable[tuple[int, int]]) -> int:
    """CRC-32 of pieces joined, from (CRC-32, bytes) of each."""
    total = 0
    for value, count in pieces:
        total = combined(total, value, count)
    return total


def of_range(entry: layout.FileEntry, start: int, count: int) -> int:
    """CRC-32 of a range that begins at a chunk and ends at one or at the file's end."""
    first = start // layout.CHUNK_BYTES
    last = -(-(start + count) // layout.CHUNK_BYTES)
    lengths = (
        min(layout.CHUNK_BYTES, entry.size - number * layout.CHUNK_BYTES)
        for number in range(first, last)
    )
    return of_pieces(
        (int(text, 16), size) for text, size in zip(entry.sums[first:last], lengths, strict=True)
    )


def of_file(entry: layout.FileEntry) -> int:
    """CRC-32 of a whole file, from its manifest entry."""
    return of_range(entry, 0, entry.size)


def wrong_chunk(entry: layout.FileEntry, start: int, data: memoryview) -> int | None:
    """Where the first chunk begins that differs from the manifest; None when all agree.

    ``data`` lies at ``start``, a multiple of CHUNK_BYTES, and reaches to a chunk's or file's end.
    """
    for at in range(0, len(data), layout.CHUNK_BYTES):
        number = (start + at) // layout.CHUNK_BYTES
        if f"{crc32(data[at : at + layout.CHUNK_BYTES]):08x}" != entry.sums[number]:
            return start + at
    return None
