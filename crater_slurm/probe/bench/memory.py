"""Memory bandwidth of a NUMA node: every core of it streams through memory of one node.

The decision whether a node may be measured, and whether the repeats are a figure, is here; the
threads are in ``team``. One thread, as mbw runs, reaches a fraction of a node's bandwidth.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import Dimm, NodeProfile, NumaNode
from crater_slurm.probe.bench import machine
from crater_slurm.probe.bench.result import MAX_BUSY, Measurement, Repeats, noise, now

_MIN_TOTAL_MIB = 512
#: Taken when the profile doesn't know the L3 cache: above 4 x the 512 MiB of the largest socket.
_UNKNOWN_L3_TOTAL_MIB = 2048
#: A memory channel is 64 bits wide.
_CHANNEL_BYTES = 8
#: What share of the channels' rate a measurement has when neither of them is wrong.
_PLAUSIBLE = (0.40, 1.00)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """How long and how strictly; ``total_mib`` overrides the size of the arrays."""

    repeats: int = 5
    seconds: float = 0.5
    allow_noise: bool = False
    total_mib: int | None = None

    @property
    def step_seconds(self) -> float:
        """About what one pair of NUMA nodes takes: the check, the filling, and the repeats."""
        return 1.0 + 1.0 + 2 * self.repeats * self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """From which CPUs to which memory; ``missing_cores`` may not be used by this process."""

    cpu_node: int
    memory_node: int
    cpus: tuple[int, ...]
    missing_cores: int
    total_mib: int


def pair(
    profile: NodeProfile, cpus_of: NumaNode, memory_of: NumaNode, options: MemoryOptions
) -> Pair:
    """What would be run from the cores of one NUMA node to the memory of another."""
    allowed = machine.allowed_cpus()
    cores = machine.one_thread_per_core(cpus_of.cpus)
    usable = machine.one_thread_per_core(cpu for cpu in cpus_of.cpus if cpu in allowed)
    return Pair(
        cpu_node=cpus_of.id,
        memory_node=memory_of.id,
        cpus=usable,
        missing_cores=len(cores) - len(usable),
        total_mib=options.total_mib or total_mib(profile, cpus_of),
    )


def total_mib(profile: NodeProfile, node: NumaNode) -> int:
    """Size of all arrays together: 4 x the L3 of the node's CPUs, at least 512 MiB."""
    caches = [c for c in profile.cpu.l3_caches if set(c.cpus) & set(node.cpus)]
    if not caches or any(cache.size_kib is None for cache in caches):
        return _UNKNOWN_L3_TOTAL_MIB
    l3_mib = sum(cache.size_kib or 0 for cache in caches) // 1024
    return max(4 * l3_mib, _MIN_TOTAL_MIB)


def channels_gb_s(dimms: Iterable[Dimm]) -> float | None:
    """What the memory channels of the machine can move; None when one of them is unknown."""
    speed_of: dict[str, int] = {}
    for dimm in dimms:
        if dimm.channel is None or dimm.speed_mt_s is None:
            return None
        speed_of[dimm.channel] = min(dimm.speed_mt_s, speed_of.get(dimm.channel, 10**9))
    return sum(speed_of.values()) * _CHANNEL_BYTES / 1000 if speed_of else None


def implausible(profile: NodeProfile, bandwidth_gb_s: float) -> str | None:
    """A warning when a node's own bandwidth can't be what its share of the channels moves."""
    whole = channels_gb_s(profile.dimms)
    if whole is None:
        return None
    share = whole / len(profile.cpu_domains)
    low, high = _PLAUSIBLE
    if low * share <= bandwidth_gb_s <= high * share:
        return None
    return (
        f"{bandwidth_gb_s:.1f} GB/s is {bandwidth_gb_s / share * 100:.0f} % of the "
        f"{share:.1f} GB/s of this node's share of the memory channels; "
        f"{low * 100:.0f} to {high * 100:.0f} % is plausible"
    )


def obstacle(pair: Pair) -> str | None:
    """Why measuring the pair is impossible or would harm, or None."""
    if not pair.cpus:
        return f"this process may use no CPU of NUMA node {pair.cpu_node}"
    nodes = machine.allowed_memory_nodes()
    if nodes and pair.memory_node not in nodes:
        return f"this process may use no memory of NUMA node {pair.memory_node} (its cpuset)"
    free = machine.free_memory_mib(pair.memory_node)
    left = machine.cgroup_left_mib()
    free = free if left is None else min(free, left)
    if free < pair.total_mib:
        return (
            f"{pair.total_mib} MiB are needed on NUMA node {pair.memory_node}, and {free} MiB can "
            "be taken there without harm; run it when the node is drained"
        )
    return None


def busy(pair: Pair) -> str | None:
    """Why the pair's CPUs are too busy to be measured, from a look at them of one second."""
    share = machine.cpus_busy(pair.cpus)
    if share <= MAX_BUSY:
        return None
    return (
        f"the CPUs of NUMA node {pair.cpu_node} are {share * 100:.0f} % busy (at most "
        f"{MAX_BUSY * 100:.0f} %; load {machine.load():.1f}); run it again when idle"
    )


def measure_pair(
    pair: Pair, options: MemoryOptions, what: str, unfit: str | None
) -> tuple[Measurement, Measurement]:
    """The bandwidth of ``a += b``, and of a copy; ``unfit`` keeps both out of the profile."""
    from crater_slurm.probe.bench.team import ADD, COPY, Team

    found = []
    with Team(pair.cpus, pair.memory_node, pair.total_mib * 2**20) as team:
        if team.misplaced:
            raise CraterError(
                f"{team.misplaced} of {team.sampled} pages do not lie on NUMA node "
                f"{pair.memory_node}, where they were bound"
            )
        for kernel, name in ((ADD, what), (COPY, f"{what}, copy")):
            start = time.monotonic()
            repeats = team.bandwidth_gb_s(kernel, options.repeats, options.seconds)
            method = (
                f"median of {options.repeats}, {len(pair.cpus)} threads, "
                f"{2 * team.array_bytes // 2**20} MiB each, {kernel.text}, "
                f"{team.sampled} sampled pages all on node {pair.memory_node}"
            )
            figure = judged(name, method, repeats, machine.load(), options, unfit)
            found.append(dataclasses.replace(figure, seconds=time.monotonic() - start))
    return found[0], found[1]


def judged(
    what: str,
    method: str,
    repeats: Repeats,
    load: float,
    options: MemoryOptions,
    unfit: str | None = None,
) -> Measurement:
    """The repeats as a figure, or refused; allowed noise is shown and never kept."""
    noisy = noise(repeats, "GB/s", load)
    if noisy and not options.allow_noise:
        return Measurement(what=what, method=method, time=now(), refused=noisy)
    if noisy:
        unfit = f"noise: spread {repeats.spread * 100:.0f} %, load {load:.1f}"
    return Measurement(
        what=what,
        value=round(repeats.median, 2),
        unit="GB/s",
        method=f"{method}, spread {repeats.spread * 100:.1f} %",
        time=now(),
        unfit=unfit,
    )
