"""What a task goes through, and the steps from what was told of it to what Slurm says now. Pure.

No step is left out: a job that ended between two looks was scheduled and ran before, and that is
told first. A step whose time Slurm does not say has none, rather than one that was made up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from crater_slurm.slurm.job_states import JobState


class State(StrEnum):
    """Where a task is. The first two are told to nobody; ``flushed`` is told, and no state."""

    SUBMITTING = "submitting"
    SUBMITTED = "submitted"
    SCHEDULED = "scheduled"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    REJECTED = "rejected"
    FLUSHED = "flushed"
    UNKNOWN = "unknown"

    @property
    def ended(self) -> bool:
        """Whether nothing more becomes of it by itself."""
        return self in _ENDED


_ENDED = frozenset(
    {
        State.COMPLETED,
        State.FAILED,
        State.CANCELLED,
        State.TIMEOUT,
        State.PREEMPTED,
        State.REJECTED,
        State.UNKNOWN,
    }
)
#: Slurm's word for the end of a job, and ours. What is not here has not ended.
_ENDS = {
    "COMPLETED": State.COMPLETED,
    "FAILED": State.FAILED,
    "NODE_FAIL": State.FAILED,
    "BOOT_FAIL": State.FAILED,
    "OUT_OF_MEMORY": State.FAILED,
    "LAUNCH_FAILED": State.FAILED,
    "RECONFIG_FAIL": State.FAILED,
    "REVOKED": State.FAILED,
    "CANCELLED": State.CANCELLED,
    "TIMEOUT": State.TIMEOUT,
    "DEADLINE": State.TIMEOUT,
    "PREEMPTED": State.PREEMPTED,
    "UNKNOWN": State.UNKNOWN,  # ours: Slurm has no such word
}
_RUNS = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"})
#: It has nodes, and nothing of the user's runs on them yet.
_ALLOCATED = frozenset({"CONFIGURING", "POWER_UP_NODE"})
#: The nodes are being cleaned; how it ended is said only afterwards.
_BETWEEN = frozenset({"COMPLETING"})
#: Ends at which a job with nodes never began to run.
_NEVER_RAN = frozenset({"BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL"})


@dataclass(frozen=True, slots=True)
class Step:
    """One change of a task; ``time`` is when Slurm says it happened, None if it does not."""

    state: State
    time: float | None
    restarts: int


def steps(state: State, restarts: int, seen: JobState) -> list[Step]:
    """From ``state`` in run number ``restarts`` to what was seen; nothing when that is no news."""
    return list(_steps(state, restarts, seen))


def between(seen: JobState) -> bool:
    """Whether Slurm will say more in a moment."""
    return seen.word in _BETWEEN


def _steps(state: State, restarts: int, seen: JobState) -> Iterator[Step]:
    if seen.restarts > restarts:
        # A run is over that may have gone by unseen. It had nodes, so that is told.
        if state in (State.SUBMITTING, State.SUBMITTED, State.REQUEUED):
            yield Step(State.SCHEDULED, None, restarts)
            yield Step(State.RUNNING, None, restarts)
        if seen.preempted and state is not State.PREEMPTED:
            yield Step(State.PREEMPTED, None, restarts)
        state, restarts = State.REQUEUED, seen.restarts
        yield Step(State.REQUEUED, seen.submitted, restarts)
    elif state.ended or seen.restarts < restarts:
        return  # old news
    end = _ENDS.get(seen.word)
    ran = seen.word in _RUNS or (end is not None and _ran(seen))
    if ran or seen.word in _ALLOCATED or (end is not None and seen.nodes):
        if state not in (State.SCHEDULED, State.RUNNING):
            yield Step(State.SCHEDULED, seen.started, restarts)
        if ran and state is not State.RUNNING:
            yield Step(State.RUNNING, seen.started, restarts)
    if end is not None:
        yield Step(end, seen.ended, restarts)


def _ran(seen: JobState) -> bool:
    """Whether a job that has ended ever ran: one cancelled in the queue has no nodes."""
    return bool(seen.nodes) and seen.word not in _NEVER_RAN
