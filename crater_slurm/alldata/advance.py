"""Brings one task to what Slurm says of its job: the steps, their callbacks, what the job got.

A change is worked out from the task as it was read and counts only if it still is that: with two
schedulers one of them changes it, and the other finds nothing new the next time.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from crater_slurm.alldata import payload
from crater_slurm.alldata.ends import Ends
from crater_slurm.alldata.flushed import Part, with_part
from crater_slurm.alldata.states import State, Step, between, steps
from crater_slurm.config.alldata import AllData
from crater_slurm.errors import SlurmError
from crater_slurm.slurm import hostlist, job_layout
from crater_slurm.slurm.client import Client
from crater_slurm.slurm.job_layout import JobNode
from crater_slurm.slurm.job_states import JobState
from crater_slurm.store.repository import Store
from crater_slurm.store.task_records import NewCallback, StoredTask

_log = logging.getLogger("crater.alldata.advance")
#: Slurm says how a job ended a moment after its last node did.
_SOON_SECONDS = 1.0
#: So long after a start a node's report of the cpuset is waited for, if its Prolog was told.
_REPORT_SECONDS = 10.0


class Advancer:
    """Changes tasks in the store; ``written`` is called when there is something to deliver."""

    def __init__(
        self,
        settings: AllData,
        store: Callable[[], Store],
        client: Client,
        *,
        written: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._open_store = store
        self._client = client
        self._written = written
        self._clock = clock
        self._ends = Ends(client)

    @property
    def delivery(self) -> str:
        """What a new callback begins as."""
        return "waiting" if self._settings.callback.url else "off"

    def expect(self, forgotten: Sequence[int]) -> None:
        """Ask for the records of jobs that slurmctld does not know, before ``apply``."""
        self._ends.fetch(forgotten)

    def apply(self, task: StoredTask, seen: JobState | None) -> float | None:
        """Bring a task to what Slurm says of its job; None is that it says nothing of it.

        The time at which it is to be looked after again, where nothing has become of it.
        """
        now = self._clock()
        if seen is not None and not _is_of(task, seen):
            seen = None  # Slurm's ids began again: this is somebody else's job
        if seen is None:
            seen = self._ends.of(task, now)
            if seen is None:
                self._mark_gone(task, now)
                return None
        if between(seen):
            return now + _SOON_SECONDS
        if seen.restarts > task.restarts:
            gone = self._ends.was_preempted(seen.job_id, seen.restarts - 1)
            seen = dataclasses.replace(seen, preempted=gone)
        todo = steps(State(task.state), task.restarts, seen)
        if not todo:
            return now + self._settings.look_seconds
        if self._cpuset_is_coming(task, todo, seen, now):
            return now + _SOON_SECONDS
        self._advance(task, todo, seen, now)
        return None

    def _mark_gone(self, task: StoredTask, now: float) -> None:
        """Once may be an accident of a restart; the second time it is looked up for good."""
        gone = dict(task.resources) | {"gone": now}
        change = {"resources": gone, "changed": now, "look": now + self._settings.look_seconds}
        self._open_store().change_task(task, change)

    def _cpuset_is_coming(
        self, task: StoredTask, todo: Iterable[Step], seen: JobState, now: float
    ) -> bool:
        """Whether a node that prepared the job is about to tell its cpuset."""
        if not any(step.state is State.RUNNING for step in todo) or seen.word != "RUNNING":
            return False
        known = _reports(task.resources, seen.restarts).values()
        if not known or any(report.get("cpus") for report in known):
            return False
        return seen.started is not None and now < seen.started + _REPORT_SECONDS

    def _advance(self, task: StoredTask, todo: list[Step], seen: JobState, now: float) -> None:
        resources = dict(task.resources)
        if any(s.state in (State.SCHEDULED, State.RUNNING) for s in todo) and seen.nodes:
            resources["nodes"] = self._nodes(task, seen)
        last = todo[-1]
        callbacks = self._callbacks(task, todo, seen, resources, now)
        changes: dict[str, Any] = {
            "state": last.state.value,
            "restarts": last.restarts,
            "settled": last.state.ended,
            "changed": now,
            "resources": resources,
            "look": None if last.state.ended else now + self._settings.look_seconds,
            "reason": payload.plain(seen.reason),
        }
        if any(step.state is State.RUNNING for step in todo):
            changes["started"] = seen.started
        if last.state.ended:
            changes |= {"ended": seen.ended, "exit_code": seen.exit_code or None}
        if self._open_store().change_task(task, changes, callbacks):
            _log.info(
                "task %s (job %s): %s", task.task_id, task.job_id, ", ".join(s.state for s in todo)
            )
            self._written()

    def _callbacks(
        self,
        task: StoredTask,
        todo: list[Step],
        seen: JobState,
        resources: Mapping[str, Any],
        now: float,
    ) -> list[NewCallback]:
        made = []
        for i, step in enumerate(todo, 1):
            current = step.restarts == seen.restarts
            with_nodes = current and step.state not in (State.REQUEUED, State.REJECTED)
            made.append(
                payload.callback(
                    task,
                    step.state,
                    sequence=task.sequence + i,
                    happened=step.time,
                    now=now,
                    delivery=self.delivery,
                    restarts=step.restarts,
                    nodes=resources.get("nodes") if with_nodes else None,
                    reason=_reason(step, seen),
                    exit_code=seen.exit_code if step.state.ended and current else None,
                )
            )
        return made

    def _nodes(self, task: StoredTask, seen: JobState) -> list[dict[str, Any]]:
        """What the job has on each node, as well as that can be known now."""
        reports = _reports(task.resources, seen.restarts)
        layout: tuple[JobNode, ...] = ()
        try:
            layout = job_layout.read(self._client, seen.job_id)
        except SlurmError as error:
            _log.info("job %d: its cores can't be asked for: %s", seen.job_id, error)
        if not layout:
            layout = tuple(JobNode(name, ()) for name in hostlist.expand(seen.nodes))
        return payload.node_resources(layout, reports)

    def flushed(self, task: StoredTask, one: Part, happened: float) -> bool:
        """Note that a node's part of a checkpoint reached the destination, and tell it when it was
        the last one. False when the task has changed meanwhile."""
        resources, whole = with_part(task.resources, one)
        if resources == task.resources:
            return True
        now = self._clock()
        callbacks = []
        if whole is not None:
            callbacks.append(
                payload.callback(
                    task,
                    State.FLUSHED,
                    sequence=task.sequence + 1,
                    happened=min(happened, now),
                    now=now,
                    delivery=self.delivery,
                    restarts=task.restarts,
                    nodes=task.resources.get("nodes"),
                    more={"checkpoint": whole},
                )
            )
        change = {"resources": resources, "changed": now}
        done = self._open_store().change_task(task, change, callbacks)
        if done and callbacks:
            _log.info("task %s (job %s): flushed %s", task.task_id, task.job_id, one.key)
            self._written()
        return done


def _reason(step: Step, seen: JobState) -> str:
    """Slurm's reason, and its word where ours says less; a job that runs has none."""
    if not (step.state.ended or step.state is State.REQUEUED):
        return ""
    words = [seen.word] if step.state.ended and seen.word.lower() != step.state.value else []
    return ": ".join([*words, *([seen.reason] if seen.reason else [])])


def _is_of(task: StoredTask, seen: JobState) -> bool:
    """Whether a job is the task's: its user's, and not of before the task came."""
    late = seen.submitted is None or seen.submitted >= task.created - 300
    return seen.user == task.user and late


def _reports(resources: Mapping[str, Any], restarts: int) -> dict[str, Mapping[str, Any]]:
    """What nodes told of this run of the job."""
    return {
        name: report
        for name, report in resources.get("reports", {}).items()
        if report.get("restarts", 0) == restarts
    }


def with_report(
    resources: Mapping[str, Any], node: str, grant: Mapping[str, Any]
) -> dict[str, Any]:
    """The resources with a node's report; what it leaves out is as it was told before."""
    new = payload.node_report(grant)
    reports = {
        name: old
        for name, old in resources.get("reports", {}).items()
        if old.get("restarts", 0) >= new["restarts"]
    }
    before = reports.get(node, {})
    if before.get("restarts", new["restarts"]) > new["restarts"]:
        return dict(resources)
    known = {key: value for key, value in new.items() if value is not None}
    return dict(resources) | {"reports": reports | {node: dict(before) | known}}
