"""Keeps the nodes that waiting jobs exclude true to the cluster: repaired and degraded nodes count.

Looks only after the picture of the cluster or the nodes' health changed. What crater set is
replaced, the user's own exclusions stay, and a list that somebody else edited is left alone. No job
is ever cancelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from crater_slurm.config.settings import Reconcile
from crater_slurm.errors import UsageError
from crater_slurm.model.plan import Decision
from crater_slurm.model.queue import QueuedJob
from crater_slurm.placement.reconcile import Act, Judgement, Wanted, judge
from crater_slurm.scheduler.actions import Actor
from crater_slurm.scheduler.health import Board
from crater_slurm.scheduler.planned import Planned
from crater_slurm.scheduler.state import View
from crater_slurm.slurm import hostlist
from crater_slurm.store.records import JobAction
from crater_slurm.store.repository import Store

_KIND = "reconcile"
#: A job submitted while the picture changed may not be in the store at the first look.
_LOOKS = 2
#: A change that Slurm refused so often is not tried again; another one is.
_MOST_FAILURES = 3

#: What planning a job again comes to; None when that can't be told.
Replan = Callable[[Decision, View], Wanted | None]


class Reconciler:
    """Changes waiting jobs after the cluster did, at most so many a minute."""

    needs_excluded = True

    def __init__(
        self,
        settings: Reconcile,
        actor: Actor,
        store: Callable[[], Store],
        replan: Replan,
        board: Callable[[], Board | None] = lambda: None,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """``board`` is what is known of health, ``ready`` whether that is enough to go by."""
        self._settings = settings
        self._actor = actor
        self._open_store = store
        self._replan = replan
        self._board = board
        self._ready = ready
        self._seen: tuple[object, ...] = ()
        self._looks_left = 0
        self._times: deque[float] = deque()

    def wants(self, view: View) -> bool:
        """Whether cluster or health changed since all jobs were looked at, and both are known."""
        board = self._board()
        now = (view.serial, board.grades if board else ())
        if now != self._seen:
            self._seen = now
            self._looks_left = _LOOKS
        return self._settings.enabled and self._looks_left > 0 and self._ready()

    def look(self, planned: Sequence[Planned], view: View) -> None:
        """Bring waiting jobs up to date. Raises StoreError, and looks again the next time."""
        waiting = [p for p in planned if p.job.pending and _as_submitted(p, view)]
        acts = self._open_store().actions(p.decision.id for p in waiting)
        for entry in waiting:
            wanted = self._replan(entry.decision, view)
            if wanted is None:
                continue
            before = acts.get(entry.decision.id, [])
            judgement = judge(_names(entry.job.excluded), _set_by_us(entry, before), wanted)
            if judgement.act is Act.CHANGE:
                action = self._action(entry, judgement, _host_list(wanted))
                if _refused(action, before):
                    continue
                if not self._may_act():
                    return  # the rest has its turn at a later look
                also = {"prefer": ""} if wanted.unprefer else {}
                self._actor.act(action, excluded=action.value, **also)
            elif judgement.act is not Act.LEAVE:
                self._note(entry, judgement, before)
        self._looks_left -= 1

    def _may_act(self) -> bool:
        now = self._actor.clock()
        while self._times and self._times[0] <= now - 60:
            self._times.popleft()
        if len(self._times) >= self._settings.per_minute:
            return False
        self._times.append(now)
        return True

    def _note(self, entry: Planned, judgement: Judgement, before: Sequence[JobAction]) -> None:
        """Once, until something else is the matter."""
        last = next((a for a in reversed(before) if a.kind == _KIND), None)
        if last is None or (last.action, last.message) != (judgement.act.value, judgement.why):
            self._actor.note(self._action(entry, judgement))

    def _action(self, entry: Planned, judgement: Judgement, value: str = "") -> JobAction:
        return JobAction(
            job=entry.job.label,
            plan_id=entry.decision.id,
            user_id=entry.job.user_id,
            time=self._actor.clock(),
            kind=_KIND,
            action=judgement.act.value,
            outcome="begun",
            value=value,
            message=judgement.why,
        )


def _names(text: str | None) -> frozenset[str]:
    """Names of a host list; one that can't be read is nobody's of ours."""
    try:
        return hostlist.names(text or "")
    except UsageError:
        return frozenset({text or ""})


def _host_list(wanted: Wanted) -> str:
    return hostlist.compress(sorted(wanted.excluded))


def _refused(action: JobAction, before: Iterable[JobAction]) -> bool:
    """Whether Slurm refused the same change again and again."""
    same = ("failed", action.job, action.kind, action.value)
    failures = sum(1 for a in before if (a.outcome, a.job, a.kind, a.value) == same)
    return failures >= _MOST_FAILURES


def _set_by_us(entry: Planned, acts: Iterable[JobAction]) -> list[frozenset[str]]:
    """What crater gave the job at submit, and later; tasks of an array share their plan."""
    fields, submitted = entry.decision.fields, entry.decision.submitted
    first = fields.get("exc_nodes", submitted.get("field.exc_nodes", ""))
    later = (a.value for a in acts if a.kind == _KIND and a.outcome in ("begun", "done", "failed"))
    return [_names(first), *(_names(value) for value in later)]


def _as_submitted(entry: Planned, view: View) -> bool:
    """Whether partition and node list are still those that were planned.

    Jobs of scrontab are not: Slurm lets nobody change them.
    """
    job: QueuedJob = entry.job
    submitted = entry.decision.submitted
    partition = submitted.get("field.partition") or view.cluster.default_partition or ""
    return (
        job.excluded is not None
        and submitted.get("kind") != "cron"
        and set(job.partition.split(",")) == set(partition.split(","))
        and _names(job.requested) == _names(submitted.get("field.req_nodes"))
    )
