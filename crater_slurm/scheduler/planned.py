"""Which jobs in the queue are crater's, proven by their tokens, and what was decided for each.

A comment is the user's to edit, so only a token that verifies counts, for its own user; a token
that was copied into another job counts for the first job alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from crater_slurm.model import token
from crater_slurm.model.plan import Decision, Mode, Verdict
from crater_slurm.model.queue import QueuedJob
from crater_slurm.store.repository import Store

#: What a comment proves: the plan's id, and whether it is an array's.
_Proof = tuple[str, bool] | None


@dataclass(frozen=True, slots=True)
class Planned:
    """A job and its decision, without the parts of it that only people read."""

    job: QueuedJob
    decision: Decision


class PlannedJobs:
    """Joins queue and decisions. Decisions of jobs that are still queued stay in memory."""

    def __init__(self, keys: Callable[[], list[bytes]], store: Callable[[], Store]) -> None:
        self._keys = keys
        self._open_store = store
        self._decisions: dict[str, Decision] = {}
        self._verified: dict[tuple[str, int, str], _Proof] = {}
        self._verified_by: list[bytes] = []

    def of(self, jobs: Iterable[QueuedJob], cluster: str) -> list[Planned]:
        """Jobs that crater planned and changed (mode enforce). Raises StoreError."""
        found = self._proven(jobs, cluster)
        names = {plan_id for _, plan_id in found}
        self._decisions = {k: d for k, d in self._decisions.items() if k in names}
        if missing := sorted(names - self._decisions.keys()):
            fresh = self._open_store().decisions_of(missing)
            self._decisions |= {key: _essence(one) for key, one in fresh.items()}
        planned = []
        for job, plan_id in found:
            decision = self._decisions.get(plan_id)
            if decision is not None and _in_force(decision, job):
                planned.append(Planned(job, decision))
        return planned

    def _proven(self, jobs: Iterable[QueuedJob], cluster: str) -> list[tuple[QueuedJob, str]]:
        keys = self._keys()
        known = self._verified if keys == self._verified_by else {}
        self._verified, self._verified_by = {}, keys
        owners: dict[str, int] = {}
        found = []
        for job in sorted(jobs, key=lambda job: job.id):
            proof = (job.comment, job.user_id, cluster)
            plan = known[proof] if proof in known else _verify(*proof, keys)
            self._verified[proof] = plan
            if plan is None or (job.array_id is not None and not plan[1]):
                continue
            group = job.array_id or job.id
            if owners.setdefault(plan[0], group) == group:
                found.append((job, plan[0]))
        return found


def _verify(comment: str, user_id: int, cluster: str, keys: list[bytes]) -> _Proof:
    try:
        signed = token.verify(comment, keys, user_id, cluster) if keys else None
    except token.TokenError:
        return None  # the node daemon reports it when the job starts
    return (signed.plan.id, signed.array) if signed else None


def _in_force(decision: Decision, job: QueuedJob) -> bool:
    enforced = decision.verdict is Verdict.PLANNED and decision.mode is Mode.ENFORCE
    return enforced and decision.user_id == job.user_id


def _essence(decision: Decision) -> Decision:
    """A tenth of its size: thousands of jobs may wait."""
    fields = {k: v for k, v in decision.fields.items() if k != "comment"}
    return dataclasses.replace(
        decision,
        options={},
        conditions=(),
        excluded=(),
        passed_nodes="",
        fields=fields,
        environment={},
        messages=(),
    )
