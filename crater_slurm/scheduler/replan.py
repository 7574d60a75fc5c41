"""Plans a job again from its decision record, on the cluster as it is now.

The record holds what the filter sent, so the answer is the one that the same submission would get
today. Slurm can't be given a pending job's whole plan anew, only the nodes to avoid: what else
would differ is said and not done.
"""

from __future__ import annotations

from collections.abc import Collection

from crater_slurm.errors import UsageError
from crater_slurm.model.job import Job
from crater_slurm.model.plan import Decision
from crater_slurm.model.request import Request
from crater_slurm.placement.outcome import Outcome
from crater_slurm.placement.reconcile import Wanted
from crater_slurm.scheduler import steering
from crater_slurm.scheduler.decide import scope_of
from crater_slurm.scheduler.health import Board
from crater_slurm.scheduler.predicting import expected_of
from crater_slurm.scheduler.state import View
from crater_slurm.slurm import gres, hostlist, levers
from crater_slurm.slurm.fields import job_from_fields

#: Fields of the answer that are no request: the list itself, the token, what is only preferred
#: and keeps no job waiting, and flags apart.
_APART = {"exc_nodes", "comment", "prefer", "flags"}


def wanted(
    decision: Decision, view: View, consume: Collection[str], board: Board | None = None
) -> Wanted | None:
    """The nodes that the decision's job must not get now; None when that can't be told.

    Degraded nodes of the ``board`` are left out as at submit, as far as others can take the job.
    Tried first as it was submitted, then with the GPU type that it was given at submit: where
    another one came to be preferred, the job still waits for its own.
    """
    if not decision.submitted:
        return None
    given = decision.fields.get("gres")
    pinned = {k: v for k, v in decision.submitted.items() if k != "field.tres_per_node"}
    pinned["field.gres"] = given or ""
    try:
        found = _planned(decision, decision.submitted, view, consume, board)
        if found is None or not found.feasible or found.same or not _typed(given or ""):
            return found
        return _planned(decision, pinned, view, consume, board) or found
    except (ValueError, TypeError, UsageError):
        return None  # a record of a newer version, or nodes that Slurm no longer has in words


def _planned(
    decision: Decision,
    message: dict[str, str],
    view: View,
    consume: Collection[str],
    board: Board | None,
) -> Wanted | None:
    job = job_from_fields(message)
    request = Request(**decision.request)  # type: ignore[arg-type]
    scope = scope_of(job, view.cluster.time)
    expected = expected_of(decision.prediction)
    outcome = view.planner.plan(decision.id, request, job, scope, expected)
    if not outcome.known:
        return None
    if not outcome.feasible or outcome.placement is None:
        return Wanted(feasible=False, why=_refusal(outcome))
    changes = levers.changes(
        outcome.placement,
        job,
        message,
        gres_names=view.cluster.gres_types & frozenset(consume),
        gres_style=message.get("gres_style", "/"),
    )
    different = _different(decision, changes, pinned=message is not decision.submitted)
    own = message.get("field.prefer", "")
    left_out = steering.steer(board, view, outcome, scope, own).left_out
    without = hostlist.names(view.hostlist(outcome.failed | left_out))
    why = f"it would be planned otherwise now ({', '.join(different)})" if different else ""
    given = decision.fields.get("prefer", "")
    bars = bool(own or given) and not steering.lasts(view, own or given, outcome, scope, left_out)
    return Wanted(
        excluded=_own(job) | without if job.exclude else without,
        same=not different,
        why=why,
        against="Slurm would hold it, for the sake of its own --prefer" if own and bars else "",
        unprefer=bars and not own,
    )


def _typed(gres_text: str) -> bool:
    """Whether it names a GPU type; without one Slurm might give a GPU that does not qualify."""
    return any(entry.name == "gpu" and entry.type for entry in gres.parse(gres_text))


def _own(job: Job) -> frozenset[str]:
    return hostlist.names(job.exclude) if job.exclude else frozenset()


def _different(decision: Decision, changes: levers.Changes, *, pinned: bool) -> list[str]:
    """Names of the fields that Slurm would be given otherwise than at submit."""
    apart = _APART | ({"gres"} if pinned else set())
    before = {k: v for k, v in decision.fields.items() if k not in apart}
    now = {k: v for k, v in changes.fields.items() if k not in apart}
    names = {k for k in before.keys() | now.keys() if before.get(k) != now.get(k)}
    if decision.fields.get("flags", "") != ",".join(changes.flags):
        names.add("flags")
    return sorted(names)


def _refusal(outcome: Outcome) -> str:
    if outcome.nearest_node:
        return (
            "no node can run it any more; nearest is "
            f"{outcome.nearest_node}: {'; '.join(outcome.nearest_have)}"
        )
    return f"only {outcome.passed.bit_count()} of its {outcome.need.nodes} nodes can run it now"
