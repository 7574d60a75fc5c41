"""What became of jobs, asked of Slurm as cheaply as it can be: one job, one user's, or the records.

``squeue`` for one job and for one user's jobs asks slurmctld for just those. Only fields are read
that no user can write into, so nobody's job name can pass for another job's end. Jobs that
slurmctld has forgotten are looked up in slurmdbd, where a site has it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

from crater_slurm.errors import SlurmError
from crater_slurm.slurm.client import Client

_FIELDS = (
    *("JobID", "UserName", "State", "SubmitTime", "StartTime", "EndTime"),
    *("NodeList", "RestartCnt", "exit_code", "Reason"),
)
_ACCOUNTED = ("JobIDRaw", "User", "State", "Submit", "Start", "End", "NodeList", "ExitCode")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")
_GONE = re.compile(r"Invalid job id", re.IGNORECASE)
_NONE = {"", "N/A", "NONE", "None", "Unknown", "(null)", "None assigned", "0"}
_JOBS_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """One job as Slurm tells of it. ``word`` is Slurm's state; times are seconds since 1970.

    ``exit_code`` is ``code:signal``. ``restarts`` counts requeues; ``preempted`` says that the
    run before was.
    """

    job_id: int
    user: str
    word: str
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    nodes: str = ""
    restarts: int = 0
    exit_code: str = ""
    reason: str = ""
    preempted: bool = False


def one(client: Client, job_id: int) -> JobState | None:
    """A job that slurmctld remembers; None when it does not. SlurmError when it does not say."""
    try:
        text = _squeue(client, "--jobs", str(job_id))
    except SlurmError as error:
        if _GONE.search(str(error)):
            return None
        raise
    return parse(text).get(job_id)


def of_user(client: Client, user: str) -> dict[int, JobState]:
    """All jobs of a user that slurmctld remembers, ended ones too. Raises SlurmError."""
    if not _NAME.fullmatch(user):
        raise SlurmError(f"{user!r} is no user name")
    return parse(_squeue(client, "--user", user))


def _squeue(client: Client, *which: str) -> str:
    wanted = ",".join(f"{name}:0|" for name in _FIELDS)
    arguments = ("--noheader", "--array", "--states", "all", *which, "--Format", wanted)
    return _in_seconds(client).run("squeue", *arguments)


def accounted(client: Client, job_ids: Iterable[int]) -> dict[int, JobState]:
    """Jobs as slurmdbd has them; it is asked instead of slurmctld. Raises SlurmError."""
    found: dict[int, JobState] = {}
    ids = sorted(set(job_ids))
    for begin in range(0, len(ids), _JOBS_AT_ONCE):
        wanted = ",".join(map(str, ids[begin : begin + _JOBS_AT_ONCE]))
        words = ("--noheader", "--parsable2", "--allocations", "--jobs", wanted)
        text = _in_seconds(client).run("sacct", *words, "--format", ",".join(_ACCOUNTED))
        found |= parse_accounted(text)
    return found


def ends_of(client: Client, job_id: int) -> list[str]:
    """How each run of a requeued job ended that slurmdbd has, the oldest first. SlurmError."""
    words = ("--noheader", "--parsable2", "--allocations", "--duplicates", "--jobs", str(job_id))
    text = client.run("sacct", *words, "--format", "State")
    return [line.split()[0] for line in text.splitlines() if line.strip()]


def has_accounting(config: dict[str, str]) -> bool:
    """Whether slurmdbd keeps records, by ``scontrol show config``."""
    return config.get("AccountingStorageType", "").endswith("slurmdbd")


def _in_seconds(client: Client) -> Client:
    """A client that prints times as seconds since 1970: local time is ambiguous once a year."""
    environment = client.environment | {"SLURM_TIME_FORMAT": "%s"}
    return dataclasses.replace(client, environment=environment)


def parse(text: str) -> dict[int, JobState]:
    """Jobs by id from what ``squeue`` prints. Raises SlurmError when it is not what was asked."""
    found: dict[int, JobState] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != len(_FIELDS) + 1:
            raise SlurmError(f"squeue prints a job that can't be read: {line[:200]!r}")
        job, user, word, submitted, started, ended, nodes, restarts, code, reason = fields[:-1]
        found[int(job)] = JobState(
            job_id=int(job),
            user=user,
            word=word.split()[0] if word else "",
            submitted=_time(submitted),
            started=_time(started),
            ended=_time(ended),
            nodes=_word(nodes),
            restarts=int(restarts) if restarts.isdecimal() else 0,
            exit_code=_exit_code(code),
            reason=_word(reason),
        )
    return found


def parse_accounted(text: str) -> dict[int, JobState]:
    """Jobs by id from what ``sacct --parsable2`` prints; SlurmError when it can't be read."""
    found: dict[int, JobState] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != len(_ACCOUNTED) or not fields[0].isdecimal():
            raise SlurmError(f"sacct prints a job that can't be read: {line[:200]!r}")
        job, user, word, submitted, started, ended, nodes, code = fields
        found[int(job)] = JobState(
            job_id=int(job),
            user=user,
            word=word.split()[0] if word else "",  # "CANCELLED by 1000"
            submitted=_time(submitted),
            started=_time(started),
            ended=_time(ended),
            nodes="" if nodes.startswith("None") else _word(nodes),
            exit_code=_exit_code(code),
        )
    return found


def _word(text: str) -> str:
    return "" if text in _NONE else text


def _time(text: str) -> float | None:
    try:
        return None if text in _NONE else float(text)
    except ValueError as error:
        raise SlurmError(f"Slurm prints a time that can't be read: {text[:60]!r}") from error


def _exit_code(text: str) -> str:
    """``code:signal``, also from a wait status as older releases print it."""
    if re.fullmatch(r"\d{1,3}:\d{1,3}", text):
        return text
    if text.isdecimal():
        status = int(text)
        return f"{status >> 8 & 0xFF}:{status & 0x7F}"
    return ""
