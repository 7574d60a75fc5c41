"""Refuses a profile whose parts contradict each other: a CPU in two NUMA nodes, a GPU on none."""

from __future__ import annotations

import re
from collections.abc import Iterable

from crater_slurm.errors import UsageError
from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import NodeProfile
from crater_slurm.store.readers import READERS

_PATH_PART = re.compile(r"([a-z0-9_]+)(?:\[(\d{1,4})\])?")


def check_profile(profile: NodeProfile) -> None:
    """UsageError when the parts of a profile contradict each other."""
    where = f"{profile.name}:"
    ids = [node.id for node in profile.numa_nodes]
    _unique(ids, f"{where} numa_nodes", "id")
    _unique([gpu.index for gpu in profile.gpus], f"{where} gpus", "index")
    _unique([nvme.name for nvme in profile.nvmes], f"{where} nvmes", "name")
    _check_cpus(profile, where)
    devices = [(f"gpus[{i}]", gpu.numa_node) for i, gpu in enumerate(profile.gpus)]
    devices += [(f"nvmes[{i}]", nvme.numa_node) for i, nvme in enumerate(profile.nvmes)]
    for path, numa in devices:
        if numa is not None and numa not in ids:
            raise UsageError(f"{where} {path}.numa_node: {numa} is not in numa_nodes {ids}")
    _check_nvlinks(profile, where)
    if profile.provenance:
        _check_paths(profile, where)


def _unique(values: Iterable[object], path: str, key: str) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise UsageError(f"{path}: {key} {value!r} is there twice")
        seen.add(value)


def _check_cpus(profile: NodeProfile, where: str) -> None:
    owner: dict[int, int] = {}
    for node in profile.numa_nodes:
        twice = [cpu for cpu in node.cpus if cpu in owner]
        if twice:
            raise UsageError(
                f"{where} numa_nodes: CPUs {format_cpulist(twice)} are in node "
                f"{owner[twice[0]]} and in node {node.id}; each CPU has one NUMA node"
            )
        owner.update(dict.fromkeys(node.cpus, node.id))
    cpu = profile.cpu
    threads = cpu.cores * cpu.threads_per_core
    if len(owner) > threads:
        raise UsageError(
            f"{where} numa_nodes list {len(owner)} CPUs, but cpu has only {threads} "
            f"({cpu.sockets} sockets x {cpu.cores_per_socket} cores x {cpu.threads_per_core} "
            "threads)"
        )


def _check_nvlinks(profile: NodeProfile, where: str) -> None:
    indices = [gpu.index for gpu in profile.gpus]
    for i, gpu in enumerate(profile.gpus):
        _unique((link.peer for link in gpu.nvlinks), f"{where} gpus[{i}].nvlinks", "peer")
        for link in gpu.nvlinks:
            if link.peer == gpu.index or link.peer not in indices:
                raise UsageError(
                    f"{where} gpus[{i}].nvlinks: peer {link.peer} is not another GPU of {indices}"
                )


def _check_paths(profile: NodeProfile, where: str) -> None:
    for path in profile.provenance:
        if not _has_path(profile, path):
            raise UsageError(f"{where} provenance.{path}: the profile has no value of that path")


def _has_path(profile: NodeProfile, path: str) -> bool:
    """Whether ``gpus[0].memory_mib`` or a part such as ``gpus[0]`` is in the profile."""
    item: object = profile
    for part in path.split("."):
        match = _PATH_PART.fullmatch(part)
        if match is None or match.group(1) not in READERS.get(type(item), {}):
            return False
        if item is profile and match.group(1) in ("name", "source", "provenance"):
            return False
        item = getattr(item, match.group(1))
        if match.group(2) is not None:
            if not isinstance(item, tuple) or int(match.group(2)) >= len(item):
                return False
            item = item[int(match.group(2))]
    return True
