"""Follows one job to its end by one small question, asked less often while nothing changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from crater_slurm.alldata.queue import ENDED, Queue
from crater_slurm.errors import SlurmError

_FIRST_SECONDS = 1.0
#: A job that was preempted, or lost its node, may be about to be requeued.
_MAY_COME_BACK = frozenset({"PREEMPTED", "NODE_FAIL", "BOOT_FAIL"})
_GONE = "Invalid job id"

# Exit codes under --wait that stand for ends without an exit code of the job's own.
TIMED_OUT = 124
NO_CODE = 125
CANCELLED = 130
OUT_OF_MEMORY = 137
#: Job's codes from here on are told as one less, so that those above are ours alone.
OWN = 200


@dataclass(frozen=True, slots=True)
class End:
    """How a job ended. ``state`` is UNKNOWN when neither slurmctld nor the accounting can tell."""

    state: str
    exit_code: int = 0
    signal: int = 0

    @property
    def status(self) -> int:
        """Exit status for ``crater submit --wait``."""
        if self.state == "COMPLETED":
            return 0
        if self.state in ("TIMEOUT", "DEADLINE"):
            return TIMED_OUT
        if self.state == "CANCELLED":
            return CANCELLED
        if self.state == "OUT_OF_MEMORY":
            return OUT_OF_MEMORY
        if self.state == "FAILED" and self.exit_code:
            return min(self.exit_code, OWN - 1)
        if self.state == "FAILED" and self.signal:
            return min(128 + self.signal, OWN - 1)
        return NO_CODE

    @property
    def sentence(self) -> str:
        if self.state == "UNKNOWN":
            return "ended, and neither slurmctld nor the accounting can tell how"
        said = f"{self.state}, exit code {self.exit_code}"
        return f"{said}, signal {self.signal}" if self.signal else said


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """``say`` is told each change of state. ``steady_seconds`` is the longest pause."""

    queue: Queue
    say: Callable[[str], None]
    steady_seconds: float
    sleep: Callable[[float], None] = time.sleep

    def wait(self, job_id: int) -> End:
        """The job's end. While slurmctld does not answer, it is waited for."""
        pause = _FIRST_SECONDS
        told = ""
        doubtful = False
        while True:
            try:
                state, words, end = self._look(job_id)
            except SlurmError as error:
                state, words, end = "", f"Slurm does not answer: {error}", None
            if words != told:
                self.say(words)
                told, pause = words, _FIRST_SECONDS
            if end is not None and (state not in _MAY_COME_BACK or doubtful):
                return end
            doubtful = end is not None
            self.sleep(pause)
            pause = min(2 * pause, self.steady_seconds)

    def _look(self, job_id: int) -> tuple[str, str, End | None]:
        """State, what to say of it, and the end if it is one."""
        try:
            job = self.queue.job(job_id)
        except SlurmError as error:
            if _GONE not in str(error):
                raise
            return self._accounted(job_id)
        state = job.get("JobState", "UNKNOWN").split(" ")[0]
        if state in ENDED:
            end = End(state, *codes(job.get("ExitCode", "")))
            return state, end.sentence, end
        if state == "PENDING":
            return state, f"PENDING ({job.get('Reason', 'None')})", None
        where = job.get("NodeList", "")
        return state, f"{state} on {where}" if where and where != "(null)" else state, None

    def _accounted(self, job_id: int) -> tuple[str, str, End]:
        found = self.queue.end_of(job_id)
        end = End(found[0], *codes(found[1])) if found else End("UNKNOWN")
        return end.state, end.sentence, end


def codes(text: str) -> tuple[int, int]:
    """Exit code and signal of Slurm's ``1:0``."""
    code, _, number = text.partition(":")
    return (int(code) if code.isdecimal() else 0, int(number) if number.isdecimal() else 0)
