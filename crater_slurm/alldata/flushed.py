"""Checkpoints on their way to the destination, put together from what nodes tell. Pure.

Each node tells once that its part of a step is there. The platform is told when the parts hold
every rank of the step: until then it is no checkpoint that anything could be loaded from. A part
that is told again changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
_RUN = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_MOST_STEPS = 64
_MOST_NODES = 10_000
_MOST_RANKS = 10**6
_LONGEST_DESTINATION = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """A node's part of a step that is at the destination: ``ranks`` of ``world`` in all."""

    node: str
    name: str
    step: int
    run: str
    ranks: int
    world: int
    bytes: int
    destination: str

    @property
    def key(self) -> str:
        return f"{self.name}/{self.step}/{self.run}"


def part(node: str, grant: Mapping[str, Any]) -> Part | None:
    """What a node's report tells; None when it makes no sense."""
    name, run, destination = (grant.get(key) for key in ("name", "run", "destination"))
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        return None
    if not (isinstance(run, str) and _RUN.fullmatch(run)):
        return None
    if not (isinstance(destination, str) and 0 < len(destination) <= _LONGEST_DESTINATION):
        return None
    if not destination.isprintable():
        return None
    world = _whole(grant.get("world"), 1, _MOST_RANKS)
    ranks = _whole(grant.get("ranks"), 1, world or 0)
    step = _whole(grant.get("step"), 0, 10**15 - 1)
    size = _whole(grant.get("bytes"), 0, 1 << 62)
    if world is None or ranks is None or step is None or size is None:
        return None
    return Part(node, name, step, run, ranks, world, size, destination)


def _whole(value: object, least: int, most: int) -> int | None:
    return value if type(value) is int and least <= value <= most else None


def with_part(
    resources: Mapping[str, Any], one: Part
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The task's resources with a part, and the callback's ``checkpoint`` if it was the last one
    of its step. Of each step that was told only that is kept."""
    steps = dict(resources.get("flushed", {}))
    known = steps.get(one.key, {})
    if known is True or one.node in known or len(known) >= _MOST_NODES:
        return dict(resources), None
    parts = known | {one.node: [one.ranks, one.bytes]}
    whole = sum(ranks for ranks, _ in parts.values()) >= one.world
    steps[one.key] = True if whole else parts
    while len(steps) > _MOST_STEPS:
        del steps[next(iter(steps))]
    told = None
    if whole:
        told = {
            "name": one.name,
            "step": one.step,
            "run": one.run,
            "bytes": sum(size for _, size in parts.values()),
            "destination": one.destination,
            "nodes": sorted(parts),
        }
    return dict(resources) | {"flushed": steps}, told
