"""GPUs and NUMA nodes of this node as Slurm numbers them, from the profile of crater-probe."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crater_slurm.model.cpuset import parse_cpulist

_log = logging.getLogger("crater.node.gpus")


@dataclass(frozen=True, slots=True)
class GpuFact:
    """Unknown is None; no fact is ever guessed from another."""

    uuid: str | None = None
    numa_node: int | None = None


class GpuFacts:
    """The GPUs in a profile file, read again when it changes. Only two facts are needed, so the
    JSON is read as it is, and a profile of a newer crater still serves."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._facts: dict[int, GpuFact] = {}
        self._sizes: list[tuple[int, int]] = []

    def all(self) -> dict[int, GpuFact]:
        """Facts by Slurm's GPU index; none when there is no usable profile."""
        with self._lock:
            try:
                status = self._path.stat()
                stamp = (status.st_mtime_ns, status.st_ino)
                if stamp != self._stamp:
                    profile = json.loads(self._path.read_text())
                    self._facts, self._sizes = _parse(profile), _numa_sizes(profile)
                    self._stamp = stamp
            except FileNotFoundError:
                self._facts, self._sizes, self._stamp = {}, [], None
            except (OSError, ValueError, TypeError, AttributeError) as error:
                _log.warning("gpus: couldn't read the profile %s: %s", self._path, error)
                self._facts, self._sizes, self._stamp = {}, [], None
            return self._facts

    def cpu_nodes(self, ids: Iterable[int]) -> frozenset[int]:
        """NUMA nodes of CPUs by Slurm's abstract ids, which count through NUMA node after node."""
        self.all()
        found, wanted, first = set(), set(ids), 0
        for node, size in self._sizes:
            if wanted.intersection(range(first, first + size)):
                found.add(node)
            first += size
        return frozenset(found)

    def numa_nodes(self, indexes: Iterable[int]) -> frozenset[int] | None:
        """NUMA nodes of the GPUs; None when one of them is unknown."""
        facts = self.all()
        nodes = [facts.get(index, GpuFact()).numa_node for index in indexes]
        known = frozenset(node for node in nodes if node is not None and node >= 0)
        return known if len([n for n in nodes if n is not None and n >= 0]) == len(nodes) else None


def _parse(profile: Any) -> dict[int, GpuFact]:
    profile = profile.get("profile", profile)
    facts: dict[int, GpuFact] = {}
    for gpu in profile.get("gpus", ()):
        uuid, numa = gpu.get("uuid"), gpu.get("numa_node")
        facts[int(gpu["index"] if "index" in gpu else len(facts))] = GpuFact(
            uuid if isinstance(uuid, str) else None, numa if isinstance(numa, int) else None
        )
    return facts


def _numa_sizes(profile: Any) -> list[tuple[int, int]]:
    """NUMA nodes that have CPUs, each with how many, in the order in which Slurm counts cores."""
    nodes = []
    for node in profile.get("profile", profile).get("numa_nodes", ()):
        cpus = parse_cpulist(str(node.get("cpus") or ""))
        if cpus:
            nodes.append((node.get("socket"), min(cpus), int(node["id"]), len(cpus)))
    lowest: dict[Any, int] = {}
    for package, cpu, _, _ in nodes:
        lowest[package] = min(lowest.get(package, cpu), cpu)
    nodes.sort(key=lambda node: (lowest[node[0]], node[1]))
    return [(number, size) for _, _, number, size in nodes]


def parse_indexes(text: str | None) -> tuple[int, ...]:
    """Indexes in Slurm's GPU lists (``0,2-3``), in the order written; none when it is no list."""
    numbers: list[int] = []
    try:
        for part in (text or "").split(","):
            numbers += parse_cpulist(part)
    except ValueError:
        return ()
    return tuple(numbers)
