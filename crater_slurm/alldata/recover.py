"""Looks after tasks without a job: after a crash, when Slurm was away, or just sent by users.

Nothing is sent a second time before it is sure that the first came to nothing: the job is looked
for by what it carries, as long as it may still turn up, then in Slurm's records. Where nobody can
tell, a task is rather not run than run twice.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from crater_slurm.alldata.intake import Intake
from crater_slurm.alldata.marker import Marker
from crater_slurm.alldata.states import State
from crater_slurm.alldata.submission import RefusedError, Submitted, Submitter
from crater_slurm.alldata.task import Task, parse
from crater_slurm.errors import CraterError, UsageError
from crater_slurm.store.repository import Store
from crater_slurm.store.task_records import NewTask, StoredTask

_log = logging.getLogger("crater.alldata.recover")
#: A search is repeated so soon.
_AGAIN_SECONDS = 5.0
_WORKERS = min(8, max(2, os.cpu_count() or 1))
#: Source of tasks that users submit themselves.
COMMAND = "command"


class Recoverer:
    """Works in threads of its own. An attempt of which nothing is known is looked for
    ``settle_seconds`` before it is repeated; ``let_by`` waits for what goes before any of them."""

    def __init__(
        self,
        intake: Intake,
        store: Callable[[], Store],
        submitter: Submitter,
        *,
        settle_seconds: float = 120.0,
        let_by: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._intake = intake
        self._open_store = store
        self._submitter = submitter
        self._settle_seconds = settle_seconds
        self._let_by = let_by
        self._clock = clock
        self._lock = threading.Lock()
        self._in_hand: set[int] = set()
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="submit")

    def stop(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def recover(self, stored: StoredTask) -> None:
        """Look after a task without a job, in a thread of its own."""
        with self._lock:
            if stored.number in self._in_hand:
                return
            self._in_hand.add(stored.number)
        self._pool.submit(self._recover_in_thread, stored)

    def _recover_in_thread(self, stored: StoredTask) -> None:
        self._let_by()
        self._guarded(functools.partial(self.recover_now, stored))
        with self._lock:
            self._in_hand.discard(stored.number)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except CraterError as error:
            _log.warning("a task waits: %s", error)
        except Exception:
            _log.exception("a task can't be submitted or followed")

    def recover_now(self, stored: StoredTask) -> None:
        """Find the task's job in Slurm, or submit it when it is sure that there is none."""
        found = self._open_store().task_with_body(stored.number)
        if found is None:
            return
        stored, body = found
        if stored.settled or stored.job_id is not None:
            return  # somebody was faster
        if stored.source == COMMAND:
            self._find_own(stored)
            return
        try:
            task = parse(body)
            if stored.attempt is not None and not self._surely_lost(stored, task, stored.attempt):
                return
            user = self._intake.account(stored.user)
            after = self._intake.attempt(stored, task, user)
        except RefusedError:
            return  # which is written and told
        except UsageError as error:  # what this version of crater no longer takes
            self._intake.refuse(stored, str(error))
            return
        if stored.attempt is not None and after.job_id is not None:
            jobs = self._submitter.find(after.user, after.token)
            self._end_doubles(after, [job for job in jobs if job != after.job_id])

    # What users submit themselves, by crater submit

    def adopt(self, user: str, marker: Marker, plan_id: str | None) -> None:
        """Follow a task whose job somebody is submitting just now; nothing is ever sent for it.

        The filter saw it, which a mere test (sbatch --test-only) also passes: so it counts once
        its job is found.
        """
        now = self._clock()
        about = f"{user}/{marker}".encode()
        new = NewTask(
            client=f"user:{user}"[:64],
            task_id=marker.task_id,
            body_hash=marker.fingerprint,
            body=json.dumps({"task_id": marker.task_id}),
            user=user,
            token=hashlib.sha256(about).hexdigest()[:24],
            source=COMMAND,
            state=State.SUBMITTING.value,
            time=now,
            look=now + 1.0,
        )
        stored, fresh = self._open_store().add_task(new)
        if fresh and plan_id:
            self._open_store().change_task(stored, {"plan_id": plan_id, "changed": now})

    def adopt_later(self, user: str, marker: Marker, plan_id: str | None) -> None:
        """The same in a thread of its own, for whoever may not wait for the store."""
        self._pool.submit(self._guarded, functools.partial(self.adopt, user, marker, plan_id))

    def _find_own(self, stored: StoredTask) -> None:
        found = self._submitter.find_task(stored.user, Marker(stored.task_id, stored.body_hash))
        now = self._clock()
        if found:
            self._intake.commit(stored, Submitted(found[-1]))
        elif now - stored.created >= self._settle_seconds:
            self._open_store().forget_task(stored)  # a test, or refused
        else:
            self._open_store().look_again(stored.number, now + _AGAIN_SECONDS)

    def _surely_lost(self, stored: StoredTask, task: Task, attempt: float) -> bool:
        """Whether Slurm surely has no job of an attempt; if it has one, that is written down."""
        now = self._clock()
        # Not in another second: asking is work, and so is what is found.
        self._open_store().look_again(stored.number, now + _AGAIN_SECONDS)
        found = self._submitter.find(stored.user, stored.token)
        if not found and now - attempt >= self._settle_seconds:
            since = attempt - 60
            recorded = self._submitter.find_recorded(stored.user, task, since)
            if recorded is None and now - attempt >= self._submitter.memory_seconds():
                self._give_up(stored)
                return False
            found = recorded or []
            if not found:
                return True
        if found:
            self._intake.commit(stored, Submitted(found[0]))
            self._end_doubles(stored, found[1:])
        return False

    def _give_up(self, stored: StoredTask) -> None:
        """A job may have run and been forgotten meanwhile: rather not at all than twice."""
        self._intake.settle(
            stored,
            State.UNKNOWN,
            "crater-scheduler stopped while the job was being submitted, and Slurm has forgotten "
            "what came of it; send the task under a new id if it did not run",
        )

    def _end_doubles(self, stored: StoredTask, jobs: list[int]) -> None:
        """A submission that was given up for lost went through late: it must not run twice."""
        for job in jobs:
            _log.error("task %s has a second job, %d, which is cancelled", stored.task_id, job)
            self._submitter.cancel(stored.user, job)
