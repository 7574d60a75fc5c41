"""How jobs ended that slurmctld has forgotten (MinJobAge), or never told: by what is still known.

In this order: slurmdbd's records, the exit code that a node's Epilog told, and then honestly that
nobody knows. A job is not called failed because its record is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from crater_slurm.alldata.states import State
from crater_slurm.errors import SlurmError
from crater_slurm.slurm import hostlist, job_states
from crater_slurm.slurm.client import Client
from crater_slurm.slurm.job_states import JobState
from crater_slurm.store.task_records import StoredTask

_log = logging.getLogger("crater.alldata.ends")
#: Whether a site has slurmdbd changes with a restart of slurmctld, not by the minute.
_CONFIG_SECONDS = 600.0
NOBODY_KNOWS = (
    "slurmctld no longer knows the job (MinJobAge) and nobody recorded how it ended; "
    "with slurmdbd that would be known"
)


class Ends:
    """Asks slurmdbd where there is one."""

    def __init__(self, client: Client, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._monotonic = monotonic
        self._accounting = False
        self._asked_at: float | None = None
        self._recorded: dict[int, JobState | None] = {}

    def fetch(self, job_ids: Sequence[int]) -> None:
        """Ask for many forgotten jobs in one question; ``of`` then needs none. SlurmError."""
        self._recorded = {}
        if job_ids and self._has_accounting():
            found = job_states.accounted(self._client, job_ids)
            self._recorded = {job_id: found.get(job_id) for job_id in job_ids}

    def of(self, task: StoredTask, now: float) -> JobState | None:
        """How a forgotten job ended; None: ask again later. Raises SlurmError."""
        assert task.job_id is not None
        if self._has_accounting():
            found = self._record_of(task.job_id)
            if found is not None and found.user == task.user and found.ended is not None:
                return _in_this_run(found, task)
        if "gone" not in task.resources:
            return None
        return _by_epilog(task) or _unknown(task, now)

    def _record_of(self, job_id: int) -> JobState | None:
        known = self._recorded  # of this pass; another thread's question is another
        if job_id in known:
            return known.pop(job_id)
        return job_states.accounted(self._client, [job_id]).get(job_id)

    def was_preempted(self, job_id: int, run: int) -> bool:
        """Whether that run of a job was preempted; False where nobody recorded it."""
        try:
            if not self._has_accounting():
                return False
            ends = job_states.ends_of(self._client, job_id)
        except SlurmError as error:
            _log.info("job %d: how its run ended can't be asked: %s", job_id, error)
            return False
        return ends[run : run + 1] == ["PREEMPTED"]

    def _has_accounting(self) -> bool:
        now = self._monotonic()
        if self._asked_at is None or now - self._asked_at > _CONFIG_SECONDS:
            try:
                self._accounting = job_states.has_accounting(self._client.config())
            except SlurmError as error:
                _log.info("whether there is slurmdbd can't be asked: %s", error)
                raise
            self._asked_at = now
        return self._accounting


def _in_this_run(found: JobState, task: StoredTask) -> JobState:
    """Older sacct does not count requeues; the newest record is of the newest run."""
    return JobState(
        job_id=found.job_id,
        user=found.user,
        word=found.word,
        submitted=found.submitted,
        started=found.started,
        ended=found.ended,
        nodes=found.nodes,
        restarts=task.restarts,
        exit_code=found.exit_code,
        reason=found.reason,
    )


def _by_epilog(task: StoredTask) -> JobState | None:
    reports = {
        name: report
        for name, report in task.resources.get("reports", {}).items()
        if report.get("exit_code")
    }
    if not reports:
        return None
    restarts = max(report.get("restarts", 0) for report in reports.values())
    codes = [r["exit_code"] for r in reports.values() if r.get("restarts", 0) == restarts]
    code = next((c for c in codes if c != "0:0"), "0:0")
    assert task.job_id is not None
    return JobState(
        job_id=task.job_id,
        user=task.user,
        word="COMPLETED" if code == "0:0" else "FAILED",
        nodes=hostlist.compress(sorted(reports)),
        restarts=max(restarts, task.restarts),
        exit_code=code,
        reason="told by the node's Epilog; slurmctld no longer knows the job",
    )


def _unknown(task: StoredTask, now: float) -> JobState:
    assert task.job_id is not None
    return JobState(
        job_id=task.job_id,
        user=task.user,
        word=State.UNKNOWN.value.upper(),
        ended=None,
        restarts=task.restarts,
        reason=NOBODY_KNOWS,
    )
