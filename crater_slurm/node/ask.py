"""Asks this node's crater-io-daemon about a job's checkpoints, for the command line."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from crater_slurm.errors import CraterError, UnavailableError
from crater_slurm.hooks import frame
from crater_slurm.node.questions import OPERATION, SECONDS

#: The daemon's own limit ends a question first, with a better word.
_BEYOND_SECONDS = 15.0


def ask(path: Path, job_id: str, question: dict[str, Any]) -> dict[str, Any]:
    """The answer of the job's worker. Raises UnavailableError without a daemon, CraterError when
    it refuses, or the worker could not do what was asked."""
    wanted = [
        ("op", OPERATION),
        ("env.SLURM_JOB_ID", job_id),
        ("env.CRATER_QUESTION", json.dumps(question)),
    ]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SECONDS[str(question["op"])] + _BEYOND_SECONDS)
            connection.connect(str(path))
            connection.sendall(frame.encode(wanted))
            pairs = frame.receive(connection)
    except (OSError, frame.FrameError) as error:
        raise UnavailableError(
            f"crater-io-daemon on this node does not answer at {path}: {error}. Run this on a "
            "node of the job, or name a folder or URL with checkpoints instead of a job."
        ) from error
    answer = {key: value for key, value in pairs if key in ("status", "line", "log")}
    if answer.get("status") != "ok":
        raise CraterError(f"job {job_id}: {answer.get('log', 'the daemon gives no reason')}")
    try:
        found = json.loads(answer.get("line", ""))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CraterError(f"job {job_id}: crater-io-daemon is of another version")
    if found.get("error"):
        raise CraterError(str(found["error"]))
    return found
