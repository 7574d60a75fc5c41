"""Which jobs Slurm still knows, for whoever removes what dead ones left: certain or an error.

A wrong "nothing runs" is what deletes people's files, so every doubt is an error: a command that
fails, a queue that is empty while the controller has just started, or of another cluster.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from crater_slurm.errors import SlurmError
from crater_slurm.slurm.client import Client


@dataclass(frozen=True, slots=True)
class Live:
    """Jobs of a cluster that slurmctld knows in any state, and when slurmctld started."""

    cluster: str
    job_ids: frozenset[str]
    started: float


def ask(client: Client) -> Live:
    """Ask slurmctld. Raises SlurmError when it fails or says what can't be understood."""
    config = client.config()
    cluster = config.get("ClusterName", "")
    if not cluster:
        raise SlurmError("slurmctld does not tell its ClusterName")
    text = client.run("squeue", "--all", "--local", "--noheader", "--states=all", "--format=%A")
    words = text.split()
    strange = next((word for word in words if not re.fullmatch(r"[0-9]{1,12}", word)), None)
    if strange is not None:
        raise SlurmError(f"squeue prints {strange!r:.40} where a job id belongs")
    return Live(cluster, frozenset(words), _started(config.get("BOOT_TIME", "")))


def doubt(live: Live, running: frozenset[str], now: float, settled_seconds: float) -> str:
    """Why an answer should not be believed; empty when nothing speaks against it.

    ``running`` are jobs of that cluster that certainly run; ``settled_seconds`` is how long a
    controller must have been up before its empty queue counts.
    """
    if unknown := sorted(running - live.job_ids):
        return f"slurmctld does not know job {unknown[0]}, which runs here"
    if not live.job_ids and now - live.started < settled_seconds:
        return "the queue is empty, and slurmctld has started only lately"
    return ""


def _started(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise SlurmError(f"slurmctld's BOOT_TIME is {text!r:.40}, no time") from error


Asker = Callable[[], Live]
