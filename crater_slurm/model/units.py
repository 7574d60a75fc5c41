"""Quantities as people write them, and the units that field names carry.

GB is 10^9 bytes and GiB 2^30; a value without a unit has the unit of its field. Nothing here
rounds in the user's disfavour: sizes asked for are rounded up to the field's unit.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "pib": 2**50,
    # Slurm's own single letters are powers of 1024.
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "p": 2**50,
}
_COUNT = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
#: Model sizes are written in B where counts elsewhere are in G.
_PARAMETERS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_TIME_US = {
    "ns": Fraction(1, 1000),
    "us": Fraction(1),
    "µs": Fraction(1),
    "ms": Fraction(1000),
    "s": Fraction(10**6),
}
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
#: At most 18 digits a side: more is a typing error, and too large for a float.
_NUMBER = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-zµ/]*)\s*")
_CLOCK = re.compile(r"(?:([0-9]{1,6})-)?([0-9]{1,9}(?::[0-9]{1,2}){1,2})")

#: Unit of a profile, health or request field, told by the end of its name.
SUFFIXES: tuple[tuple[str, str], ...] = (
    ("_gb_s", "GB/s"),
    ("_mb_s", "MB/s"),
    ("_gt_s", "GT/s"),
    ("_mt_s", "MT/s"),
    ("_kib", "KiB"),
    ("_mib", "MiB"),
    ("_gib", "GiB"),
    ("_gb", "GB"),
    ("_ns", "ns"),
    ("_us", "µs"),
    ("_ms", "ms"),
    ("_seconds", "s"),
    ("_percent", "%"),
    ("_c", "°C"),
    ("_w", "W"),
    ("_iops", "IOPS"),
    ("_ratio", "1"),
    ("_count", "1"),
)


def unit_of(field: str) -> str:
    """Unit that a field's name carries (``memory_mib`` -> ``MiB``); empty when it has none."""
    return split_unit(field)[1]


def split_unit(field: str) -> tuple[str, str]:
    """A field's name without its unit, and the unit: ``memory_mib`` is ``memory`` in ``MiB``."""
    for suffix, unit in SUFFIXES:
        if field.endswith(suffix) or field == suffix[1:]:
            return field.removesuffix(suffix), unit
    return field, ""


def _split(text: str, what: str, example: str) -> tuple[Fraction, str]:
    match = _NUMBER.fullmatch(text)
    if not match:
        raise ValueError(f"{what} must be a number with an optional unit, such as {example}")
    return Fraction(match.group(1)), match.group(2)


def parse_bytes(text: str, default_unit: str) -> int:
    """Bytes of a size such as ``16GiB``, ``16G`` (Slurm's binary letter), ``40GB`` or ``512``.

    ``default_unit`` (``MiB``, ``GB`` ...) applies to a bare number. Rounded up to whole bytes.
    Raises ValueError with the units that are known.
    """
    number, unit = _split(text, "a size", "16GiB")
    factor = _BYTES.get((unit or default_unit).lower())
    if factor is None:
        raise ValueError(
            f"unknown unit {unit[:40]!r}; sizes take B, KB..PB, KiB..PiB or K, M, G, T, P"
        )
    return math.ceil(number * factor)


def parse_mib(text: str) -> int:
    """MiB of a size; a bare number is MiB. Rounded up."""
    return -(-parse_bytes(text, "MiB") // 2**20)


def parse_gb(text: str) -> int:
    """GB (10^9 bytes) of a size; a bare number is GB. Rounded up."""
    return -(-parse_bytes(text, "GB") // 10**9)


def parse_bandwidth_gb_s(text: str) -> float:
    """GB/s of a bandwidth such as ``140``, ``140GB/s`` or ``800MB/s``; a bare number is GB/s."""
    number, unit = _split(text, "a bandwidth", "140GB/s")
    unit = unit.removesuffix("/s").removesuffix("ps")
    if unit.endswith("b") and unit.lower() != unit.upper() and unit[-1] == "b":
        # 140Gb/s is bits to everyone but the one who wrote it: ask instead of guessing.
        raise ValueError(
            f"{text[:40]!r} reads as bits; write GB/s (bytes, 10^9) for a memory bandwidth"
        )
    factor = _BYTES.get((unit or "GB").lower())
    if factor is None:
        raise ValueError(
            f"unknown unit in {text[:40]!r}; bandwidths take MB/s, GB/s, TB/s, MiB/s or GiB/s"
        )
    return float(number * factor / 10**9)


def parse_count(text: str) -> int:
    """A plain count with an optional decimal letter: ``800000``, ``800k``, ``1.2M``."""
    number, unit = _split(text, "a count", "800k")
    factor = _COUNT.get(unit.lower())
    if factor is None:
        raise ValueError(f"unknown unit {unit[:40]!r}; counts take k, M or G (10^3, 10^6, 10^9)")
    value = number * factor
    if value.denominator != 1:
        raise ValueError(f"{text[:40]!r} is not a whole number")
    return int(value)


def parse_parameters(text: str) -> int:
    """Parameters of a model: ``8.03B``, ``350M``, or a plain number."""
    number, unit = _split(text, "a model's size", "8.03B")
    factor = _PARAMETERS.get(unit.lower())
    if factor is None:
        raise ValueError(
            f"unknown unit {unit[:40]!r}; model sizes take K, M, B or T (10^3 to 10^12)"
        )
    return round(number * factor)


def parse_latency_us(text: str) -> float:
    """Microseconds of a latency such as ``100``, ``100us`` or ``0.2ms``; a bare number is µs."""
    number, unit = _split(text, "a latency", "100us")
    factor = _TIME_US.get((unit or "us").lower())
    if factor is None:
        raise ValueError(f"unknown unit {unit[:40]!r}; latencies take ns, us, ms or s")
    return float(number * factor)


def parse_seconds(text: str) -> int:
    """Seconds of ``1800``, ``30m``, ``2h``, ``HH:MM:SS``, ``MM:SS`` or ``D-HH:MM:SS``."""
    if match := _CLOCK.fullmatch(text.strip()):
        days, clock = match.groups()
        parts = [int(p) for p in clock.split(":")]
        if len(parts) == 2 and days:  # Slurm's D-HH:MM
            parts.append(0)
        seconds = 0
        for part in parts:
            seconds = seconds * 60 + part
        return seconds + int(days or 0) * 86400
    number, unit = _split(text, "a time", "30m or 00:30:00")
    factor = _SECONDS.get((unit or "s").lower())
    if factor is None:
        raise ValueError(f"unknown unit {unit[:40]!r}; times take s, m, h, d or HH:MM:SS")
    return math.ceil(number * factor)


def format_mib(mib: float) -> str:
    """``40960`` -> ``40 GiB``: the largest binary unit that keeps at most one decimal."""
    for unit, size in (("TiB", 2**20), ("GiB", 2**10)):
        if mib >= size:
            return f"{mib / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{mib:g} MiB"


def format_number(value: float) -> str:
    """A number as short as it can be without losing what a reader compares: ``142``, ``138.7``."""
    return f"{value:,.2f}".rstrip("0").rstrip(".") if value != int(value) else f"{int(value):,}"
