"""What of the GPUs' use is a job's own: by its processes, else the whole GPU when it has that.

A neighbour's memory is never counted. Where it can't be told apart, nothing is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.files import read_text
from crater_slurm.probe.health.gpu_use import GpuProcess, GpuUse

#: The job's folder in a path of /proc/PID/cgroup: under v2, and under v1.
_JOB = re.compile(r"(?:slurmstepd\.scope|/uid_\d+)/((?!system(?:/|$))[^/\n]+)", re.M)


@dataclass(frozen=True, slots=True)
class GpuShare:
    """A job's share of one GPU at one moment; None is unknown."""

    uuid: str
    memory_mib: int | None = None
    size_mib: int | None = None
    utilization_percent: float | None = None


@dataclass(frozen=True, slots=True)
class Holder:
    """A job as far as GPUs go: its cgroup's names, the UUIDs of its GPUs as far as they are known,
    and whether Slurm gave it whole GPUs that no other job has."""

    cgroup_names: tuple[str, ...]
    uuids: frozenset[str] = frozenset()
    whole: bool = False


class Owners:
    """Which job's cgroup a process is in; each process is looked up once per round."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._known: dict[int, str | None] = {}

    def __call__(self, pid: int) -> str | None:
        """Name of the job's cgroup; None outside of jobs, or when it can't be seen."""
        if pid not in self._known:
            match = _JOB.search(read_text(self._proc / str(pid) / "cgroup") or "")
            self._known[pid] = match.group(1) if match else None
        return self._known[pid]


def shares(
    gpus: Collection[GpuUse], holder: Holder, owner: Callable[[int], str | None]
) -> tuple[GpuShare, ...]:
    """The job's share of each GPU that is its own or that it has processes on.

    With MIG on the node Slurm's GPU numbers count instances, so that they name no GPU: then only
    processes tell.
    """
    numbers_hold = not any(gpu.mig for gpu in gpus)
    found = []
    for gpu in gpus:
        mine = [p for p in gpu.processes or () if owner(p.pid) in holder.cgroup_names]
        assigned = numbers_hold and gpu.uuid in holder.uuids
        if not mine and not assigned:
            continue
        others = [p for p in gpu.processes or () if owner(p.pid) and p not in mine]
        alone = holder.whole and assigned and not others
        found.append(
            GpuShare(
                gpu.uuid,
                _memory_mib(gpu, mine, alone),
                None if gpu.mig else gpu.memory_total_mib,
                _utilization(gpu, mine, alone),
            )
        )
    return tuple(found)


def _memory_mib(gpu: GpuUse, mine: list[GpuProcess], alone: bool) -> int | None:
    known = _sum(process.memory_mib for process in mine)
    if mine and known is not None:
        return int(known)
    return gpu.memory_used_mib if alone else None


def _utilization(gpu: GpuUse, mine: list[GpuProcess], alone: bool) -> float | None:
    if alone:
        return gpu.utilization_percent
    known = _sum(process.utilization_percent for process in mine)
    return min(known, 100.0) if mine and known is not None else None


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum, None when one of them is unknown."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total
