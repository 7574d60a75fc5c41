"""Jobs in a queue, and what squeue prints of them, for the tests of what watches jobs."""

from __future__ import annotations

import dataclasses
from typing import Any

from cluster_samples import KEY, decider, message, view

from crater_slurm.errors import SlurmError
from crater_slurm.model.plan import Decision
from crater_slurm.model.profile import NodeProfile
from crater_slurm.model.queue import QueuedJob
from crater_slurm.scheduler.state import View

NOW = 1_700_000_000.0
MARK = "~0123456789ab"


def queued(number: int = 7, **fields: Any) -> QueuedJob:
    """A job that is in line since NOW and waits for its turn."""
    given = {
        "id": number,
        "user_id": 1000,
        "state": "PENDING",
        "reason": "Priority",
        "partition": "gpu",
        "priority": 100,
        "submitted": NOW,
        "eligible": NOW,
        "excluded": "",
    }
    return QueuedJob(**given | fields)


def array(number: int, tasks: str, **fields: Any) -> QueuedJob:
    return queued(number, array_id=number, tasks=tasks, **fields)


def printed(*jobs: tuple[str, ...], mark: str = MARK) -> str:
    """What ``squeue --Format`` prints: fields that end in the mark, records in a newline."""
    return "".join("".join(field + mark for field in job) + "\n" for job in jobs)


def record(number: str = "7", **fields: str) -> tuple[str, ...]:
    """One record of squeue, as captured from 22.05, 24.11 and 26.05."""
    given = {
        "job": number,
        "array": number,
        "array_job": number,
        "user": "61001",
        "state": "PENDING",
        "reason": "Resources",
        "partition": "gpu",
        "priority": "4294901757",
        "nice": "0",
        "qos": "(null)",
        "submitted": "1795994605",
        "eligible": "1795994605",
        "start": "N/A",
        "requested": "",
        "comment": "(null)",
    }
    return tuple((given | fields).values())


def submitted(
    words: str, *machines: NodeProfile, plan_id: str = "p1", **fields: str
) -> tuple[Decision, str]:
    """A decision as the filter's message leads to it, and the job's comment with its token."""
    one = dataclasses.replace(decider(), new_id=lambda: plan_id)
    answer = one.decide(message(words, **fields), view(*machines))
    assert answer.decision is not None
    return answer.decision, answer.fields["comment"]


class FakeSlurm:
    """Takes updates, or refuses them in Slurm's words."""

    def __init__(self) -> None:
        self.updates: list[tuple[str, dict[str, str | int]]] = []
        self.refuses = ""

    def update(self, label: str, **changes: str | int) -> None:
        if self.refuses:
            raise SlurmError(self.refuses)
        self.updates.append((label, changes))


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def keys() -> list[bytes]:
    return [KEY]


def at(serial: int, *machines: NodeProfile) -> View:
    """A picture of the cluster with its number."""
    return dataclasses.replace(view(*machines), serial=serial)
