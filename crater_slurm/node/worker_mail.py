"""What workers say, and questions to them. A worker is its job's user: everything is checked."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from crater_slurm.node import checkpoints_state
from crater_slurm.node.jobs import JobRecord
from crater_slurm.node.requeue import refusal, requeue
from crater_slurm.node.services import Services
from crater_slurm.node.worker import Worker, WorkerError

_log = logging.getLogger("crater.node.workers")

_LOGS_PER_MINUTE = 20
#: A job's steps that are told to be at their destination: so many at once, and a minute. What a
#: worker makes up, or what comes late after an outage, is told as slowly.
_FLUSHES, _FLUSHES_PER_MINUTE = 30.0, 10.0


class _Question:
    """A question to a worker, waiting for its answer."""

    def __init__(self, job_id: str, number: str) -> None:
        self.job_id, self.number = job_id, number
        self.done = threading.Event()
        self.answer: dict[str, Any] = {}


@dataclass(slots=True)
class Slot:
    """A job's place for its worker. ``lock`` is held while one is started or ended."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    worker: Worker | None = None
    failures: int = 0
    not_before: float = 0.0
    changed: bool = False
    reported: float = float("-inf")
    logs: int = 0
    logs_since: float = float("-inf")
    flushes: float = _FLUSHES
    flushes_since: float = float("-inf")


class Mail:
    """Takes the messages of all workers; their answers find whoever asked."""

    def __init__(self, services: Services, clock: Callable[[], float]) -> None:
        self._services = services
        self._clock = clock
        self._lock = threading.Lock()
        self._questions: dict[str, _Question] = {}
        self._serial = 0

    def begin(self, worker: Worker, message: Mapping[str, object]) -> _Question:
        """Send a worker a question. Raises WorkerError."""
        with self._lock:
            self._serial += 1
            question = _Question(worker.job_id, f"q{self._serial}")
            self._questions[question.number] = question
        try:
            worker.send({**message, "id": question.number})
        except WorkerError:
            self._forget(question)
            raise
        return question

    def wait(self, worker: Worker, question: _Question, seconds: float) -> dict[str, Any]:
        """Its answer. Raises WorkerError when there is none, soon where the worker has gone."""
        until = self._clock() + seconds
        try:
            while not question.done.wait(min(1.0, max(0.0, until - self._clock()))):
                if worker.pid and not worker.alive() and not question.done.is_set():
                    raise WorkerError(f"get an answer for job {worker.job_id}: its worker has gone")
                if self._clock() >= until:
                    raise WorkerError(f"get an answer for job {worker.job_id} within {seconds:g} s")
            return question.answer
        finally:
            self._forget(question)

    def _forget(self, question: _Question) -> None:
        with self._lock:
            self._questions.pop(question.number, None)

    def receive(self, sender: Worker, slot: Slot, message: dict[str, object]) -> None:
        """A message of a worker, who is the job's user: bounded, checked, never believed far."""
        operation = message["op"]
        if operation == "state":
            self._take_state(sender, slot, message)
        elif operation == "log":
            self._take_log(sender, slot, message)
        elif operation == "requeue":
            threading.Thread(target=self._requeue, args=(sender, message), daemon=True).start()
        elif operation == "answer":
            with self._lock:
                question = self._questions.get(str(message.get("id")))
            if question is not None and question.job_id == sender.job_id:
                question.answer = message
                question.done.set()

    def _take_state(self, sender: Worker, slot: Slot, message: dict[str, object]) -> None:
        with self._services.store.exclusive(sender.job_id):
            record = self._services.store.get(sender.job_id)
            if record is None or record.run != sender.run:
                return
            before = (record.checkpoints.get("unflushed"), record.checkpoints.get("done"))
            if not checkpoints_state.take(record, message):
                return
            slot.changed = True
            told = self._tell(record, slot)
            if told or before != (record.checkpoints["unflushed"], record.checkpoints["done"]):
                # What decides over the folder is on disk before anything is done about it.
                self._services.store.save(record)
            if checkpoints_state.safe_to_remove(record):
                self._services.release_folders(record)
                self._services.store.save(record)

    def tell(self, job_id: str, slot: Slot) -> None:
        """Tell the scheduler of steps that arrived and had to wait for their turn."""
        with self._services.store.exclusive(job_id):
            record = self._services.store.get(job_id)
            if record is not None and self._tell(record, slot):
                self._services.store.save(record)

    def _tell(self, record: JobRecord, slot: Slot) -> bool:
        """The job's ``exclusive`` lock is held; whether the record has to be saved."""
        steps = checkpoints_state.untold(record)
        if not steps or self._services.spool is None:
            return False
        now = self._clock()
        minutes = max(0.0, now - slot.flushes_since) / 60
        slot.flushes = min(_FLUSHES, slot.flushes + minutes * _FLUSHES_PER_MINUTE)
        slot.flushes_since = now
        told = 0
        for step in steps[: int(slot.flushes)]:
            what = checkpoints_state.arrival(record, step)
            if not self._services.tell_surely(record, "flushed", what):
                break
            checkpoints_state.note_told(record, step)
            told += 1
        slot.flushes -= told
        return told > 0

    def _take_log(self, sender: Worker, slot: Slot, message: dict[str, object]) -> None:
        now = self._clock()
        if now - slot.logs_since > 60:
            slot.logs, slot.logs_since = 0, now
        slot.logs += 1
        if slot.logs > _LOGS_PER_MINUTE:
            return
        levels = {"error": logging.ERROR, "warning": logging.WARNING, "debug": logging.DEBUG}
        level = levels.get(str(message.get("level")), logging.INFO)
        _log.log(level, "job %s: %s", sender.job_id, checkpoints_state.text(message.get("text")))

    def _requeue(self, sender: Worker, message: Mapping[str, object]) -> None:
        record = self._services.store.get(sender.job_id)
        reason = checkpoints_state.text(message.get("reason"))
        error = "the job is not known" if record is None else refusal(self._services, record)
        if record is not None and not error:
            # Its Epilog may come before scontrol is back, and must leave the checkpoints.
            self._services.note_checkpoints(record, requeue=True)
            error = requeue(self._services, record, reason)
            if error:
                self._services.note_checkpoints(record, requeue=False)
        if error:
            _log.info("requeue: job %s is not requeued: %s", sender.job_id, error)
        answer = {"op": "requeued", "id": message.get("id"), "ok": not error, "error": error[:500]}
        with contextlib.suppress(WorkerError):
            sender.send(answer)
