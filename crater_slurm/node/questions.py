"""Questions of ``crater checkpoints`` about a job, asked over the hooks' socket: who may ask what.

The kernel says who asks: only root and the job's own user are answered. What they may say to the
job's worker is a short list. A question may take minutes, so few are taken at once, of one user
fewer: the hooks of jobs must never wait for one.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

from crater_slurm.node.request import Answer, Request, RequestError
from crater_slurm.node.services import Services
from crater_slurm.node.worker import WorkerError
from crater_slurm.node.workers import Workers

_log = logging.getLogger("crater.node.server")

OPERATION = "checkpoints"
#: Seconds that each question may take; bringing and reading whole checkpoints takes long.
SECONDS = {
    "list": 60.0,
    "show": 60.0,
    "verify": 3600.0,
    "restore": 3600.0,
    "flush": 20.0,
    "flushing": 20.0,
}
#: What of a question is passed on, and of which type.
_FIELDS: dict[str, type] = {"name": str, "step": int, "run": str, "destination": bool}
_MOST, _MOST_PER_USER = 16, 4
_MOST_TEXT = 2000


class Questions:
    """Takes the question, passes it to the job's worker, and hands its answer on."""

    def __init__(self, services: Services, workers: Workers) -> None:
        self._services, self._workers = services, workers
        self._lock = threading.Lock()
        self._by_uid: collections.Counter[int] = collections.Counter()

    def answer(self, request: Request) -> Answer:
        """The worker's answer as one line of JSON; what is wrong as an error."""
        try:
            job_id, message = self._read(request)
            with self._place(request.peer.uid):
                seconds = SECONDS[str(message["op"])]
                found = self._workers.ask(job_id, message, seconds)
        except (RequestError, WorkerError) as error:
            _log.info("checkpoints: uid %d: couldn't %s", request.peer.uid, error)
            return Answer.error(str(error))
        except Exception as error:
            _log.exception("checkpoints: couldn't finish")
            return Answer.error(f"finish: {type(error).__name__}, see crater-io-daemon's log")
        found = {key: value for key, value in found.items() if key not in ("op", "id")}
        return Answer(lines=[json.dumps(found)])

    def _read(self, request: Request) -> tuple[str, dict[str, Any]]:
        job_id = request.plain("SLURM_JOB_ID")
        record = self._services.store.get(job_id)
        if record is None:
            raise RequestError(f"find job {job_id}: it has nothing on this node (any more)")
        if request.peer.uid not in (0, os.geteuid(), record.uid):
            raise RequestError(f"tell uid {request.peer.uid} of job {job_id}: it is another user's")
        text = request.env.get("CRATER_QUESTION", "")
        try:
            asked = json.loads(text) if len(text) <= _MOST_TEXT else None
        except (ValueError, RecursionError):
            asked = None
        if not isinstance(asked, dict) or asked.get("op") not in SECONDS:
            raise RequestError(f"understand the question {text!r:.80}")
        message: dict[str, Any] = {"op": asked["op"]}
        for key, kind in _FIELDS.items():
            if asked.get(key) is not None:
                if type(asked[key]) is not kind:
                    raise RequestError(f"use {key}={asked[key]!r:.40}")
                message[key] = asked[key]
        return job_id, message

    @contextlib.contextmanager
    def _place(self, uid: int) -> Iterator[None]:
        with self._lock:
            if self._by_uid.total() >= _MOST or (uid and self._by_uid[uid] >= _MOST_PER_USER):
                raise RequestError("take one more question: too many are being answered; try later")
            self._by_uid[uid] += 1
        try:
            yield
        finally:
            with self._lock:
                self._by_uid[uid] -= 1
