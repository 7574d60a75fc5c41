"""Reads the queue and changes pending jobs, for what watches jobs. Never while a submission waits.

One ``squeue`` for the whole queue, in a format that is the same in 22.05 to 26.05. A comment may
hold anything, newlines too, so fields are separated by a word that is made anew for each call and
that no user can know: nobody's text can pass for another job. Changes are argument lists, checked
here, and Slurm's own words come back as SlurmError.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Iterable, Iterator

from crater_slurm.errors import SlurmError, UsageError
from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.queue import QueuedJob
from crater_slurm.slurm.client import Client

#: Fields of ``squeue --Format``; size 0 prints them whole.
_FIELDS = (
    *("JobID", "JobArrayID", "ArrayJobID", "UserID", "State", "Reason", "Partition"),
    *("PriorityLong", "Nice", "QOS", "SubmitTime", "EligibleTime", "StartTime", "ReqNodes"),
    "Comment",
)
_LABEL = re.compile(r"\d{1,10}(_(\d{1,9}|\[[0-9,:-]+\]))?(\+\d{1,4})?")
#: What may be changed, by its name here: Slurm's word and what its value may look like.
_CHANGES = {
    "nice": ("Nice", re.compile(r"-?\d{1,10}")),
    "priority": ("Priority", re.compile(r"\d{1,10}")),
    "qos": ("QOS", re.compile(r"[A-Za-z0-9_.+-]{1,64}")),
    "excluded": ("ExcNodeList", re.compile(r"[A-Za-z0-9_.,\[\]-]*")),
    "prefer": ("Prefer", re.compile("")),  # only taken away, with nodes that were preferred
}
_UNKNOWN = {"", "N/A", "Unknown", "NONE", "None", "(null)"}


def queue(
    client: Client, *, jobs: Iterable[str] = (), excluded: bool = False, running: bool = True
) -> list[QueuedJob]:
    """Pending and running jobs (or ``jobs``, of any state); with ``excluded`` also their -x lists.

    The lists cost a second ``squeue``, since 22.05 prints them in its other format only.
    Raises SlurmError.
    """
    # Times as seconds since 1970: local time is ambiguous once a year.
    reader = dataclasses.replace(
        client, environment=client.environment | {"SLURM_TIME_FORMAT": "%s"}
    )
    # Without --array squeue hides tasks that were changed alone behind the rest of their array.
    words = ["--noheader", "--array", *_chosen(jobs, running)]
    mark = f"~{secrets.token_hex(6)}"
    wanted = ",".join(f"{name}:0{mark}" for name in _FIELDS)
    found = parse_queue(reader.run("squeue", *words, "--Format", wanted), mark)
    if not excluded:
        return found
    text = reader.run("squeue", *words, "--format", f"%A{mark}%x{mark}")
    lists = {int(record[0]): _word(record[1]) for record in _records(text, mark, 2)}
    return [
        dataclasses.replace(job, excluded=lists[job.id])
        for job in found
        if job.id in lists  # one that came or went in between is seen the next time
    ]


def _chosen(jobs: Iterable[str], running: bool) -> list[str]:
    labels = [_checked(label) for label in jobs]
    if labels:
        return ["--states", "all", "--jobs", ",".join(labels)]
    return ["--states", "PENDING,RUNNING" if running else "PENDING"]


def update(client: Client, label: str, **changes: str | int) -> None:
    """``scontrol update``: nice, priority, qos, excluded, prefer. SlurmError has Slurm's words.

    ``label`` names a job, one task or the tasks of an array, see ``QueuedJob.label``.
    """
    words = [f"JobId={_checked(label)}"]
    for name, value in changes.items():
        key, pattern = _CHANGES[name]
        if not pattern.fullmatch(str(value)):
            raise UsageError(f"{key}={value!r} can't be set on job {label}")
        words.append(f"{key}={value}")
    client.run("scontrol", "update", *words)


def _checked(label: str) -> str:
    if not _LABEL.fullmatch(label):
        raise SlurmError(f"{label!r} is no job id; write 123, 123_4 or 123+1")
    return label


def parse_queue(text: str, mark: str) -> list[QueuedJob]:
    """Jobs from what ``squeue`` prints; SlurmError when it is not what was asked for."""
    try:
        return _together(_job(*record) for record in _records(text, mark, len(_FIELDS)))
    except ValueError as error:
        raise SlurmError(f"squeue prints a job that can't be read: {error}") from error


def _records(text: str, mark: str, size: int) -> Iterator[tuple[str, ...]]:
    fields = text.split(mark)
    rest = fields.pop()
    if rest.strip() or len(fields) % size:
        raise SlurmError(
            f"squeue prints {len(fields)} fields, no multiple of {size}; "
            "is this Slurm older than 22.05?"
        )
    for i in range(0, len(fields), size):
        # The newline behind a record stands before the next one's first field.
        yield (fields[i].strip(), *fields[i + 1 : i + size])


def _together(jobs: Iterable[QueuedJob]) -> list[QueuedJob]:
    """Tasks that are still one record of slurmctld as one entry."""
    found: dict[int, QueuedJob] = {}
    tasks: dict[int, list[int]] = {}
    for job in jobs:
        found.setdefault(job.id, job)
        if job.array_id is not None:
            tasks.setdefault(job.id, []).append(int(job.tasks))
    for key, numbers in tasks.items():
        found[key] = dataclasses.replace(found[key], tasks=format_cpulist(numbers))
    return list(found.values())


def _job(
    job: str,
    array: str,
    array_job: str,
    user: str,
    state: str,
    reason: str,
    partition: str,
    priority: str,
    nice: str,
    qos: str,
    submitted: str,
    eligible: str,
    start: str,
    requested: str,
    comment: str,
) -> QueuedJob:
    _, underscore, tasks = array.partition("_")
    return QueuedJob(
        id=int(job),
        array_id=int(array_job) if underscore else None,
        tasks=tasks,
        user_id=int(user),
        state=state.strip(),
        reason=_word(reason),
        partition=_word(partition),
        priority=int(priority),
        nice=int(nice),
        qos=_word(qos),
        submitted=_time(submitted),
        eligible=_time(eligible),
        start=_time(start),
        requested=_word(requested),
        comment=_word(comment),
    )


def _word(text: str) -> str:
    text = text.strip()
    return "" if text == "(null)" else text


def _time(text: str) -> float | None:
    text = text.strip()
    return None if text in _UNKNOWN else float(text)
