"""What submitting a task can come to, and what the intake asks of whoever does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from crater_slurm.alldata.marker import Marker
from crater_slurm.alldata.run_as import Account
from crater_slurm.alldata.task import Task
from crater_slurm.errors import SlurmError, UsageError


class RefusedError(UsageError):
    """Slurm, or crater's filter, refused the job in the words of the message; exit code 2."""


class AwayError(SlurmError):
    """Slurm could not be asked, and surely has no job of it; exit code 4."""


class DoubtError(SlurmError):
    """Whether Slurm has taken the job is not known; exit code 4."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that Slurm took, and the decision of crater's filter for it, where it told one."""

    job_id: int
    plan_id: str | None = None


class Submitter(Protocol):
    """Brings a task into Slurm, and finds its jobs there by the token."""

    def submit(self, task: Task, user: Account, token: str) -> Submitted:
        """The job. Raises RefusedError, AwayError, DoubtError, ConfigError."""

    def find(self, user: str, token: str) -> list[int]:
        """Jobs that carry the token, the oldest first. Raises SlurmError."""

    def find_task(self, user: str, marker: Marker) -> list[int]:
        """Jobs that a user submitted for a task by command, the oldest first. SlurmError."""

    def find_recorded(self, user: str, task: Task, since: float) -> list[int] | None:
        """Jobs of the task in Slurm's records; None where none are kept. Raises SlurmError."""

    def memory_seconds(self) -> float:
        """How long Slurm surely remembers a job without its records. Raises SlurmError."""

    def cancel(self, user: str, job_id: int) -> None:
        """End a job of the user's. Raises SlurmError."""
