"""Finds a task's jobs in Slurm by their marker: among the own user's jobs, and nobody else's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from crater_slurm.alldata import marker
from crater_slurm.alldata.marker import Marker
from crater_slurm.errors import SlurmError
from crater_slurm.slurm.client import Client
from crater_slurm.slurm.records import parse_record

#: States in which a job does not change any more.
ENDED = frozenset(
    {
        *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"),
        *("PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
    }
)
_NO_ACCOUNTING = ("storage is disabled", "is not there", "slurmdbd", "slurm_persist", "_dbd")


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job of the task, with the state that Slurm last told of it."""

    job_id: int
    state: str
    marker: Marker

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class Queue:
    """Asks slurmctld, and slurmdbd where there is one. ``clusters`` is sbatch's --clusters."""

    client: Client
    clusters: str | None = None
    uid: Callable[[], int] = os.geteuid

    def jobs(self, task_id: str) -> list[FoundJob]:
        """What slurmctld knows, the newest job last. Raises SlurmError."""
        text = self.client.run(
            "squeue",
            *self._where(),
            f"--user={self.uid()}",
            "--states=all",
            "--noheader",
            "--format=%F|%T|%k",
        )
        return _read(text, task_id)

    def accounted(self, task_id: str, since: float) -> list[FoundJob] | None:
        """What the accounting knows of jobs since then; None when there is no accounting.

        It keeps comments only where the site says so, but always the command line, in which the
        marker stands too.
        """
        begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
        try:
            text = self.client.run(
                "sacct",
                *self._where(),
                f"--user={self.uid()}",
                "--allocations",
                "--noheader",
                "--parsable2",
                f"--starttime={begin}",
                "--endtime=now",
                "--format=JobIDRaw,State,Comment,SubmitLine",
            )
        except SlurmError as error:
            if any(word in str(error) for word in _NO_ACCOUNTING):
                return None
            raise
        return _read(text, task_id)

    def end_of(self, job_id: int) -> tuple[str, str] | None:
        """State and exit code that the accounting has of a job that slurmctld forgot."""
        try:
            text = self.client.run(
                "sacct",
                *self._where(),
                f"--jobs={job_id}",
                "--allocations",
                "--noheader",
                "--parsable2",
                "--format=State,ExitCode",
            )
        except SlurmError:
            return None
        state, bar, code = text.partition("\n")[0].partition("|")
        return (state.split(" ")[0], code.strip()) if bar else None

    def job(self, job_id: int) -> dict[str, str]:
        """What slurmctld knows of one job. Raises SlurmError."""
        text = self.client.run("scontrol", *self._where(), "--oneliner", "show", "job", str(job_id))
        return parse_record(text.partition("\n")[0])

    def cancel(self, job_id: int) -> None:
        self.client.run("scancel", *self._where(), str(job_id))

    def _where(self) -> list[str]:
        return [f"--clusters={self.clusters}"] if self.clusters else []


def _read(text: str, task_id: str) -> list[FoundJob]:
    found: dict[int, FoundJob] = {}
    for line in text.splitlines():
        number, _, rest = line.partition("|")
        state, _, about = rest.partition("|")
        seen = marker.find(about.replace("|", " "), task_id)
        if number.isdecimal() and seen is not None:
            found[int(number)] = FoundJob(int(number), state.split(" ")[0], seen)
    return [found[number] for number in sorted(found)]
