"""The NUMA nodes of this machine, read from /sys: CPUs, memory, distances, and present use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.files import read_text
from crater_slurm.model.cpuset import parse_cpulist


@dataclass(frozen=True, slots=True)
class Domain:
    """One NUMA node. ``distances`` are those to the other nodes, by node id."""

    id: int
    cpus: frozenset[int]
    memory_mib: int
    distances: dict[int, int]


class Topology:
    """NUMA nodes by id. Offline CPUs, nodes without CPUs and nodes without memory are normal."""

    def __init__(
        self,
        domains: Iterable[Domain],
        root: Path = Path("/sys"),
        first_threads: Mapping[int, int] | None = None,
    ) -> None:
        self.domains = {domain.id: domain for domain in domains}
        self._root = root
        self._first_threads = first_threads or {}

    @classmethod
    def read(cls, root: Path = Path("/sys")) -> Topology:
        """Topology of the machine whose /sys is at ``root``; empty when it has no NUMA folder."""
        folders: dict[int, Path] = {}
        for path in (root / "devices/system/node").glob("node[0-9]*"):
            if match := re.fullmatch(r"node(\d+)", path.name):
                folders[int(match.group(1))] = path
        order = sorted(folders)
        domains = []
        for number in order:
            distances = (read_text(folders[number] / "distance") or "").split()
            domains.append(
                Domain(
                    number,
                    frozenset(parse_cpulist(read_text(folders[number] / "cpulist") or "")),
                    _meminfo(folders[number]).get("MemTotal", 0) // 1024,
                    {n: int(d) for n, d in zip(order, distances, strict=False)},
                )
            )
        return cls(domains, root, _first_threads(root / "devices/system/cpu"))

    def cores_of(self, cpus: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """The CPUs by core, in the order of the cores' first threads.

        A CPU whose siblings are unknown is a core of its own.
        """
        cores: dict[int, list[int]] = {}
        for cpu in sorted(cpus):
            cores.setdefault(self._first_threads.get(cpu, cpu), []).append(cpu)
        return tuple(tuple(cores[first]) for first in sorted(cores))

    @property
    def memory_nodes(self) -> frozenset[int]:
        """Nodes that hold memory."""
        return frozenset(d.id for d in self.domains.values() if d.memory_mib)

    def nodes_of(self, cpus: Iterable[int]) -> frozenset[int]:
        """NUMA nodes that the CPUs belong to."""
        wanted = frozenset(cpus)
        return frozenset(d.id for d in self.domains.values() if d.cpus & wanted)

    def mask_of(self, cpus: Iterable[int]) -> frozenset[int]:
        """Memory nodes for a task on these CPUs: their own, and memory-only nodes nearest to them.

        Nodes without CPUs hold a GPU's memory (Grace) or slower memory (CXL); taking them away
        would break the driver's own allocations. When a node of the CPUs has no memory, nothing
        is local and the mask is every node.
        """
        own = self.nodes_of(cpus)
        if not own or not own <= self.memory_nodes:
            return self.memory_nodes
        near = {d.id for d in self.domains.values() if self._is_near(d, own)}
        return own | near

    def _is_near(self, domain: Domain, own: frozenset[int]) -> bool:
        if domain.cpus or not domain.memory_mib:
            return False
        with_cpus = [d.id for d in self.domains.values() if d.cpus]
        nearest = min(domain.distances.get(n, 255) for n in with_cpus)
        return any(domain.distances.get(n, 255) == nearest for n in own)

    def unreclaimable_mib(self, node: int) -> int:
        """Memory in use on a node that the kernel can't give back by dropping clean caches."""
        info = _meminfo(self._root / f"devices/system/node/node{node}")
        caches = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
        return max(0, info.get("MemTotal", 0) - sum(info.get(name, 0) for name in caches)) // 1024


def _first_threads(folder: Path) -> dict[int, int]:
    """The lowest hardware thread of each CPU's core."""
    first = {}
    for path in folder.glob("cpu[0-9]*"):
        text = read_text(path / "topology/thread_siblings_list")
        if text and path.name[3:].isdecimal():
            first[int(path.name[3:])] = min(parse_cpulist(text))
    return first


def _meminfo(folder: Path) -> dict[str, int]:
    """Values of a node's meminfo in KiB."""
    found = re.findall(r"^Node \d+ (\S+):\s+(\d+)", read_text(folder / "meminfo") or "", re.M)
    return {name: int(value) for name, value in found}
