"""Follows what becomes of tasks, at next to no cost for slurmctld.

Nodes tell when a job is prepared, runs and has ended; that only says when to ask Slurm, and what
the cpuset was. Slurm is asked after that one job, so state and order always come from one place.
Without news a task is looked after at a slow interval: all of a user's in one question, which is
asked more rarely the longer it takes. Nothing is asked while no task is unsettled.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from crater_slurm.alldata.advance import Advancer, with_report
from crater_slurm.alldata.budget import Budget
from crater_slurm.alldata.flushed import part
from crater_slurm.alldata.states import State
from crater_slurm.config.alldata import AllData
from crater_slurm.errors import SlurmError, StoreError
from crater_slurm.guard import Guard
from crater_slurm.slurm import job_states
from crater_slurm.slurm.client import Client
from crater_slurm.store.repository import Store
from crater_slurm.store.task_records import StoredTask

_log = logging.getLogger("crater.alldata.follow")
_TICK_SECONDS = 0.5
#: Up to so many tasks of a user are asked after one by one; more in one question.
_ONE_BY_ONE = 10
_AT_ONCE = 1000
_MOST_REPORTS = 20_000
#: After a Prolog the tasks of the job, and with them its cpuset, are there a moment later.
_TASK_SECONDS = 2.0
#: A question that took a while is asked so many times its length later at the earliest.
_REST = 20.0
_TRIES = 5
#: A task that waits to be submitted is handed over again after so long.
_SUBMIT_SECONDS = 10.0
#: A job that is being submitted has not flushed a checkpoint sooner.
_FLUSH_SECONDS = 1.0

Recover = Callable[[StoredTask], None]


class Follower:
    """A thread and its queue of node reports; ``recover`` is for tasks without a job yet."""

    def __init__(
        self,
        settings: AllData,
        store: Callable[[], Store],
        client: Client,
        *,
        recover: Recover,
        written: Callable[[], None],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._open_store = store
        self._client = client
        self._recover = recover
        self._clock = clock
        self._monotonic = monotonic
        self._advancer = Advancer(settings, store, client, written=written, clock=clock)
        self._budget = Budget(settings.looks_per_minute / 60.0, settings.looks_per_minute, clock)
        self._reports: queue.Queue[Mapping[str, Any]] = queue.Queue(_MOST_REPORTS)
        self._rests_until: dict[str, float] = {}
        #: When all of a user's jobs may be asked after in one question again.
        self._whole_again: dict[str, float] = {}
        self._flushing = threading.Lock()
        self._stop = threading.Event()
        self._guard = Guard(_log, "tasks are not followed")
        self.looks = 0
        self._thread = threading.Thread(target=self._run, name="tasks", daemon=True)

    @property
    def problem(self) -> str:
        """What went wrong in the last round; empty when it went well."""
        return self._guard.problem

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._put({})
        self._thread.join(timeout=10)

    def take_report(self, report: Mapping[str, Any]) -> None:
        """A node's report of a job, as /node/v1/grants gets it; never blocks. Lost ones only cost
        the cpuset's numbers and a while: Slurm is asked all the same."""
        self._put(report)

    def wake(self) -> None:
        self._put({})

    def _put(self, report: Mapping[str, Any]) -> None:
        try:
            self._reports.put_nowait(report)
        except queue.Full:
            _log.warning("more reports of nodes than can be looked at; Slurm is asked later")

    def _run(self) -> None:
        while not self._stop.is_set():
            for report in self._next_reports():
                self._guard.run(functools.partial(self.note, report))
            if not self._stop.is_set():
                self._guard.run(self.look)

    def _next_reports(self) -> Iterator[Mapping[str, Any]]:
        """What has come, after a moment at the latest; an empty report only wakes."""
        wait: float | None = _TICK_SECONDS
        with contextlib.suppress(queue.Empty):
            while not self._stop.is_set():
                report = self._reports.get(wait is not None, wait)
                wait = None
                if report:
                    yield report

    # What nodes tell

    def note(self, report: Mapping[str, Any]) -> None:
        """Keep what a node told of a task's job, and ask Slurm soon. Raises StoreError."""
        store = self._open_store()
        for _ in range(_TRIES):
            task = store.task_of_job(int(report["job_id"]))
            if task is None or report["time"] < task.created - 60:
                return
            phase = str(report["phase"])
            if task.settled:
                return
            known = with_report(task.resources, str(report["node"]), report["grant"])
            if store.change_task(task, {"resources": known, "changed": self._clock()}):
                wait = _TASK_SECONDS if phase == "prolog" else 0.0
                store.look_again(task.number, self._clock() + wait, sooner=True)
                return

    def note_flushed(self, report: Mapping[str, Any]) -> None:
        """Keep and tell that a node's part of a checkpoint is at its destination; also of a task
        that has ended. At once, in the caller's thread: after it the node forgets it.

        Raises StoreError, also when others change the task again and again.
        """
        one = part(str(report["node"]), report["grant"])
        if one is None:
            _log.warning("job %s: its flushed checkpoint is not told right", report["job_id"])
            return
        store, job_id = self._open_store(), int(report["job_id"])
        found = store.task_of_job(job_id)
        if found is None and store.submits_since_before(report["time"] - _FLUSH_SECONDS):
            # A scheduler died between sbatch and its answer, and the job may be that task's.
            raise StoreError(f"job {job_id} may be of a task whose job is still looked for")
        if found is None or report["time"] < found.created - 60:
            return
        self._before_flushed(found)
        with self._flushing:  # all nodes of a large job come at once
            for _ in range(_TRIES):
                task = store.task_of_number(found.number)
                if task is None or self._advancer.flushed(task, one, float(report["time"])):
                    return
        raise StoreError(f"the task of job {job_id} changes again and again")

    def _before_flushed(self, task: StoredTask) -> None:
        """That the job runs is told before its checkpoint, though a node may be faster."""
        if task.settled or task.state == State.RUNNING or not self._budget.take():
            return
        assert task.job_id is not None
        self.looks += 1
        try:
            self._advancer.apply(task, job_states.one(self._client, task.job_id))
        except SlurmError as error:
            _log.info("job %d can't be asked for before its flush: %s", task.job_id, error)

    # What Slurm says

    def look(self) -> None:
        """Look after every task that is due. Raises CraterError when that can't be done at all."""
        now = self._clock()
        due = self._open_store().due_tasks(now, _AT_ONCE)
        self._hand_over([task for task in due if task.job_id is None], now)
        by_user: dict[str, list[StoredTask]] = defaultdict(list)
        for task in due:
            if task.job_id is not None and now >= self._rests_until.get(task.user, 0.0):
                by_user[task.user].append(task)
        problem: SlurmError | None = None
        for user, tasks in by_user.items():
            try:
                self._look_after(user, tasks)
            except SlurmError as error:
                # slurmctld is away, or too busy: no reason to ask it more often.
                self._rests_until[user] = now + self._settings.look_seconds / 6
                problem = error
        if problem:
            raise problem

    def _hand_over(self, tasks: list[StoredTask], now: float) -> None:
        """Tasks without a job are for whoever submits; a long queue of them hides no others."""
        numbers = [task.number for task in tasks]
        self._open_store().look_again_all(numbers, now + _SUBMIT_SECONDS)
        for task in tasks:
            self._recover(task)

    def _look_after(self, user: str, tasks: list[StoredTask]) -> None:
        if len(tasks) > _ONE_BY_ONE and self._clock() >= self._whole_again.get(user, 0.0):
            self._look_at_all(user)
            return
        for task in tasks[:_ONE_BY_ONE]:
            if not self._budget.take():
                return
            self.looks += 1
            assert task.job_id is not None
            again = self._advancer.apply(task, job_states.one(self._client, task.job_id))
            if again is not None:
                self._open_store().look_again(task.number, again)

    def _look_at_all(self, user: str) -> None:
        """One question after all of a user's jobs. Its answer is good for the tasks that would be
        due soon, too: so many tasks are looked after at the same time, and not all the time."""
        if not self._budget.take():
            return
        self.looks += 1
        begin = self._monotonic()
        found = job_states.of_user(self._client, user)
        rest = _REST * (self._monotonic() - begin)
        now = self._clock()
        self._whole_again[user] = now + rest
        store, number = self._open_store(), 0
        until, least = now + self._settings.look_seconds / 2, now + rest
        while tasks := store.followed_tasks(user, until, after=number, limit=_AT_ONCE):
            number = tasks[-1].number
            self._advancer.expect([t.job_id for t in tasks if t.job_id and t.job_id not in found])
            later: dict[float, list[int]] = defaultdict(list)
            for task in tasks:
                again = self._advancer.apply(task, found.get(task.job_id or 0))
                if again is not None:
                    later[round(max(again, least), 1)].append(task.number)
            for at, numbers in later.items():
                store.look_again_all(numbers, at)

    def prune(self) -> None:
        """Remove what ended long ago."""
        try:
            self._open_store().prune_tasks(self._settings.keep_tasks_days, self._clock())
        except StoreError as error:
            _log.warning("old tasks can't be removed: %s", error)
