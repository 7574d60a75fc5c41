"""Profiles and their differences as rows for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

from crater_slurm.model.profile import NodeProfile, Provenance
from crater_slurm.model.units import unit_of
from crater_slurm.store.codec import iso
from crater_slurm.store.diff import Difference, known, show_value


def summary(profile: NodeProfile) -> dict[str, Any]:
    """A node in one line: counts and sums; the fastest drive stands for all."""
    gpus: dict[str, int] = {}
    for gpu in profile.gpus:
        gpus[gpu.model] = gpus.get(gpu.model, 0) + 1
    reads = [nvme.random_read_iops for nvme in profile.nvmes if nvme.random_read_iops is not None]
    return {
        "name": profile.name,
        "gpus": gpus,
        "cores": profile.cpu.cores,
        "numa_nodes": len(profile.cpu_domains),
        "memory_mib": profile.memory_mib,
        "memory_bandwidth_gb_s": profile.memory_bandwidth_gb_s,
        "random_read_iops": max(reads, default=None),
        "method": profile.source.method.value,
        "time": origin(profile.source)[1] if profile.source.time else None,
    }


def value_entry(profile: NodeProfile, path: str, value: object) -> dict[str, Any]:
    """One value with its unit, method and time."""
    method, time = origin(profile.where_from(path) if known(value) else None)
    return {
        "path": path,
        "value": _plain(path, value),
        "unit": unit_of(path.rpartition(".")[2]) or None,
        "method": None if method == "-" else method,
        "time": None if time == "-" else time,
    }


def _plain(path: str, value: object) -> object:
    if path.endswith(".cpus"):
        return show_value(path, value)
    if isinstance(value, frozenset):
        return sorted(value)
    return value


def difference_entry(item: Difference) -> dict[str, Any]:
    """A difference as JSON data."""
    return {
        "path": item.path,
        "old": _plain(item.path, item.old),
        "new": _plain(item.path, item.new),
        "old_method": item.old_from.method.value if item.old_from else None,
        "new_method": item.new_from.method.value if item.new_from else None,
    }


def origin(provenance: Provenance | None) -> tuple[str, str]:
    """Method and time to the second, ``-`` for what is not known."""
    if provenance is None:
        return "-", "-"
    time = provenance.time
    return provenance.method.value, iso(time.replace(microsecond=0)) if time else "-"


def origin_text(provenance: Provenance) -> str:
    """Method and time in one."""
    method, time = origin(provenance)
    return method if time == "-" else f"{method} {time}"
