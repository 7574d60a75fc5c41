"""A platform's tasks in crater-scheduler: intake, following, callbacks and poller put together.

Nothing here keeps the filter from answering: what can't start (a password file that others may
read) is told as a problem, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from crater_slurm.alldata.crowd import Crowd
from crater_slurm.alldata.deliver import Deliverer
from crater_slurm.alldata.follow import Follower
from crater_slurm.alldata.intake import Intake
from crater_slurm.alldata.marker import PREFIX, first
from crater_slurm.alldata.poll import HttpQueue, Poller
from crater_slurm.alldata.recover import Recoverer
from crater_slurm.alldata.sender import Sender
from crater_slurm.alldata.submission import Submitter
from crater_slurm.alldata.submitter import RUN
from crater_slurm.config.alldata import AllData, Callback
from crater_slurm.config.settings import Settings
from crater_slurm.errors import ConfigError
from crater_slurm.slurm.client import Client
from crater_slurm.store.repository import Store

_log = logging.getLogger("crater.scheduler.tasks")
_PRUNE_SECONDS = 6 * 3600.0
_MOST_PLANS = 1000
_RUN = re.compile(rf"(?<!\S){RUN}([0-9a-f]{{24}})(?!\S)")


class Tasks:
    """Owns the parts. ``start`` and ``stop`` are the service's."""

    def __init__(
        self,
        settings: Settings,
        store: Callable[[], Store],
        client: Client,
        submitter: Submitter,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.time,
    ) -> None:
        own = settings.alldata
        self._clock = clock
        self._told = bool(own.callback.url)
        #: Decisions by the token of the task that is being submitted.
        self._plans: dict[str, str] = {}
        self.problem = ""
        self._sender, self.deliverer = self._delivering(own.callback, store, registry)
        self.intake = Intake(
            own,
            store,
            submitter,
            written=self._written,
            plan_of=lambda token: self._plans.get(token),
            clock=clock,
        )
        self.crowd = Crowd()
        self.recoverer = Recoverer(
            self.intake,
            store,
            submitter,
            let_by=self.crowd.let_by,
            settle_seconds=settings.submit.settle_seconds,
            clock=clock,
        )
        self.follower = Follower(
            own, store, client, recover=self.recoverer.recover, written=self._written, clock=clock
        )
        self._queue, self.poller = self._polling(own)
        looks = Gauge("crater_task_looks", "Questions to Slurm after tasks", registry=registry)
        looks.set_function(lambda: self.follower.looks)
        self._stop = threading.Event()
        self._upkeep = threading.Thread(target=self._keep_up, name="upkeep", daemon=True)

    def _delivering(
        self, own: Callback, store: Callable[[], Store], registry: CollectorRegistry
    ) -> tuple[Sender | None, Deliverer | None]:
        outcomes = Counter(
            "crater_callbacks", "Attempts to deliver callbacks", ["outcome"], registry=registry
        )
        if not own.url:
            return None, None
        try:
            sender = Sender(own, self._clock)
        except ConfigError as error:
            self.problem = f"no callbacks are sent: {error}"
            _log.error("%s", self.problem)
            return None, None
        deliverer = Deliverer(
            own,
            store,
            sender.send,
            owner=_owner(),
            clock=self._clock,
            told=lambda outcome: outcomes.labels(outcome).inc(),
        )
        return sender, deliverer

    def _polling(self, own: AllData) -> tuple[HttpQueue | None, Poller | None]:
        if not own.poll:
            return None, None
        try:
            queue = HttpQueue(own)
        except ConfigError as error:
            self.problem = f"the platform's queue is not read: {error}"
            _log.error("%s", self.problem)
            return None, None
        return queue, Poller(own, self.intake, queue)

    def start(self) -> None:
        self.follower.start()
        if self.deliverer:
            self.deliverer.start()
        if self.poller:
            self.poller.start()
        self._upkeep.start()

    def stop(self) -> None:
        self._stop.set()
        if self.poller:
            self.poller.stop()
        if self._queue:
            self._queue.close()
        self.recoverer.stop()
        self.follower.stop()
        if self.deliverer:
            self.deliverer.stop()
        if self._sender:
            self._sender.close()

    def take_report(self, report: Mapping[str, Any]) -> None:
        """What a node told of a job. Raises StoreError for what must not be lost and can't be
        kept: then the node tells it again."""
        if report["phase"] == "flushed":
            self.follower.note_flushed(report)
        else:
            self.follower.take_report(report)

    def saw(self, message: Mapping[str, str], plan_id: str | None) -> None:
        """A submission that the filter answers; costs nothing where it is no task's."""
        comment = message.get("field.comment", "")
        if PREFIX not in comment or message.get("op") != "submit" or "check" in message:
            return
        if token := _RUN.search(comment):
            if plan_id:
                self._plans[token.group(1)] = plan_id
            while len(self._plans) > _MOST_PLANS:
                self._plans.pop(next(iter(self._plans)))
        elif self._told and (found := first(comment)):
            with contextlib.suppress(KeyError, ValueError, RuntimeError):
                user = pwd.getpwuid(int(message.get("uid", "-1"))).pw_name
                self.recoverer.adopt_later(user, found, plan_id)

    def problems(self) -> list[str]:
        """What keeps tasks from being followed or told."""
        found = [self.problem, self.follower.problem]
        if self.deliverer:
            found.append(self.deliverer.problem)
        if self.poller:
            found.append(self.poller.problem)
        return [problem for problem in found if problem]

    def _written(self) -> None:
        if self.deliverer:
            self.deliverer.wake()

    def _keep_up(self) -> None:
        while not self._stop.wait(_PRUNE_SECONDS):
            self.follower.prune()


def _owner() -> str:
    """Who has claimed a callback: this process, and no other at any time."""
    return f"{socket.gethostname()[:32]}:{os.getpid()}:{secrets.token_hex(4)}"
