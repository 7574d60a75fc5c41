"""Which NUMA nodes of a machine a job fits on together, and which choice strands least.

"As few as the GPUs need": the number of NUMA nodes is fixed by the GPUs (or, without GPUs, by
cores, memory and bandwidth), and everything else must then fit on that many. Asking for more
would trade locality away silently.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from crater_slurm.model.profile import NodeProfile
from crater_slurm.model.units import format_mib, format_number
from crater_slurm.placement.need import Need

#: Choices of NUMA nodes examined at most, best nodes first; 8 nodes have 70 choices of 4.
_MAX_CHOICES = 512


@dataclass(frozen=True, slots=True)
class Domain:
    """One NUMA node reduced to what is counted. ``gpus`` are indexes of GPUs that qualify."""

    id: int
    cores: int
    gpus: tuple[int, ...]
    memory_mib: int | None
    memory_bandwidth_gb_s: float | None
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fit:
    """The NUMA nodes chosen, or why there are none. ``count`` is how many the job must use.

    ``gpus_per_domain`` is the GPU count that each chosen node gives when they can share evenly,
    else 0. ``everywhere`` is False when only some choices of that size meet the need.
    """

    count: int
    chosen: tuple[int, ...] = ()
    gpus_per_domain: int = 0
    everywhere: bool = True
    have: str = ""
    reason: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.chosen)


def domains(profile: NodeProfile, eligible: frozenset[int]) -> list[Domain]:
    """NUMA nodes with CPUs, holding the GPUs among ``eligible``.

    A GPU whose NUMA node is unknown belongs to none, except where the machine has only one.
    """
    nodes = profile.cpu_domains
    only = nodes[0].id if len(nodes) == 1 else None
    threads = max(1, profile.cpu.threads_per_core)
    return [
        Domain(
            id=node.id,
            cores=len(node.cpus) // threads,
            gpus=tuple(
                g.index
                for g in profile.gpus
                if g.index in eligible
                and (g.numa_node if g.numa_node is not None else only) == node.id
            ),
            memory_mib=node.memory_mib,
            memory_bandwidth_gb_s=node.memory_bandwidth_gb_s,
            distances=node.distances,
        )
        for node in nodes
    ]


def fit(profile: NodeProfile, eligible: frozenset[int], need: Need, cores: int | None) -> Fit:
    """The best choice of NUMA nodes for a strict need, ``cores`` being physical cores."""
    all_domains = domains(profile, eligible)
    count = _count(all_domains, need, cores)
    if count is None:
        have = _have(all_domains, len(all_domains), need)
        return Fit(0, have=have, reason=_too_small(all_domains, len(eligible), need))
    candidates = _candidates(all_domains, count, need)
    passing = [c for c in candidates if _shortage(c, need, cores) is None]
    if not passing:
        best = max(candidates, key=lambda c: sum(d.cores for d in c))
        return Fit(
            count,
            have=_have(list(best), count, need),
            reason=_shortage(best, need, cores) or "too small",
        )
    chosen = min(passing, key=lambda c: _cost(c, need))
    return Fit(
        count,
        chosen=tuple(sorted(d.id for d in chosen)),
        gpus_per_domain=_even_share(chosen, need.gpus),
        everywhere=len(passing) == len(candidates),
        have=_have(list(chosen), count, need),
    )


def most_bandwidth(
    profile: NodeProfile, eligible: frozenset[int], need: Need, cores: int | None
) -> float | None:
    """The most GB/s that a strict need could have beside the rest of it; None when none is known.

    Without GPUs the bandwidth itself says how many NUMA nodes are used, so it is the machine's.
    """
    if not need.gpus:
        return profile.memory_bandwidth_gb_s
    without = dataclasses.replace(need, memory_bandwidth_gb_s=None)
    all_domains = domains(profile, eligible)
    count = _count(all_domains, without, cores)
    if count is None:
        return None
    sums = [
        sum(d.memory_bandwidth_gb_s or 0 for d in choice)
        for choice in _candidates(all_domains, count, without)
        if _shortage(choice, without, cores) is None
        and all(d.memory_bandwidth_gb_s is not None for d in choice)
    ]
    return max(sums, default=None)


def _candidates(all_domains: list[Domain], count: int, need: Need) -> list[tuple[Domain, ...]]:
    """Choices of ``count`` NUMA nodes that have the GPUs.

    ``count`` is the least number that has them, so that each node of such a choice has some.
    """
    pool = [d for d in all_domains if d.gpus] if need.gpus else all_domains
    choices = _choices(pool, count)
    return [c for c in choices if sum(len(d.gpus) for d in c) >= need.gpus]


def _choices(pool: Iterable[Domain], count: int) -> list[tuple[Domain, ...]]:
    def best_first(d: Domain) -> tuple[float, ...]:
        return (-len(d.gpus), -d.cores, -(d.memory_bandwidth_gb_s or 0), -(d.memory_mib or 0), d.id)

    ordered = sorted(pool, key=best_first)
    return list(itertools.islice(itertools.combinations(ordered, count), _MAX_CHOICES))


def _count(all_domains: list[Domain], need: Need, cores: int | None) -> int | None:
    """How many NUMA nodes the job must use: by its GPUs, or without GPUs by everything else."""
    if need.gpus:
        sizes = sorted((len(d.gpus) for d in all_domains), reverse=True)
        for count in range(1, len(sizes) + 1):
            if sum(sizes[:count]) >= need.gpus:
                return count
        return None
    for count in range(1, len(all_domains) + 1):
        for choice in _choices(all_domains, count):
            if _shortage(choice, need, cores) is None:
                return count
    return None


def _too_small(all_domains: list[Domain], eligible: int, need: Need) -> str:
    """Why not even all NUMA nodes together are enough."""
    if not all_domains:
        return "its NUMA nodes are unknown"
    if not need.gpus:
        return "all its NUMA nodes together are too small"
    if eligible < need.gpus:
        return "too few GPUs"
    placed = sum(len(d.gpus) for d in all_domains)
    return f"only {placed} of its GPUs are known to be beside a NUMA node with CPUs"


def _shortage(choice: tuple[Domain, ...], need: Need, cores: int | None) -> str | None:
    """What these NUMA nodes lack for the need; None when they have it all."""
    where = "one NUMA node" if len(choice) == 1 else f"{len(choice)} NUMA nodes"
    if cores and (have := sum(d.cores for d in choice)) < cores:
        beside = f" beside {need.gpus} GPU{'s' * (need.gpus > 1)}" if need.gpus else ""
        return f"{where} has at most {have} cores{beside}".replace("nodes has", "nodes have")
    if need.memory_mib:
        if any(d.memory_mib is None for d in choice):
            return "the memory of its NUMA nodes is unknown"
        memory = sum(d.memory_mib or 0 for d in choice)
        if memory < need.memory_mib:
            return f"{where} has {format_mib(memory)} of memory".replace("nodes has", "nodes have")
    if need.memory_bandwidth_gb_s:
        if any(d.memory_bandwidth_gb_s is None for d in choice):
            return "the memory bandwidth of its NUMA nodes is unknown"
        bandwidth = sum(d.memory_bandwidth_gb_s or 0 for d in choice)
        if bandwidth < need.memory_bandwidth_gb_s:
            return f"{where} gives {format_number(bandwidth)} GB/s".replace(
                "nodes gives", "nodes give"
            )
    return None


def _cost(choice: tuple[Domain, ...], need: Need) -> tuple[float, int, float, tuple[int, ...]]:
    """Sort key: near nodes first, then the fewest GPUs and bandwidth left over."""
    distance = sum(
        a.distances[b.id] for a, b in itertools.combinations(choice, 2) if b.id < len(a.distances)
    )
    left_gpus = sum(len(d.gpus) for d in choice) - need.gpus
    left_bandwidth = sum(d.memory_bandwidth_gb_s or 0 for d in choice)
    return (distance, left_gpus, left_bandwidth, tuple(sorted(d.id for d in choice)))


def _even_share(choice: tuple[Domain, ...], gpus: int) -> int:
    if not gpus or gpus % len(choice):
        return 0
    share = gpus // len(choice)
    return share if all(len(d.gpus) >= share for d in choice) else 0


def _have(choice: list[Domain], count: int, need: Need) -> str:
    """``1 NUMA node: 4 GPUs, 16 cores, 142 GB/s``."""
    parts = []
    if need.gpus:
        parts.append(f"{sum(len(d.gpus) for d in choice)} GPUs")
    parts.append(f"{sum(d.cores for d in choice)} cores")
    if need.memory_mib and all(d.memory_mib is not None for d in choice):
        parts.append(format_mib(sum(d.memory_mib or 0 for d in choice)))
    if need.memory_bandwidth_gb_s and all(d.memory_bandwidth_gb_s is not None for d in choice):
        total = sum(d.memory_bandwidth_gb_s or 0 for d in choice)
        parts.append(f"{format_number(total)} GB/s")
    return f"{', '.join(parts)} on {count} NUMA node{'s' * (count != 1)}"
