"""Keeps a submission off degraded nodes: which are left out, and the words and record of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

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


def steer(board: Board | None, view: View, outcome: Outcome, scope: Scope) -> Steered:
    """What health changes about a plan: nothing, where no degraded node could have run the job."""
    inventory = view.planner.inventory
    grades = board.worst_first(inventory) if board else None
    if board is None or grades is None or not outcome.feasible:
        return NOTHING
    named = inventory.name_set(scope.only or ())
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
