"""Sets of CPU or NUMA node numbers in the kernel's list format (``0-7,64-71``)."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANGE = re.compile(r"^(\d+)(?:-(\d+)(?::(\d+)/(\d+))?)?$")
#: The kernel's own ceiling on CPU numbers is 8192; anything above is a typing error or an attack.
_LIMIT = 65536


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Numbers of a kernel cpulist, sorted and unique; ``""`` is the empty set.

    Raises ValueError when a range runs backwards, a number is absurd or the text is no list.
    """
    numbers: set[int] = set()
    for part in text.strip().split(","):
        part = part.strip()
        if not part:
            continue
        match = _RANGE.match(part)
        if not match:
            raise ValueError(f"{part[:40]!r} is no cpulist range; write it like 0-7,64-71")
        first = int(match.group(1))
        last = int(match.group(2) or first)
        if last < first or last >= _LIMIT:
            raise ValueError(f"the range {part[:40]!r} runs backwards or beyond {_LIMIT - 1}")
        if match.group(3):  # the kernel's 0-63:1/2 (used/group)
            used, group = int(match.group(3)), int(match.group(4))
            if not 0 < used <= group:
                raise ValueError(f"the group in {part[:40]!r} must satisfy 0 < used <= size")
            numbers.update(n for n in range(first, last + 1) if (n - first) % group < used)
        else:
            numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def format_cpulist(numbers: Iterable[int]) -> str:
    """The shortest kernel cpulist of the numbers; ``""`` for none."""
    parts: list[str] = []
    ordered = sorted(set(numbers))
    start = 0
    for i, number in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != number + 1:
            first = ordered[start]
            parts.append(str(first) if first == number else f"{first}-{number}")
            start = i + 1
    return ",".join(parts)
