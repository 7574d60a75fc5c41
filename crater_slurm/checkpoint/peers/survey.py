"""Which checkpoint is the newest that the job's nodes hold together, and which part lies where.

Pure: lists of what each node said, which may be wrong or hostile, become one choice or none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from crater_slurm.checkpoint.peers.ticket import is_node
from crater_slurm.job import layout
from crater_slurm.job.layout import LayoutError

_MOST_HEADS = 10000


@dataclass(frozen=True, slots=True)
class Have:
    """A part that ``node`` holds: its own (``owner`` is ""), or its copy of the owner's."""

    node: str
    owner: str
    name: str
    step: int
    run: str
    world_size: int
    time: float
    ranks: frozenset[int]

    @property
    def step_key(self) -> tuple[str, int, str, int]:
        return self.name, self.step, self.run, self.world_size

    @property
    def origin(self) -> str:
        """The node that saved it."""
        return self.owner or self.node


@dataclass(frozen=True, slots=True)
class Choice:
    """A complete checkpoint, and for each of its ranks who has it, the best first."""

    name: str
    step: int
    run: str
    time: float
    sources: dict[int, tuple[Have, ...]]


def read_heads(node: str, data: bytes) -> list[Have]:
    """What a node said it has; entries that can't be true are left out."""
    try:
        listed = json.loads(data)
    except (ValueError, RecursionError):
        return []
    found = []
    for entry in listed[:_MOST_HEADS] if isinstance(listed, list) else ():
        try:
            have = Have(
                node,
                entry["owner"],
                entry["name"],
                entry["step"],
                entry["run"],
                entry["world_size"],
                float(entry["time"]),
                frozenset(entry["ranks"]),
            )
            _check(have)
        except (KeyError, TypeError, ValueError, LayoutError):
            continue
        found.append(have)
    return found


def _check(have: Have) -> None:
    layout.step_name(have.step, have.name)
    if not isinstance(have.run, str) or not isinstance(have.world_size, int):
        raise ValueError("no run, or no size")
    if have.owner != "" and not is_node(have.owner):
        raise ValueError("no node's name")
    if not have.ranks or not all(
        type(rank) is int and 0 <= rank < have.world_size for rank in have.ranks
    ):
        raise ValueError("ranks that can't be")


def choose(
    haves: Iterable[Have], here: str, name: str, step: int | None = None, run: str | None = None
) -> Choice | None:
    """The newest complete checkpoint of a name (and step, and run)."""
    fits = (c for c in complete(haves, here, name) if step in (None, c.step))
    return next((c for c in fits if run in (None, c.run)), None)


def complete(haves: Iterable[Have], here: str, name: str) -> list[Choice]:
    """All complete checkpoints of a name, the newest first; by time, for a run may go back.

    Parts on ``here`` come first, then parts at their owners, then copies.
    """
    steps: dict[tuple[str, int, str, int], list[Have]] = {}
    for have in haves:
        if have.name == name:
            steps.setdefault(have.step_key, []).append(have)
    newest = sorted(
        steps.values(), key=lambda parts: (max(p.time for p in parts), parts[0].step), reverse=True
    )
    found = []
    for parts in newest:
        sources = _by_rank(parts, here)
        if len(sources) == parts[0].world_size:
            saved = max(part.time for part in parts)
            found.append(Choice(name, parts[0].step, parts[0].run, saved, sources))
    return found


def _by_rank(parts: Sequence[Have], here: str) -> dict[int, tuple[Have, ...]]:
    """Several saves of one step in one run count by their time: the newest of a node is meant."""
    ordered = sorted(parts, key=lambda p: (-p.time, p.node != here, p.owner != "", p.node))
    newest: dict[str, float] = {}
    for part in ordered:
        newest.setdefault(part.origin, part.time)
    sources: dict[int, list[Have]] = {}
    for part in ordered:
        if newest[part.origin] == part.time:
            for rank in part.ranks:
                sources.setdefault(rank, []).append(part)
    return {rank: tuple(found) for rank, found in sources.items()}


def needed(choice: Choice, ranks: Iterable[int] | None) -> list[tuple[Have, ...]]:
    """For each part that is needed to have these ranks (None: all), who can give it."""
    left = set(choice.sources if ranks is None else ranks) & choice.sources.keys()
    parts = []
    while left:
        sources = choice.sources[min(left)]
        parts.append(sources)
        left -= sources[0].ranks  # has at least the rank it is a source of
    return parts
