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
class JobAction:
    """What crater-scheduler did to a job after its submission, or would have done.

    ``job`` is the label that Slurm's commands take (123, 123_4); ``kind`` who acted (sla,
    reconcile), ``action`` what, ``value`` what was set. ``outcome`` is one of OUTCOMES.
    """

    job: str
    plan_id: str
    user_id: int
    time: float
    kind: str
    action: str
    outcome: str
    value: str = ""
    message: str = ""


#: begun: written before Slurm is asked, so that a crash never makes a step happen twice.
OUTCOMES = ("begun", "done", "failed", "dry_run", "noted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """How many entries went because they were old."""

    decisions: int
    grants: int
    events: int
    observations: int
    job_actions: int
