"""A job in Slurm's queue, as far as crater watches it: who, why it waits, since when, until when.

A pending array is one entry with its task ids; a task that runs, or that was changed alone, is an
entry of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """One entry of the queue. Times are seconds since 1970, None where Slurm has none.

    ``start`` is the start of a running job and Slurm's estimate for a pending one. ``tasks`` are
    the array's task ids that share this entry (``2-5,9``), empty for a job that is no array.
    ``excluded`` is None when it was not asked for.
    """

    id: int
    array_id: int | None = None
    tasks: str = ""
    user_id: int
    state: str
    reason: str = ""
    partition: str = ""
    priority: int = 0
    nice: int = 0
    qos: str = ""
    submitted: float | None = None
    eligible: float | None = None
    start: float | None = None
    requested: str = ""
    excluded: str | None = None
    comment: str = ""

    @property
    def pending(self) -> bool:
        return self.state == "PENDING"

    @property
    def label(self) -> str:
        """The job as Slurm's commands take it; an array's entry is exactly its own tasks."""
        if self.array_id is None:
            return str(self.id)
        return f"{self.array_id}_{self.tasks if self.tasks.isdigit() else f'[{self.tasks}]'}"

    def labels(self, limit: int) -> list[str]:
        """The first ``limit`` of its single jobs, as Slurm's commands take them."""
        if self.array_id is None:
            return [str(self.id)]
        return [f"{self.array_id}_{task}" for task in itertools.islice(self._task_ids(), limit)]

    def owns(self, label: str) -> bool:
        """Whether a single job's label names this entry or one of its tasks."""
        head, _, task = label.partition("_")
        if self.array_id is None:
            return label == str(self.id)
        return head == str(self.array_id) and task.isdigit() and int(task) in self._task_ids()

    def _task_ids(self) -> Iterator[int]:
        for part in self.tasks.split(","):
            first, _, last = part.partition("-")
            yield from range(int(first), int(last or first) + 1)
