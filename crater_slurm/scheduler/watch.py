"""Reads the queue now and then for the parts that watch waiting jobs, in a thread of its own.

One reading serves them all, and none is made while no part wants one. Whatever fails here is
logged and tried again: no submission waits for it, and no job is worse off than without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from crater_slurm.guard import Guard
from crater_slurm.model.queue import QueuedJob
from crater_slurm.scheduler.planned import Planned, PlannedJobs
from crater_slurm.scheduler.state import View

_log = logging.getLogger("crater.scheduler.watch")


class Part(Protocol):
    """Something that watches waiting jobs."""

    @property
    def needs_excluded(self) -> bool: ...

    def wants(self, view: View) -> bool: ...

    def look(self, planned: Sequence[Planned], view: View) -> None: ...


class QueueWatch:
    """The thread. ``read`` gives the waiting jobs, with their excluded nodes if told so."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        read: Callable[[bool], list[QueuedJob]],
        planned: PlannedJobs,
        view: Callable[[], View | None],
        off: Callable[[], bool],
        seconds: float,
    ) -> None:
        self._parts = parts
        self._read = read
        self._planned = planned
        self._view = view
        self._off = off
        self._seconds = seconds
        self._guard = Guard(_log, "waiting jobs are not watched")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    @property
    def problem(self) -> str:
        return self._guard.problem

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self._guard.run(self.look)

    def look(self) -> None:
        """One reading for all parts that want one. Raises CraterError."""
        view = self._view()
        if view is None or self._off():
            return
        parts = [part for part in self._parts if part.wants(view)]
        if not parts:
            return
        jobs = self._read(any(part.needs_excluded for part in parts))
        planned = self._planned.of(jobs, view.cluster.name)
        for part in parts:
            part.look(planned, view)
