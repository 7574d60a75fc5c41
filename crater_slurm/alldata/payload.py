"""What is told of a task: the callback's JSON, and the resources in it. Pure.

Cores are those of the cpuset that a node's daemon saw, where it saw as many as Slurm gave the job
there; else Slurm's own numbers, and ``cpu_cores_source`` says so. Nothing is made up: what nobody
told is null.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from crater_slurm.alldata.states import State
from crater_slurm.errors import UsageError
from crater_slurm.model.cpuset import parse_cpulist
from crater_slurm.slurm.job_layout import JobNode
from crater_slurm.store.task_records import NewCallback, StoredTask

VERSION = 1
_EVENTS = uuid.UUID("6f1f7b1e-7a55-4a0e-9a53-6c2f6f0a3c11")
_MOST_CPUS = 8192
_LONGEST_REASON = 500


def node_report(grant: Mapping[str, Any]) -> dict[str, Any]:
    """What counts of a node's report of a job, in types that are sure; the rest is left out."""
    folders = grant.get("folders")
    checkpoint = folders.get("checkpoint") if isinstance(folders, dict) else None
    return {
        "cpus": _cpus(grant.get("cpus")),
        "gpus": _numbers(grant.get("gpus")),
        "numa_nodes": _numbers(grant.get("numa_nodes")),
        "checkpoint_path": checkpoint[:4096] if isinstance(checkpoint, str) else None,
        "exit_code": _code(grant.get("exit_code")),
        "restarts": grant["restarts"] if isinstance(grant.get("restarts"), int) else 0,
    }


def _cpus(value: object) -> list[int] | None:
    try:
        found = list(parse_cpulist(value)) if isinstance(value, str) and value else None
    except (UsageError, ValueError):
        return None
    return found if found is None or len(found) <= _MOST_CPUS else None


def _numbers(value: object) -> list[int] | None:
    if not isinstance(value, list) or len(value) > _MOST_CPUS:
        return None
    return [n for n in value if isinstance(n, int) and not isinstance(n, bool)]


def _code(value: object) -> str | None:
    return value if isinstance(value, str) and re.fullmatch(r"\d{1,3}:\d{1,3}", value) else None


def node_resources(
    layout: Iterable[JobNode], reports: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The entry of each node of a job, Slurm's layout with what the nodes themselves told."""
    return [_node(one, reports.get(one.name, {})) for one in layout]


def _node(one: JobNode, report: Mapping[str, Any]) -> dict[str, Any]:
    cpus, source = report.get("cpus"), "cpuset"
    if not cpus or (one.cpus and len(cpus) != len(one.cpus)):
        cpus, source = list(one.cpus), "slurm"
    gpus = report.get("gpus") or list(one.gpus)
    numa = report.get("numa_nodes") if source == "cpuset" else None
    return {
        "node": one.name,
        "gpu_ids": [str(gpu) for gpu in gpus],
        "cpu_cores": cpus,
        "cpu_cores_source": source,
        "numa_node": numa[0] if numa and len(numa) == 1 else None,
        "numa_nodes": numa,
        "checkpoint_path": report.get("checkpoint_path"),
    }


def event_id(token: str, sequence: int) -> str:
    """The same for the same event, whoever works it out and how often."""
    return str(uuid.uuid5(_EVENTS, f"{token}/{sequence}"))


def callback(
    task: StoredTask,
    status: State,
    *,
    sequence: int,
    happened: float | None,
    now: float,
    delivery: str,
    restarts: int = 0,
    nodes: list[dict[str, Any]] | None = None,
    reason: str = "",
    exit_code: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> NewCallback:
    """The callback of one change; its payload is fixed here, so that every try sends the same."""
    code, _, signal = (exit_code or "").partition(":")
    body: dict[str, Any] = {
        "version": VERSION,
        "event_id": event_id(task.token, sequence),
        "task_id": task.task_id,
        "status": status.value,
        "sequence": sequence,
        "time": iso(happened),
        "job_id": task.job_id,
        "restarts": restarts,
        "allocated_resources": nodes[0] if nodes else None,
        "nodes": nodes or [],
        "reason": plain(reason) or None,
        "exit_code": int(code) if code else None,
        "signal": int(signal) if signal else None,
    }
    return NewCallback(
        event_id=body["event_id"],
        sequence=sequence,
        status=status.value,
        time=now,
        payload=json.dumps(body | dict(more or {}), separators=(",", ":")),
        delivery=delivery,
    )


def iso(seconds: float | None) -> str | None:
    """ISO 8601 in UTC, as exact as Slurm is."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def plain(text: str) -> str:
    """Words of Slurm's or a user's: one line, printable, and not without end."""
    kept = "".join(c if c.isprintable() else " " for c in text[: 4 * _LONGEST_REASON])
    return " ".join(kept.split())[:_LONGEST_REASON]
