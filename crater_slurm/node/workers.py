"""Keeps a checkpoint worker for each job that needs one: starts, finds again, replaces, ends it.

What should be follows from the job records alone, so a daemon that was killed at any moment goes
on where it was. A worker that dies is started anew, later and later each time; meanwhile trainers
write their checkpoints themselves.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crater_slurm.node import checkpoints_state, worker, worker_spec
from crater_slurm.node.destinations import DestinationError
from crater_slurm.node.jobs import ENDED, PREPARED, JobRecord
from crater_slurm.node.services import Services
from crater_slurm.node.upkeep import Loop
from crater_slurm.node.worker import Launcher, Worker, WorkerError
from crater_slurm.node.worker_mail import Mail, Slot

_log = logging.getLogger("crater.node.workers")

_ROUND_SECONDS = 2.0
_REPORT_SECONDS = 10.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 600.0
#: A trainer waits so long for the next worker itself; for more it is sent away and writes itself.
_SHORT_WAIT_SECONDS = 1.0
#: A worker that lived so long did not fail at once: the next one is started without a wait.
_LIVED_SECONDS = 60.0
#: After so many failures in a row nothing is waited for any more, where nothing is to be flushed.
_MOST_FAILURES = 6
_END_SECONDS = 5.0
#: How long a trainer waits while a worker is started or ended for somebody else.
_PATIENCE_SECONDS = 10.0


class Workers:
    """The workers of this node. Methods may be called from any thread; none is called under a
    job's ``exclusive`` lock, which they take themselves for moments."""

    def __init__(
        self,
        services: Services,
        launcher: Launcher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = services.settings.node
        self._services = services
        self._launcher = launcher or Launcher.of(settings.checkpoints.scope)
        self._clock = clock
        self._folder: Path = settings.socket.parent / "workers"
        self._lock = threading.Lock()
        self._slots: dict[str, Slot] = {}
        self._mail = Mail(services, clock)
        self._stopped = False
        self._loop = Loop("workers", _ROUND_SECONDS, self.round)

    def start(self) -> None:
        """Find the workers of an earlier daemon, start those that are missing."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder.chmod(0o700)
        self._loop.start()

    def stop(self) -> None:
        """Let go of all workers; they work on without a daemon."""
        self._stopped = True
        self._loop.stop()
        for slot in self._all().values():
            if slot.worker:
                slot.worker.cut()

    def wake(self) -> None:
        """Look at once whether a job has begun or ended."""
        self._loop.wake()

    def hand_over(
        self, record: JobRecord, message: Mapping[str, object], fds: Sequence[int]
    ) -> None:
        """Give a trainer's connection to its job's worker. Raises WorkerError."""
        slot = self._slot(record.job_id)
        if not slot.lock.acquire(timeout=_PATIENCE_SECONDS):
            raise WorkerError(f"reach the worker of job {record.job_id}: it is being started")
        try:
            try:
                self._ensure(slot, record).send(message, fds)
            except WorkerError:
                if slot.worker is None:
                    raise
                old, slot.worker = slot.worker, None  # dead unnoticed, or it reads nothing
                old.end(_END_SECONDS)
                old.counted = True
                self._failed(slot, record)
                self._ensure(slot, record).send(message, fds)
        finally:
            slot.lock.release()

    def count(self) -> int:
        """How many workers are connected."""
        return sum(slot.worker is not None for slot in self._all().values())

    def allow(self, job_id: str, quota_bytes: int) -> None:
        """Tell a job's worker what its checkpoints may hold from now on; 0 is no limit."""
        found = self._slot(job_id).worker
        if found is not None:
            with contextlib.suppress(WorkerError):
                found.send({"op": "limits", "quota_bytes": quota_bytes})

    def ask(self, job_id: str, message: Mapping[str, object], seconds: float) -> dict[str, Any]:
        """A job's worker's answer to a question; one that is not there is started, also for a job
        that has ended. Raises WorkerError when there is none."""
        record, slot = self._services.store.get(job_id), self._slot(job_id)
        if record is None or not worker_spec.offered(self._services, record):
            raise WorkerError(f"ask the worker of job {job_id}: it has no checkpoints on this node")
        if not slot.lock.acquire(timeout=_PATIENCE_SECONDS):
            raise WorkerError(f"reach the worker of job {job_id}: it is being started")
        try:
            found = self._ensure(slot, record)
            record = self._services.store.get(job_id) or record
            if record.phase == ENDED and not found.told_end:
                found.told_end = True  # the question is asked before it can have gone
                question = self._mail.begin(found, message)
                found.send({"op": "ended"})
            else:
                question = self._mail.begin(found, message)
        except DestinationError as error:
            raise WorkerError(f"start a worker for job {job_id}: couldn't {error}") from error
        finally:
            slot.lock.release()
        return self._mail.wait(found, question, seconds)

    def round(self) -> None:
        """Compare what is with what should be, for every job; each start has its own thread."""
        for record in self._services.store.all():
            if self._lacks(record):
                name = f"bring {record.job_id}"
                threading.Thread(
                    target=self._bring, args=(record.job_id,), name=name, daemon=True
                ).start()
            if checkpoints_state.untold(record):
                self._mail.tell(record.job_id, self._slot(record.job_id))
        for job_id, slot in self._all().items():
            self._report(job_id, slot)
            if slot.worker is None and self._services.store.get(job_id) is None:
                with self._lock:
                    self._slots.pop(job_id, None)

    def _lacks(self, record: JobRecord) -> bool:
        """Whether a job's worker is missing, is of an earlier run, or does not know of the end."""
        if not self._wanted(record):
            return False
        slot = self._slot(record.job_id)
        if slot.lock.locked():
            return False
        if slot.worker is None or slot.worker.run != record.run:
            return self._clock() >= slot.not_before
        return record.phase == ENDED and not slot.worker.told_end

    def _wanted(self, record: JobRecord) -> bool:
        if not worker_spec.offered(self._services, record):
            return False
        if record.phase == PREPARED:
            plan = record.plan or {}
            eager = plan.get("checkpoint") or plan.get("stage") or checkpoints_state.used(record)
            return record.boot == self._services.boot and bool(eager)
        return checkpoints_state.used(record) and not checkpoints_state.safe_to_remove(record)

    def _bring(self, job_id: str) -> None:
        """Start a missing worker, and tell one of its job's end."""
        slot = self._slot(job_id)
        record = self._services.store.get(job_id)
        if record is None or self._stopped or not slot.lock.acquire(blocking=False):
            return
        try:
            if not self._wanted(record):
                return
            found = self._ensure(slot, record)
            if record.phase == ENDED and not found.told_end:
                found.told_end = True
                found.send({"op": "ended"})
        except WorkerError as error:
            _log.warning("workers: couldn't %s", error)
        except Exception:
            _log.exception("workers: couldn't bring a worker for job %s", job_id)
            self._failed(slot, record)
        finally:
            slot.lock.release()

    def _ensure(self, slot: Slot, record: JobRecord) -> Worker:
        """The running worker of this run of the job; ``slot.lock`` is held. WorkerError."""
        if slot.worker is not None and slot.worker.run == record.run:
            return slot.worker
        self._end_other_run(slot, record)
        wait = slot.not_before - self._clock()
        if 0 < wait <= _SHORT_WAIT_SECONDS:
            time.sleep(wait)
        elif wait > 0:
            raise WorkerError(
                f"start a worker for job {record.job_id}: {slot.failures} have failed; the next "
                f"is started in {wait:.0f} s"
            )
        try:
            found = self._find_or_launch(slot, record)
        except (WorkerError, DestinationError):
            self._failed(slot, record)
            raise
        slot.worker = found
        return found

    def _end_other_run(self, slot: Slot, record: JobRecord) -> None:
        """Make the worker of an earlier run go; what it left is the next one's to finish."""
        known = record.checkpoints.get("worker", {})
        old = slot.worker
        if old is None and known and known.get("run") != record.run:
            old = worker.find(record.job_id, self._folder, known["pid"], known["born"])
        slot.worker = None
        if old is not None and not old.end(_END_SECONDS):
            raise WorkerError(f"end the worker of an earlier run of job {record.job_id}")

    def _find_or_launch(self, slot: Slot, record: JobRecord) -> Worker:
        """Connect to the worker that runs, or start one, and give it its spec."""
        unreachable = record.checkpoints.get("unreachable")
        spec = worker_spec.prepare(self._services, record)
        known = record.checkpoints.get("worker", {})
        pid, born = int(known.get("pid", 0)), str(known.get("born", ""))
        found = worker.find(record.job_id, self._folder, pid, born)
        if found is not None and not found.alive():
            # Its daemon was killed before it had noted it. So it has no spec, knows of no folder
            # and ends by itself; taken over, it could never be made to go.
            found.channel.close()
            found = None
        if found is not None and unreachable:
            found.end(_END_SECONDS)  # it was never told how to reach the destination
            found = None
        if found is not None:
            _log.info("workers: job %s: found its worker again", record.job_id)
        else:
            found = worker.launch(self._launcher, record.job_id, self._folder)
        found.run = record.run
        started = {"pid": found.pid, "born": found.born, "run": record.run}
        self._services.note_checkpoints(record, used=True, done=False, worker=started)
        try:
            found.send({"op": "spec", "spec": spec})
        except WorkerError:
            found.counted = True
            raise
        finally:
            found.listen(
                lambda sender, message: self._mail.receive(sender, slot, message), self._lost
            )
        return found

    def _lost(self, gone: Worker) -> None:
        """A worker's connection has ended: by its work being done, by its death, or by our stop."""
        if self._stopped:
            return
        if gone.process is not None:
            with contextlib.suppress(Exception):
                gone.process.wait(timeout=1)
        slot = self._slot(gone.job_id)
        with slot.lock:
            if slot.worker is gone:
                slot.worker = None
            elif slot.worker is not None:
                return  # replaced already
            record = self._services.store.get(gone.job_id)
            if record is not None and record.run == gone.run:
                self._settle(slot, gone, record)
        self.wake()

    def _settle(self, slot: Slot, gone: Worker, record: JobRecord) -> None:
        if gone.alive() and not gone.end(_END_SECONDS):
            _log.error("workers: couldn't end the worker of job %s", gone.job_id)
        if record.checkpoints.get("done"):
            (self._folder / f"{gone.job_id}.sock").unlink(missing_ok=True)
            (self._folder / f"{gone.job_id}.log").unlink(missing_ok=True)
            if not checkpoints_state.unflushed(record):
                _log.info("workers: job %s: its checkpoints are settled", gone.job_id)
                self._report(gone.job_id, slot, last=True)
                return
        elif gone.process is not None and not gone.heard and self._launcher.scope:
            _log.warning(
                "workers: systemd-run gave no scope (%s); workers now run within the daemon's "
                "service, which must not end them (KillMode=process)", gone.last_words(),
            )  # fmt: skip
            self._launcher.scope = False
            return
        words = gone.last_words()
        _log.warning(
            "workers: job %s: lost its worker%s", gone.job_id, f": {words}" if words else ""
        )
        if self._clock() - gone.since > _LIVED_SECONDS:
            slot.failures = 0
        if not gone.counted:
            self._failed(slot, record)

    def _failed(self, slot: Slot, record: JobRecord) -> None:
        """Count a failure: the next start waits longer, and once there is nothing to lose, ends."""
        slot.failures += 1
        wait = min(_FIRST_WAIT_SECONDS * 2 ** (slot.failures - 1), _LONGEST_WAIT_SECONDS)
        slot.not_before = self._clock() + wait
        if slot.failures >= _MOST_FAILURES and record.phase == ENDED:
            if record.checkpoints.get("destination"):
                return
            _log.error(
                "workers: job %s: given up after %d failures; it has no destination",
                record.job_id, slot.failures,
            )  # fmt: skip
            self._services.note_checkpoints(
                record, done=True, problem="its worker failed again and again"
            )

    def _report(self, job_id: str, slot: Slot, *, last: bool = False) -> None:
        now = self._clock()
        if not slot.changed or not (last or now - slot.reported >= _REPORT_SECONDS):
            return
        record = self._services.store.get(job_id)
        slot.changed, slot.reported = False, now
        if record is not None:
            self._services.store.save(record)
            self._services.report(record, "checkpoints")

    def _slot(self, job_id: str) -> Slot:
        with self._lock:
            return self._slots.setdefault(job_id, Slot())

    def _all(self) -> dict[str, Slot]:
        with self._lock:
            return dict(self._slots)
