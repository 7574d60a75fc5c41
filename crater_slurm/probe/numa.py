"""NUMA nodes of a machine: CPUs, memory, distances, and what the firmware states of them (HMAT).

Bandwidth between nodes is measured elsewhere; nothing is guessed here. CPUs belong to one node:
a node that claims those of an earlier one is a firmware's error and is left out.
"""

from __future__ import annotations

import re
from pathlib import Path

from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import NumaKind, NumaNode
from crater_slurm.probe import files
from crater_slurm.probe.cpus import Topology

_BASE = "sys/devices/system/node"


def nodes(root: Path, layout: Topology, notes: list[str]) -> tuple[NumaNode, ...]:
    """NUMA nodes by ascending id; a kernel without NUMA shows one node.

    Raises CraterError when a node's CPUs can't be read: a guess would put jobs elsewhere.
    """
    base = root / _BASE
    present = files.numbered(base, "node")
    # The rows of distances have one number per online node, whether its folder is there or not.
    columns = files.cpulist(base / "online") or present
    owned: set[int] = set()
    members: dict[int, set[int]] = {}
    for node in (n for n in columns if n in set(present)):
        cpus = set(files.cpus(base / f"node{node}", "cpumap", "cpulist") or ())
        if cpus & owned:
            notes.append(f"NUMA node {node} claims CPUs of an earlier node and is left out")
            continue
        owned |= cpus
        members[node] = cpus & set(layout.online)
    if not members:
        return (_whole(root, layout),)
    if homeless := set(layout.online) - owned:
        notes.append(f"CPUs {format_cpulist(homeless)} belong to no NUMA node that is online")
    gpu_memory = _gpu_memory_nodes(root)
    rows = _distances(base, columns, tuple(members), notes)
    return tuple(
        _node(base, node, tuple(sorted(cpus)), node in gpu_memory, layout, rows.get(node, ()))
        for node, cpus in members.items()
    )


def _whole(root: Path, layout: Topology) -> NumaNode:
    memory = memory_mib(root)
    package = layout.package_ids[layout.online[0]] if len(layout.packages) == 1 else None
    return NumaNode(id=0, cpus=layout.online, kind=NumaKind.CPU, socket=package, memory_mib=memory)


def _node(
    base: Path,
    node: int,
    cpus: tuple[int, ...],
    is_gpu_memory: bool,
    layout: Topology,
    distances: tuple[int, ...],
) -> NumaNode:
    folder = base / f"node{node}"
    memory = _total_mib(files.read(folder / "meminfo"))
    kind = NumaKind.CPU if cpus else NumaKind.GPU_MEMORY if is_gpu_memory else None
    if kind is None and memory != 0:  # neither CPUs nor memory: an I/O device's own node
        kind = NumaKind.MEMORY
    bandwidth, latency = _firmware(folder)
    return NumaNode(
        id=node,
        cpus=cpus,
        kind=kind,
        socket=layout.package_ids[cpus[0]] if cpus else None,
        memory_mib=memory,
        distances=distances,
        firmware_bandwidth_gb_s=bandwidth,
        firmware_latency_ns=latency,
    )


def _firmware(folder: Path) -> tuple[float | None, int | None]:
    """Read bandwidth in GB/s and latency in ns from the nearest CPUs, as the HMAT states them.

    access1 is from the nearest CPUs; access0 may be from a nearer device (since Linux 5.10). The
    kernel gives MiB/s (Documentation/admin-guide/mm/numaperf.rst).
    """
    access = folder / "access1/initiators"
    if not access.is_dir():
        access = folder / "access0/initiators"
    mib_s = files.read_int(access / "read_bandwidth")
    return (
        round(mib_s * 2**20 / 1e9, 3) if mib_s else None,
        files.read_int(access / "read_latency") or None,
    )


def _distances(
    base: Path, columns: tuple[int, ...], kept: tuple[int, ...], notes: list[str]
) -> dict[int, tuple[int, ...]]:
    """Each kept node's distances to the kept nodes; none at all when a row is damaged."""
    rows: dict[int, tuple[int, ...]] = {}
    for node in kept:
        words = (files.read(base / f"node{node}/distance") or "").split()
        row = [int(w) for w in words if re.fullmatch(r"[0-9]{1,6}", w)]
        if len(row) != len(words) or len(row) < len(columns):
            if words:
                notes.append(f"distances of NUMA node {node} can't be read, so none are known")
            return {}
        rows[node] = tuple(d for d, column in zip(row, columns, strict=False) if column in kept)
    return rows


def _gpu_memory_nodes(root: Path) -> set[int]:
    """Nodes that are the memory of an NVIDIA GPU, as its driver says (POWER9, Grace Hopper)."""
    base = root / "proc/driver/nvidia/gpus"
    found = set()
    for gpu in files.entries(base):
        status = files.read(base / gpu / "numa_status") or ""
        if match := re.search(r"^Node:\s*([0-9]{1,6})$", status, re.MULTILINE):
            found.add(int(match.group(1)))
    return found


def memory_mib(root: Path) -> int | None:
    """All memory of the machine."""
    return _total_mib(files.read(root / "proc/meminfo"))


def _total_mib(meminfo: str | None) -> int | None:
    found = re.search(r"MemTotal:\s+([0-9]{1,15}) kB", meminfo or "")
    return int(found.group(1)) // 1024 if found else None
