"""Slurm host lists: ``n[1-3,07],gpu-a[1-2]b[0-1]`` to names and back, numbers padded as written."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache

from crater_slurm.errors import UsageError

#: More names than any cluster has; a longer expansion is a typing error or an attack.
MAX_NAMES = 200_000
#: 10,000 names without a range are some 100 KiB.
_LONGEST = 1 << 18
_TAIL = re.compile(r"^(.*?)([0-9]+)$", re.DOTALL)
#: As many digits as Slurm pads to at most; thousands of them would only fill the memory.
_NUMBER = re.compile(r"[0-9]{1,18}")


def expand(text: str) -> list[str]:
    """Names of a host list in the order written; raises UsageError on a malformed one."""
    if len(text) > _LONGEST:
        raise UsageError(f"a host list of {len(text)} characters, more than {_LONGEST}")
    names: list[str] = []
    for part in _split(text):
        names += _expand_one(part)
        if len(names) > MAX_NAMES:
            raise UsageError(f"the host list {text[:60]!r} has more than {MAX_NAMES} names")
    return names


@lru_cache(maxsize=1024)
def names(text: str) -> frozenset[str]:
    """The set of names; kept, because thousands of jobs name the same nodes. See ``expand``."""
    return frozenset(expand(text))


def _split(text: str) -> list[str]:
    parts: list[str] = []
    depth = 0
    current = ""
    for char in text.strip():
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
            continue
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise UsageError(f"brackets do not match in the host list {text[:80]!r}")
        current += char
    if depth:
        raise UsageError(f"a bracket is never closed in the host list {text[:80]!r}")
    return [p.strip() for p in [*parts, current] if p.strip()]


def _expand_one(part: str) -> list[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)
    choices: list[list[str]] = []
    total = 1
    for i, piece in enumerate(pieces):
        values = _ranges(piece, part) if i % 2 else [piece]
        total *= len(values)
        if total > MAX_NAMES:
            raise UsageError(f"the host list {part[:60]!r} has more than {MAX_NAMES} names")
        choices.append(values)
    return ["".join(combination) for combination in itertools.product(*choices)]


def _ranges(text: str, part: str) -> list[str]:
    values: list[str] = []
    for piece in text.split(","):
        first, dash, last = piece.partition("-")
        if not _NUMBER.fullmatch(first) or (dash and not _NUMBER.fullmatch(last)):
            raise UsageError(f"{piece[:40]!r} is no range in the host list {part[:80]!r}")
        low, high = int(first), int(last or first)
        if high < low or high - low > MAX_NAMES:
            raise UsageError(f"the range {piece!r} in {part[:80]!r} is backwards or too long")
        values += [f"{number:0{len(first)}d}" for number in range(low, high + 1)]
    return values


def compress(names: Iterable[str]) -> str:
    """The host list of the names, ranges folded on the last number; ``""`` for none."""
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    plain: list[str] = []
    for name in names:
        match = _TAIL.match(name)
        if match:
            digits = match.group(2)
            # Padded numbers (007) only share a range with numbers padded alike.
            width = len(digits) if digits[0] == "0" and len(digits) > 1 else 0
            groups[(match.group(1), width)].append(int(digits))
        else:
            plain.append(name)
    parts = sorted(set(plain))
    for (prefix, width), numbers in sorted(groups.items()):
        ranges = [_format(low, high, width) for low, high in _runs(sorted(set(numbers)))]
        if len(ranges) == 1 and "-" not in ranges[0]:
            parts.append(prefix + ranges[0])
        else:
            parts.append(f"{prefix}[{','.join(ranges)}]")
    return ",".join(parts)


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _format(low: int, high: int, width: int) -> str:
    # A run of zero-padded numbers may grow beyond its padding (098, 099, 100): Slurm pads alike.
    if low == high:
        return f"{low:0{width}d}"
    return f"{low:0{width}d}-{high:0{width}d}"
