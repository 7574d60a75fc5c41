"""Slurm's gres and TRES strings: ``gpu:a100:2(S:0-1),membw:142`` in all spellings of 22 to 26.

22.05 writes ``gres:gpu:2`` where 24.11 writes ``gres/gpu:2``; a request may add ``=`` for ``:``,
counts may carry K, M, G, T, P (powers of 1024), and node lines carry socket lists in brackets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SUFFIX = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
_COUNT = re.compile(r"^(\d+)([kKmMgGtTpP]?)$")
_LONGEST = 16384
_BRACKETS = re.compile(r":?\(null\)|\([^()]*\)")


@dataclass(frozen=True, slots=True)
class Gres:
    """One gres of a string: name, type (None when untyped) and count."""

    name: str
    type: str | None
    count: int


def parse(text: str) -> list[Gres]:
    """Gres of a string; ``(null)`` and ``""`` are none. ValueError names the part that is wrong.

    Elements that are no gres (``cpu:4`` of --tres-per-task, licences) are left out.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"a gres string of {len(text)} characters, more than {_LONGEST}")
    found: list[Gres] = []
    for part in _BRACKETS.sub("", text).split(","):
        part = part.strip()
        if not part or part == "null":
            continue
        for prefix in ("gres/", "gres:"):
            if part.startswith(prefix):
                part = part[len(prefix) :]
                break
        else:
            if re.match(r"^(cpu|mem|node|billing|energy|license|bb|fs)[:=/]", part):
                continue
        found.append(_one(part))
    return found


def _one(part: str) -> Gres:
    words = re.split(r"[:=]", part)
    count = _COUNT.match(words[-1]) if len(words) > 1 else None
    if count:
        words = words[:-1]
        number = int(count.group(1)) * _SUFFIX[count.group(2).lower()]
    else:
        number = 1
    if not 1 <= len(words) <= 2 or not all(words):
        raise ValueError(f"{part[:80]!r} is no gres; write name[:type][:count]")
    return Gres(words[0], words[1] if len(words) == 2 else None, number)


def totals(text: str) -> dict[str, int]:
    """Counts by name, types added up: ``gpu:a100:2,gpu:h100:1`` -> ``{"gpu": 3}``."""
    result: dict[str, int] = {}
    for gres in parse(text):
        result[gres.name] = result.get(gres.name, 0) + gres.count
    return result


def format_request(entries: list[Gres]) -> str:
    """Value for ``--gres`` or ``job_desc.gres``; the plugin adds the version's own prefix."""
    return ",".join(
        f"{g.name}:{g.type}:{g.count}" if g.type else f"{g.name}:{g.count}" for g in entries
    )
