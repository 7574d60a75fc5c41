"""What a job asked, what it was given and whether that is local, as one record to keep and send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.plan import Plan
from crater_slurm.node.binding import Given


def is_local(
    cpu_nodes: frozenset[int], gpu_nodes: frozenset[int] | None, domains: int
) -> bool | None:
    """Whether cores and GPUs sit together: the same NUMA nodes, neither side left alone.

    Without GPUs (an empty set), whether the cores keep to the number of domains that the plan
    allows, one if it names none. None when a GPU's node or the cores' is unknown.
    """
    if gpu_nodes is None or not cpu_nodes:
        return None
    if not gpu_nodes:
        return len(cpu_nodes) <= max(1, domains)
    return cpu_nodes == gpu_nodes


def grant(
    plan: Plan | None,
    given: Given,
    cpus: tuple[int, ...],
    cpu_nodes: frozenset[int],
    gpu_nodes: frozenset[int] | None,
    memory_mib: Mapping[int, int],
    cache_nodes: frozenset[int] | None = None,
) -> dict[str, Any]:
    """The record: ``memory_nodes`` are the kernel's (cpuset), ``memory_mib`` where memory lies.

    ``cache_nodes`` are the NUMA nodes of the cache's drives, None when there is no cache or nobody
    knows; near means beside one of the job's GPUs, or of its cores when it has none.
    """
    record = {
        "asked": plan.numa if plan else "none",
        "given": given.kind,
        "reason": given.reason,
        "cpus": format_cpulist(cpus),
        "numa_nodes": sorted(cpu_nodes),
        "memory_nodes": sorted(given.mems),
        "gpu_numa_nodes": None if gpu_nodes is None else sorted(gpu_nodes),
        "local": is_local(cpu_nodes, gpu_nodes, plan.domains if plan else 0),
        "memory_mib": {str(node): mib for node, mib in memory_mib.items()},
    }
    if cache_nodes is not None:
        record["cache_numa_nodes"] = sorted(cache_nodes)
        if near := gpu_nodes or cpu_nodes:
            record["cache_near"] = bool(cache_nodes & near)
    return record
