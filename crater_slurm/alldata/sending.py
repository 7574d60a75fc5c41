"""Submits a task at most once: what a task's id stands for is one job, whatever dies in between.

Before anything is sent the job is looked for in Slurm, and an attempt is written down before it is
made. When it is not known what has become of one, nothing is sent again until it is sure that
Slurm has no such job; then the caller is told that it is not known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from crater_slurm.alldata.journal import Entry, Journal
from crater_slurm.alldata.marker import Marker
from crater_slurm.alldata.queue import FoundJob, Queue
from crater_slurm.alldata.sbatch import Attempt, Outcome
from crater_slurm.config.submit import Submit
from crater_slurm.errors import CraterError, SlurmError

#: slurmctld forgets ended jobs after MinJobAge, 300 s by default; the clocks may differ a little.
_REMEMBERED_SECONDS = 240
_FIRST_LOOK_SECONDS = 0.5
_LONGEST_LOOK_SECONDS = 4.0


class RefusedError(CraterError):
    """Slurm, or crater's filter in it, refused the job in the words of the message; exit code 1."""


class ConflictError(CraterError):
    """The task's id was used for another content; exit code 7."""

    exit_code = 7


class UnknownOutcomeError(CraterError):
    """Whether Slurm has the job is not known; exit code 8."""

    exit_code = 8


@dataclass(frozen=True, slots=True)
class Submitted:
    """A task's job. ``fresh`` is False when it was there before; ``said`` is what sbatch said."""

    job_id: int
    cluster: str = ""
    fresh: bool = True
    said: str = ""

    @property
    def sentence(self) -> str:
        """What sbatch prints."""
        where = f" on cluster {self.cluster}" if self.cluster else ""
        return f"Submitted batch job {self.job_id}{where}"

    @property
    def parsable(self) -> str:
        return f"{self.job_id};{self.cluster}" if self.cluster else str(self.job_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Sends one task. ``attempt`` runs sbatch; time is given in, so that tests need none."""

    queue: Queue
    journal: Journal
    settings: Submit
    attempt: Callable[[], Attempt]
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep

    def send(self, marker: Marker, *, again: bool = False) -> Submitted:
        """The task's job, submitted now or before.

        ``again`` makes a new job for a task whose jobs have all ended, or of which it is not known
        what has become. Raises RefusedError, ConflictError, UnknownOutcomeError, BusyError,
        SlurmError.
        """
        patience = self.settings.timeout_seconds + self.settings.search_seconds + 10
        with self.journal.turn(patience):
            before = self.journal.read()
            try:
                found = self.queue.jobs(marker.task_id)
            except SlurmError as error:
                raise SlurmError(f"nothing was submitted: {error}") from error
            if again:
                self._all_ended(found)
            elif (known := self._known(marker, before, found)) is not None:
                return known
            return self._send(marker, {job.job_id for job in found})

    def _known(
        self, marker: Marker, before: Entry | None, found: list[FoundJob]
    ) -> Submitted | None:
        """The job that the task has, by Slurm or by what is remembered; None when it is sure that
        there is none."""
        if found:
            return self._this(marker, found[-1])
        if before is None:
            return None
        if before.job_id is not None:
            self._same(marker, before.fingerprint, before.job_id)
            return Submitted(before.job_id, before.cluster, fresh=False)
        accounted = self.queue.accounted(marker.task_id, before.begun - 60)
        if accounted:
            return self._this(marker, accounted[-1])
        self._settled(marker, before, accounted is not None)
        return None

    def _this(self, marker: Marker, job: FoundJob) -> Submitted:
        self._same(marker, job.marker.fingerprint, job.job_id)
        return self._remember(marker, job.job_id)

    def _same(self, marker: Marker, fingerprint: str, job_id: int) -> None:
        if fingerprint != marker.fingerprint:
            raise ConflictError(
                f"the task {marker.task_id} was submitted with another content, as job {job_id}; "
                "one id is one job, so give the new task a new id, or say --again once it has ended"
            )

    def _all_ended(self, found: list[FoundJob]) -> None:
        for job in found:
            if not job.ended:
                raise ConflictError(
                    f"job {job.job_id} of the task {job.marker.task_id} is {job.state}; cancel it "
                    "before a new one is submitted"
                )

    def _settled(self, marker: Marker, before: Entry, has_accounting: bool) -> None:
        """After an attempt of unknown outcome: return only when it is sure that nothing came."""
        age = self.clock() - before.begun
        if age < self.settings.settle_seconds:
            raise UnknownOutcomeError(
                f"an attempt {age:.0f} s ago may still be on its way in slurmctld, and no job of "
                f"the task {marker.task_id} is there yet; try again in "
                f"{self.settings.settle_seconds - age:.0f} s"
            )
        if not has_accounting and age > _REMEMBERED_SECONDS:
            raise UnknownOutcomeError(
                f"what became of an attempt {age:.0f} s ago can't be told any more: slurmctld "
                "forgets ended jobs, and there is no accounting; say --again for a new job"
            )

    def _send(self, marker: Marker, earlier: set[int]) -> Submitted:
        self.journal.begin(Entry(marker.task_id, marker.fingerprint, self.clock()))
        done = self.attempt()
        if done.outcome is Outcome.TAKEN and done.job_id is not None:
            return self._remember(marker, done.job_id, done.cluster, fresh=True, said=done.said)
        if done.outcome is Outcome.UNKNOWN:
            return self._search(marker, done, earlier)
        self.journal.forget()
        if done.outcome is Outcome.NOT_SENT:
            raise SlurmError(f"nothing was submitted: {done.why}; is slurmctld up? (scontrol ping)")
        raise RefusedError(done.said.strip() or done.why)

    def _search(self, marker: Marker, done: Attempt, earlier: set[int]) -> Submitted:
        """Look for the job of an attempt that did not tell; not for ``earlier`` ones."""
        deadline = self.clock() + self.settings.search_seconds
        pause = _FIRST_LOOK_SECONDS
        while True:
            try:
                found = self.queue.jobs(marker.task_id)
            except SlurmError:
                found = []  # slurmctld may be back at the next look
            mine = [j for j in found if j.marker == marker and j.job_id not in earlier]
            if mine:
                return self._remember(marker, mine[-1].job_id, said=done.said, fresh=True)
            if self.clock() >= deadline:
                break
            self.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)
        raise UnknownOutcomeError(
            f"{done.why}, and no job of the task {marker.task_id} is in the queue; it is not sent "
            "twice, so run the same command again later: it looks for the job first"
        )

    def _remember(
        self,
        marker: Marker,
        job_id: int,
        cluster: str = "",
        *,
        fresh: bool = False,
        said: str = "",
    ) -> Submitted:
        now = self.clock()
        self.journal.end(Entry(marker.task_id, marker.fingerprint, now, job_id, cluster))
        return Submitted(job_id, cluster, fresh, said)
