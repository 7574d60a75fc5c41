"""Running jobs that use their GPUs less than they promised: said to people and Prometheus.

Nothing is done to such a job. Observations come in from whoever has them.
"""

from __future__ import annotations

import threading

from prometheus_client import CollectorRegistry, Gauge

from crater_slurm.model.request import Request
from crater_slurm.placement.sla import below

_MOST_JOBS = 10_000


class Utilization:
    """The jobs that are below their min-gpu-utilization now."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(
            "crater_job_below_utilization",
            "Mean GPU use in percent of running jobs that are below their min-gpu-utilization",
            ["job"],
            registry=registry,
        )
        self._words: dict[str, tuple[str, str]] = {}
        self._lock = threading.Lock()

    def observe(
        self, job: str, plan_id: str, request: Request, percent: float | None, seconds: float
    ) -> str:
        """Take an observation of a running job; why it is below its promise, or ``""``."""
        why = below(request, percent, seconds)
        if not why:
            self.forget(job)
            return ""
        with self._lock:
            if job in self._words or len(self._words) < _MOST_JOBS:
                self._words[job] = (plan_id, why)
                self._gauge.labels(job).set(percent or 0.0)
        return why

    def forget(self, job: str) -> None:
        """The job ended, or keeps its promise."""
        with self._lock:
            if self._words.pop(job, None):
                self._gauge.remove(job)

    def notes(self, plan_id: str) -> list[str]:
        """Sentences for explain about the jobs of a plan."""
        with self._lock:
            found = [(job, why) for job, (plan, why) in self._words.items() if plan == plan_id]
        return [f"job {job}: {why}" for job, why in sorted(found)]
