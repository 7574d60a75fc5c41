"""Watches max-wait of planned jobs that wait, and takes the steps that the admin allows.

What is due is decided by ``placement.sla``; what was done stands in the store, so a restart takes
no step twice, and a store that is away means that nothing is done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from crater_slurm.config.settings import Sla
from crater_slurm.placement import sla
from crater_slurm.scheduler.actions import Actor
from crater_slurm.scheduler.planned import Planned
from crater_slurm.scheduler.state import View
from crater_slurm.store.records import JobAction
from crater_slurm.store.repository import Store

_KIND = "sla"


def policy(settings: Sla) -> sla.Policy:
    """The admin's limits as placement knows them."""
    return sla.Policy(
        act_at=settings.act_at,
        steps=settings.steps,
        priority_boost=settings.priority_boost,
        priority_limit=settings.priority_limit,
        qos=settings.qos,
        least_wait_seconds=settings.least_wait_seconds,
        jobs_per_user=settings.jobs_per_user,
    )


class SlaWatch:
    """Looks at the queue when it is told to; ``late`` counts promises that are broken now."""

    needs_excluded = False

    def __init__(self, settings: Sla, actor: Actor, store: Callable[[], Store]) -> None:
        self._enabled = settings.enabled
        self._policy = policy(settings)
        self._actor = actor
        self._open_store = store
        self.late = 0

    def wants(self, view: View) -> bool:
        return self._enabled

    def look(self, planned: Sequence[Planned], view: View) -> None:
        """Take the steps that are due. Raises StoreError."""
        now = self._actor.clock()
        waiting = [(p, _promise(p)) for p in planned if p.job.pending and _promise(p)]
        self.late = sum(
            1
            for p, seconds in waiting
            if (breaks_at := sla.standing(p.job, seconds, now).breaks_at) and breaks_at < now
        )
        if not waiting:
            return
        acts = self._open_store().actions(p.decision.id for p, _ in waiting)
        watched = [
            sla.Watched(
                job=p.job, promise_seconds=seconds, taken=self._taken(p, acts.get(p.decision.id))
            )
            for p, seconds in waiting
        ]
        for step in sla.due(watched, now, self._policy):
            owner = next(p for p, _ in waiting if p.job.owns(step.label))
            self._take(step, owner, now)

    def _taken(
        self, planned: Planned, acts: Iterable[JobAction] | None
    ) -> dict[str, frozenset[str]]:
        """Steps already taken for this entry; those of a dry run count during a dry run only."""
        taken: dict[str, set[str]] = defaultdict(set)
        for act in acts or ():
            counts = self._actor.dry_run or act.outcome != "dry_run"
            if act.kind == _KIND and counts and planned.job.owns(act.job):
                taken[act.job].add(act.action)
        return {label: frozenset(steps) for label, steps in taken.items()}

    def _take(self, step: sla.Step, planned: Planned, now: float) -> None:
        self._actor.act(
            JobAction(
                job=step.label,
                plan_id=planned.decision.id,
                user_id=planned.job.user_id,
                time=now,
                kind=_KIND,
                action=step.kind,
                outcome="begun",
                value=f"nice {step.value}" if step.kind == sla.PRIORITY else f"qos {step.value}",
                message=step.why,
            ),
            **{"nice" if step.kind == sla.PRIORITY else "qos": step.value},
        )


def _promise(planned: Planned) -> float:
    """max-wait in seconds; 0 for a job without."""
    value = planned.decision.request.get("max_wait_seconds")
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0
