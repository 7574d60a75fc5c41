"""What planning works on and comes to: the nodes that a job's options leave, and the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from crater_slurm.model.plan import Condition, NodeScore, Placement, Plan
from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement.need import Need
from crater_slurm.placement.score import Ranked
from crater_slurm.placement.sharing import Share

FeaturePredicate = Callable[[frozenset[str]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which nodes the user's own options leave: partitions, -w, -x, --constraint, --reservation.

    ``now`` is the time of the submission in seconds since 1970.
    """

    partitions: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    features: FeaturePredicate | None = None
    reservations: tuple[str, ...] = ()
    now: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of planning. ``plan`` is None when the job is refused (``feasible`` False).

    ``passed`` and ``failed`` are node sets of the inventory, ``unknown`` those of the failed that
    have shards and no profile, ``preferred`` those that suit best (0: none more than another), of
    which ``prefer`` names any by its features; ``known`` False means that no profile covers the
    nodes in question, so that crater has no say.
    """

    need: Need
    feasible: bool
    known: bool = True
    plan: Plan | None = None
    passed: int = 0
    failed: int = 0
    unknown: int = 0
    ranked: tuple[Ranked, ...] = ()
    scores: tuple[NodeScore, ...] = ()
    preferred: int = 0
    prefer: str = ""
    placement: Placement | None = None
    domains: int = 0
    conditions: tuple[Condition, ...] = ()
    excluded: tuple[tuple[str, int, str], ...] = ()
    nearest_node: str = ""
    nearest_have: tuple[str, ...] = ()
    nearest_profile: NodeProfile | None = None
    smallest_change: tuple[str, ...] = ()
    share: Share | None = None
    notes: tuple[str, ...] = ()
    #: What is good to know and asks for nothing: kept for explain, not said at submission.
    facts: tuple[str, ...] = ()
