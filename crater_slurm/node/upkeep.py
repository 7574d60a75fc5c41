"""What the daemon does by itself: read memory use, tidy records, mount and sweep the cache.

Two threads, because a dying drive may hold one of them for ever, and memory must be watched on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from crater_slurm.node import checkpoints_state
from crater_slurm.node.epilog import end
from crater_slurm.node.jobs import ENDED, PREPARED, JobRecord
from crater_slurm.node.request import Answer
from crater_slurm.node.services import Services

_log = logging.getLogger("crater.node.upkeep")
_CACHE_SECONDS = 30.0


class Loop:
    """Calls ``work`` every ``seconds``, or sooner when ``wake`` is called, in its own thread."""

    def __init__(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        self._seconds = seconds
        self._work = work
        self._event = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._event.set()

    def stop(self) -> bool:
        """Ask it to end; waits only a moment, as it may hang in the kernel. Whether it ended."""
        self._stopped = True
        self._event.set()
        self._thread.join(timeout=1)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._work()
            except Exception:
                _log.exception("upkeep: couldn't finish a round of %s", self._thread.name)
            self._event.wait(self._seconds)
            self._event.clear()


def recover(services: Services) -> None:
    """Pick up after a restart: jobs of an earlier boot have ended, the others are still ours."""
    end_missed(services)
    running = []
    for record in services.store.all():
        if record.phase != PREPARED:
            continue
        if record.boot == services.boot:
            running.append(record.job_id)
            continue
        _log.info("upkeep: job %s ended with the last boot", record.job_id)
        answer = Answer()
        end(services, record, answer)
        for work in answer.afterwards:
            work()
    services.marks.reset(running, everything=services.settings.node.environment_for_all)


def end_missed(services: Services) -> None:
    """End the jobs whose Epilog came while this daemon was dead or hung."""
    for job_id in services.marks.ended():
        answer = Answer()
        with services.store.exclusive(job_id):
            record = services.store.get(job_id)
            if record is not None and record.phase == PREPARED:
                _log.info("upkeep: job %s ended while its Epilog found no daemon", job_id)
                end(services, record, answer)
                services.marks.clear(job_id)
            services.marks.take_ended(job_id)
        for work in answer.afterwards:
            work()


def watch_memory(services: Services) -> None:
    """Sample running jobs (their cgroups are gone by Epilog) and let the ledger look again."""
    for record in services.store.all():
        if record.phase == PREPARED:
            services.sample_memory(record)
    services.binder.reconcile()


def tidy(services: Services) -> None:
    """Mount the cache if it is to be mounted, end what is over, delete what was set aside."""
    services.cache.ensure_mounted()
    services.cache.measure()
    end_missed(services)
    for record in services.store.all():
        if record.phase == ENDED:
            with services.store.exclusive(record.job_id):
                if services.store.get(record.job_id) is record and record.phase == ENDED:
                    _age(services, record)
    services.cache.sweep()


def _age(services: Services, record: JobRecord) -> None:
    """Let an ended job's leftovers go when their time has come; what failed is tried again."""
    node = services.settings.node
    hours = (time.time() - (record.ended or 0)) / 3600
    if record.folders:
        before = dict(record.folders)
        services.release_folders(record)
        old = hours >= node.cache.keep_checkpoints_hours
        if record.folders and old and checkpoints_state.safe_to_remove(record):
            _log.info("upkeep: removing the kept checkpoints of job %s", record.job_id)
            if services.cache.release(record.cluster, record.job_id, record.folders):
                record.folders = {}
        if record.folders != before:
            services.store.save(record)
    if not record.folders and hours >= node.keep_jobs_days * 24:
        services.store.forget(record.job_id)


def loops(services: Services) -> tuple[Loop, Loop]:
    """The two loops, not yet started; the second one is to be woken when a job has ended."""
    seconds = services.settings.node.sample_seconds
    return (
        Loop("memory", seconds, lambda: watch_memory(services)),
        Loop("cache", _CACHE_SECONDS, lambda: tidy(services)),
    )
