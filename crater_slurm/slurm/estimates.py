"""Slurm's own estimate of a start: where it stands, and in words why there is none.

The estimate is backfill's: as good as the time limits of the jobs ahead. Slurm computes it for the
jobs that backfill looked at, and repeats an old one until it looks again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from crater_slurm.model.queue import QueuedJob

#: Slurm counts a job without time limit as one of a year, and dates behind it mean nothing.
LONGEST_SECONDS = 365 * 86_400.0
_START = re.compile(r"\bJob \d+ to start at (\d{1,12})(?!\S)")

_WHY = {
    "BeginTime": "its --begin lies in the future",
    "Dependency": "it waits for another job (--dependency)",
    "DependencyNeverSatisfied": "its --dependency can never be met; cancel it",
    "JobHeldUser": "its user holds it; 'scontrol release' lets it wait in line",
    "JobHeldAdmin": "an administrator holds it",
    "JobArrayTaskLimit": "its array's own limit (%N) of running tasks is reached",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionNodeLimit": "it asks for more nodes than its partition has; it will never start",
    "PartitionTimeLimit": "its time limit is longer than its partition's; it will never start",
    "BadConstraints": "no node has what it asks for; it will never start",
    "Licenses": "it waits for a licence, which Slurm makes no forecast of",
    "Reservation": "it waits for its reservation",
}


def from_test_only(said: Iterable[str]) -> float | None:
    """Start in seconds since 1970 that ``sbatch --test-only`` names; None when it names none.

    sbatch must run with SLURM_TIME_FORMAT=%s.
    """
    for line in said:
        if match := _START.search(line):
            return float(match.group(1))
    return None


def usable(start: float | None, now: float) -> float | None:
    """The estimate, unless it is none: passed, or behind a job without time limit."""
    return start if start is not None and now < start < now + LONGEST_SECONDS else None


def why_none(job: QueuedJob, now: float) -> str:
    """Why a pending job has no estimate, in words."""
    if words := _WHY.get(job.reason):
        return words
    if re.match(r"(QOS|Assoc)\w", job.reason):
        return f"a limit of its account or QOS holds it back ({job.reason})"
    if job.reason.startswith("ReqNodeNotAvail"):
        return f"nodes that it needs are not available ({job.reason})"
    return why_no_date(job.start, now) or (
        "Slurm's backfill has not looked at it yet; ask again in a minute "
        "(bf_max_job_test and bf_interval say how far and how often it looks)"
    )


def why_no_date(start: float | None, now: float) -> str:
    """Why the date that Slurm gives is no estimate; ``""`` when it gives none."""
    if start is None:
        return ""
    if start >= now + LONGEST_SECONDS:
        return "jobs ahead of it have no time limit, so Slurm can't know when they end"
    return "Slurm's last estimate has passed; it makes a new one when it looks at the job again"
