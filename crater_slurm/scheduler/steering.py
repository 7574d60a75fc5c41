"""Keeps a submission off degraded nodes: which are left out, and the words and record of it.

And says what a job may prefer besides. Slurm (22.05 to 26.05) refuses a job whose preferred nodes
alone, busy and down ones too, could never run it, and one that comes to this while it waits is
held for ever by 24.11 and 26.05. So no preference is given, and none is kept, without such nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from crater_slurm.model.job import Job
from crater_slurm.placement.avoid import avoid
from crater_slurm.placement.outcome import Outcome, Scope
from crater_slurm.placement.tally import union
from crater_slurm.scheduler.health import Board, GradedSets
from crater_slurm.scheduler.state import View

#: Nodes that a record tells about one by one.
_MOST_TOLD = 20
#: Needs whose outcome is kept for one state of the board.
_MOST_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Steered:
    """``left_out`` is a node set; ``record`` goes into the decision, ``notes`` to the user."""

    left_out: int = 0
    record: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


NOTHING = Steered()


def steer(
    board: Board | None, view: View, outcome: Outcome, scope: Scope, own: str = ""
) -> Steered:
    """What health changes about a plan: nothing, where no degraded node could have run the job.

    Nodes that the user names are never left out, nor what ``own`` prefers: the user's --prefer.
    """
    inventory = view.planner.inventory
    grades = board.worst_first(inventory) if board else None
    if board is None or grades is None or not outcome.feasible:
        return NOTHING
    named = inventory.name_set(scope.only or ())
    if own:
        matching = view.matching(own)
        named |= inventory.everything if matching is None else matching
    key = (outcome.passed, outcome.need.nodes, named)
    # Users repeat themselves, and putting many nodes into words takes longer than the decision.
    steered = grades.kept.get(key)
    if steered is None:
        if len(grades.kept) >= _MOST_KEPT:
            grades.kept.clear()
        steered = grades.kept[key] = _steer(board, grades, view, outcome, named)
    return cast(Steered, steered)


def _steer(board: Board, grades: GradedSets, view: View, outcome: Outcome, named: int) -> Steered:
    inventory = grades.inventory
    degraded = union(grades.sets) & outcome.passed
    if not degraded:
        return NOTHING
    left_out = avoid(
        outcome.passed, grades.sets, outcome.need.nodes, usable=inventory.usable, named=named
    )
    told = list(_told(board, inventory.names_of(degraded, _MOST_TOLD)))
    record: dict[str, object] = {
        "degraded": told,
        "degraded_nodes": degraded.bit_count(),
        "left_out": view.hostlist(left_out) if left_out else "",
    }
    return Steered(left_out, record, tuple(_notes(view, left_out, degraded, told, bool(named))))


def _told(board: Board, names: list[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        score = board.judged[name].score
        worst = [
            {"name": t.name, "value": round(t.value, 4), "seen": t.seen, "threshold": t.threshold}
            for t in score.worst()
        ]
        yield {"node": name, "score": round(score.value, 4), "worst": worst}


def _notes(
    view: View, left_out: int, degraded: int, told: list[dict[str, Any]], named: bool
) -> Iterator[str]:
    worst = told[0]["worst"]
    seen = f" ({told[0]['node']}: {worst[0]['seen']})" if worst else ""
    if left_out:
        are = "is" if left_out.bit_count() == 1 else "are"
        yield f"{view.hostlist(left_out)} {are} degraded and left out{seen}"
    if kept := degraded & ~left_out:
        why = "your options name nodes" if named else "too few other nodes could run this job"
        are = "is" if kept.bit_count() == 1 else "are"
        yield f"{view.hostlist(kept)} {are} degraded and may still be chosen: {why}{seen}"


def preference(view: View, outcome: Outcome, job: Job, scope: Scope, left_out: int) -> str:
    """The node features that the job may prefer; none where Slurm might refuse it for them."""
    # What the user's own gres leave of the nodes is Slurm's to know, and so is how a job fits that
    # is kept on sockets. Where cores or memory are scarce, Slurm's own count of a node may be the
    # tighter one: then nodes count that have more than enough by it.
    scarce = any(c.failed_nodes for c in outcome.conditions if c.name in ("cpus", "memory"))
    together = outcome.placement is not None and outcome.placement.domains
    # A job that is to start at once or not at all is tried on the preferred nodes alone.
    if not outcome.prefer or job.gres or together or job.immediate:
        return ""
    if scarce:
        need, inventory = outcome.need, view.planner.inventory
        left_out |= inventory.everything & ~inventory.roomy(need.cpus or 1, need.memory_mib or 0)
    return outcome.prefer if lasts(view, outcome.prefer, outcome, scope, left_out) else ""


def lasts(
    view: View,
    expression: str,
    outcome: Outcome,
    scope: Scope,
    left_out: int,
    unread: bool = False,
) -> bool:
    """Whether the nodes of a --prefer that are not excluded could run the job without others.

    ``unread`` is the answer for an expression that can't be judged here.
    """
    inventory = view.planner.inventory
    found = view.matching(expression)
    if found is None:
        return unread
    matching = found & outcome.passed & ~left_out
    named = inventory.name_set(scope.only or ())
    partitions = [inventory.partitions.get(name, 0) for name in scope.partitions] or [matching]
    least = max(outcome.need.nodes, 1)
    return not named & ~matching and all(
        (matching & nodes).bit_count() >= least for nodes in partitions
    )
