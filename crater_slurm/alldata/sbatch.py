"""Runs sbatch once, and says what is known afterwards: taken, refused, not sent, or not known."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from crater_slurm.errors import SlurmError

_TAKEN = re.compile(r"^(\d{1,10})(?:;(\S+))?$", re.MULTILINE)
#: Of these nothing has reached slurmctld.
_NOT_SENT = ("connect failure", "Connection refused", "Unable to resolve", "find a valid slurm")
#: After these slurmctld may have the job all the same.
_MAYBE_SENT = (
    *("Socket timed out", "Zero Bytes were transmitted", "Unexpected message received"),
    *("Unable to contact slurm controller", "Communication connection failure"),
    *("Message receive failure", "Message send failure", "Transport endpoint", "Incomplete"),
)
_GRACE_SECONDS = 2


class Outcome(Enum):
    """What is known of one attempt."""

    TAKEN = "taken"
    REFUSED = "refused"
    NOT_SENT = "not sent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of sbatch. ``said`` is what it wrote to standard error, ``why`` tells of UNKNOWN."""

    outcome: Outcome
    job_id: int | None = None
    cluster: str = ""
    said: str = ""
    why: str = ""


def attempt(
    argv: Sequence[str], script: str, environment: Mapping[str, str], timeout_seconds: float
) -> Attempt:
    """Give a script to sbatch. Raises SlurmError when there is no sbatch.

    sbatch gets a session of its own: Ctrl-C at a terminal must not interrupt it half-way, when
    nobody could tell what has become of the job.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
    except OSError as error:
        raise SlurmError(
            f"can't run {argv[0]!r} ({error.strerror}); install Slurm's client commands, put them "
            "on PATH or set slurm.bin_dir"
        ) from error
    try:
        out, err = process.communicate(script.encode(), timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        out, err = _end(process)
        why = f"sbatch did not end within {timeout_seconds:g} s"
        # It may have told the job's id before it hung.
        return _read(0, out, err, why)
    return _read(process.returncode, out, err, "sbatch ended without a job id")


def _end(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """End sbatch and what it started; its session is ours."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    return b"", b""


def _read(status: int, out: bytes, err: bytes, why: str) -> Attempt:
    said = err.decode(errors="replace")
    taken = _TAKEN.findall(out.decode(errors="replace"))
    if status == 0 and taken:
        return Attempt(Outcome.TAKEN, int(taken[-1][0]), taken[-1][1], said)
    if any(words in said for words in _NOT_SENT):
        return Attempt(Outcome.NOT_SENT, said=said, why=_last(said))
    if status <= 0 or any(words in said for words in _MAYBE_SENT):
        return Attempt(Outcome.UNKNOWN, said=said, why=_last(said) if status > 0 else why)
    return Attempt(Outcome.REFUSED, said=said, why=_last(said))


def _last(said: str) -> str:
    """sbatch's own last line, without its name."""
    lines = [line for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else "sbatch said nothing"
    return re.sub(r"^sbatch: (error: )?", "", last)
