"""Finds jobs by what they carry: a token in the comment, or a name in slurmdbd's records.

Both ask for one user's jobs only. A comment may hold anything, so records are told apart by a word
that is made anew for each call.
"""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime

from crater_slurm.errors import SlurmError
from crater_slurm.slurm.client import Client

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")
_JOB_NAME = re.compile(r"[A-Za-z0-9_.:+-]{1,128}")


def by_comment(client: Client, user: str, word: str) -> list[int]:
    """Jobs of a user, oldest first, whose comment has this word. Raises SlurmError."""
    if not _NAME.fullmatch(user):
        raise SlurmError(f"{user!r} is no user name")
    mark = f"~{secrets.token_hex(6)}"
    wanted = f"JobID:0{mark},Comment:0{mark}"
    words = ("--noheader", "--array", "--states", "all", "--user", user, "--Format", wanted)
    fields = client.run("squeue", *words).split(mark)
    if len(fields) % 2 != 1 or fields[-1].strip():
        raise SlurmError("squeue prints jobs that can't be read")
    pairs = zip(fields[0:-1:2], fields[1:-1:2], strict=True)
    return sorted(int(job) for job, comment in pairs if word in comment.split())


def accounted_by_name(client: Client, user: str, name: str, since: float) -> list[int]:
    """Jobs of a user and name that slurmdbd has from a time on, oldest first. SlurmError."""
    if not _NAME.fullmatch(user) or not _JOB_NAME.fullmatch(name):
        raise SlurmError(f"{name!r} of {user!r} can't be looked up in slurmdbd")
    begin = datetime.fromtimestamp(since, UTC).astimezone().strftime("%Y-%m-%dT%H:%M:%S")
    words = ("--noheader", "--parsable2", "--allocations", "--user", user, "--starttime", begin)
    text = client.run("sacct", *words, "--name", name, "--format", "JobIDRaw")
    return sorted(int(line) for line in text.split() if line.isdecimal())


def memory_seconds(config: dict[str, str]) -> float:
    """How long slurmctld surely remembers a job after its end (MinJobAge)."""
    found = re.match(r"\d+", config.get("MinJobAge", ""))
    return float(found.group()) if found else 0.0
