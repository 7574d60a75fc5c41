"""CRC-32 of blocks, and of what blocks make up together.

Blocks are summed by several threads, in any order, as they lie in memory; a chunk's sum is
combined from its blocks' (zlib's crc32_combine, which Python doesn't offer). isal is ten times
faster than zlib and gives the same value.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from crater_slurm.job import layout

_POLYNOMIAL = 0xEDB88320


def _best() -> Callable[..., int]:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    found: Callable[..., int] = isal_zlib.crc32
    return found


crc32: Callable[[Any], int] = _best()


def _product(a: int, b: int) -> int:
    """a times b, as polynomials modulo the CRC's, bits reversed as CRC-32 has them."""
    product, mask = 0, 1 << 31
    while a:
        if a & mask:
            product ^= b
            a ^= mask
        mask >>= 1
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@functools.lru_cache(maxsize=64)
def _shift(length: int) -> int:
    """x to the power of 8 * ``length``: what appending so many zero bytes does to a CRC."""
    power, square, left = 1 << 31, 1 << 23, length  # x^0, x^8
    while left:
        if left & 1:
            power = _product(square, power)
        square = _product(square, square)
        left >>= 1
    return power


def combined(first: int, second: int, second_length: int) -> int:
    """CRC-32 of two pieces of which the second has ``second_length`` bytes."""
    return _product(_shift(second_length), first) ^ second


def chunk_sums(pieces: Iterable[tuple[int, int]]) -> list[str]:
    """A manifest's sums, of (length, CRC-32) in the file's order; none crosses a chunk's end."""
    sums: list[str] = []
    total, filled = 0, 0
    for length, value in pieces:
        total = combined(total, value, length) if filled else value
        filled += length
        if filled == layout.CHUNK_BYTES:
            sums.append(f"{total:08x}")
            filled = 0
    return [*sums, f"{total:08x}"] if filled else sums


def file_sums(fd: int, size: int) -> list[str]:
    """The sums of a file as it lies on disk. Raises OSError, also when it ends early."""
    sums = []
    buffer = bytearray(min(layout.CHUNK_BYTES, max(1, size)))
    for start in range(0, size, layout.CHUNK_BYTES):
        view = memoryview(buffer)[: min(layout.CHUNK_BYTES, size - start)]
        got = 0
        while got < len(view):
            read = os.preadv(fd, [view[got:]], start + got)
            if not read:
                raise OSError(5, f"it ends at byte {start + got} of {size}")
            got += read
        sums.append(f"{crc32(view):08x}")
    return sums
