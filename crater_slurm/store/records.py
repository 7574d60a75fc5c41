"""What is kept about jobs and nodes besides profiles: grants and events, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a job really got on one node; ``time`` is seconds since 1970, ``got`` JSON data."""

    job_id: int
    plan_id: str
    node: str
    time: float
    got: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a node; ``kind`` is one word, ``message`` one sentence.

    Where a value of the profile changed, ``path`` names it, with both values as people read them.
    """

    node: str
    time: float
    kind: str
    message: str
    path: str | None = None
    old: str | None = None
    new: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """How many entries went because they were old."""

    decisions: int
    grants: int
    events: int
    observations: int
