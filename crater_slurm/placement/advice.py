"""For a request that no node can meet: the node that comes nearest, and the smallest way out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from crater_slurm.model.profile import NodeProfile
from crater_slurm.model.units import format_number
from crater_slurm.placement.inventory import NodeClass
from crater_slurm.placement.need import Need
from crater_slurm.placement.rules import Result, evaluate


def nearest(candidates: Sequence[tuple[NodeClass, Result]]) -> tuple[NodeClass, Result] | None:
    """The class that fails the fewest conditions, then by the least; None without candidates."""

    def distance(item: tuple[NodeClass, Result]) -> tuple[int, float, str]:
        failed = [c for c in item[1].checks if not c.ok]
        return (len(failed), sum(1 - min(1.0, c.measure) for c in failed), item[0].example)

    return min(candidates, key=distance, default=None)


def smallest_change(profile: NodeProfile, need: Need) -> tuple[str, ...]:
    """Directives that would make the need fit this machine, each alternative tried before said.

    Single changes come first, each on its own; when no single one is enough, the one combination
    that lowers everything to what the machine has.
    """
    singles = _lowered(profile, need)
    if need.strict:
        singles.append(("numa=best_effort", {"strict": False}))
    alternatives = [
        text
        for text, change in singles
        if evaluate(profile, dataclasses.replace(need, **change)).ok  # type: ignore[arg-type]
    ]
    if alternatives:
        return tuple(alternatives)
    lowered = {k: v for _, change in _lowered(profile, need, every=True) for k, v in change.items()}
    for strict in (need.strict, False):
        combined = dataclasses.replace(need, **(lowered | {"strict": strict}))  # type: ignore[arg-type]
        if evaluate(profile, combined).ok:
            words = [t for t, _ in _lowered(profile, need, every=True)]
            if need.strict and not strict:
                words.append("numa=best_effort")
            return (" ".join(words),)
    return ()


def _lowered(
    profile: NodeProfile, need: Need, *, every: bool = False
) -> list[tuple[str, dict[str, object]]]:
    """Each amount lowered to what the machine has; ``every`` leaves out what it has enough of."""
    failing = {c.name for c in evaluate(profile, need).checks if not c.ok}
    changes: list[tuple[str, dict[str, object]]] = []
    gpus = len(profile.gpus)
    if need.gpus and "gpus" in failing:
        changes.append((f"gpus={gpus}", {"gpus": gpus}))
    best_memory = max((g.memory_mib or 0 for g in profile.gpus), default=0)
    if need.gpu_memory_mib and "gpu-memory" in failing and best_memory:
        changes.append((f"gpu-memory={best_memory}MiB", {"gpu_memory_mib": best_memory}))
    if need.gpu_type and "gpu-type" in failing and profile.gpus:
        model = profile.gpus[0].model
        changes.append((f"gpu-type={model}", {"gpu_type": model}))
    if need.precision and "precision" in failing:
        changes += _other_precision(profile, need)
    if need.cpus and ("cpus" in failing or ("numa" in failing and not every)):
        most = _most_cores(profile, need)
        if 0 < most < need.cpus:
            changes.append((f"cpus={most}", {"cpus": most, "cpus_are_threads": False}))
    if need.memory_bandwidth_gb_s and failing & {"memory-bandwidth", "numa"}:
        most_bandwidth = _most_bandwidth(profile, need)
        if most_bandwidth and most_bandwidth < need.memory_bandwidth_gb_s:
            text = format_number(most_bandwidth).replace(",", "")
            changes.append((f"memory-bandwidth={text}", {"memory_bandwidth_gb_s": most_bandwidth}))
    iops = max((n.random_read_iops or 0 for n in profile.nvmes), default=0)
    if need.ssd_iops and "ssd-iops" in failing and iops:
        changes.append((f"ssd-iops={iops}", {"ssd_iops": iops}))
    latencies = [n.read_latency_us for n in profile.nvmes if n.read_latency_us is not None]
    if need.ssd_latency_us and "ssd-latency" in failing and latencies:
        best = min(latencies)
        changes.append((f"ssd-latency={best:g}us", {"ssd_latency_us": best}))
    if need.cache_gb and "cache" in failing and profile.cache_gb:
        changes.append((f"cache={profile.cache_gb}GB", {"cache_gb": profile.cache_gb}))
    if need.avx and "avx" in failing:
        flags = profile.cpu.avx or frozenset()
        for level in ("avx2", "avx"):
            if level in flags and level != need.avx:
                changes.append((f"avx={level}", {"avx": level}))
                break
    return changes


def _other_precision(profile: NodeProfile, need: Need) -> list[tuple[str, dict[str, object]]]:
    able = {p for g in profile.gpus for p in g.precisions or ()}
    for precision in ("bf16", "fp16", "tf32", "fp32"):
        if precision in able and precision != need.precision:
            return [(f"precision={precision}", {"precision": precision})]
    return []


def _most_cores(profile: NodeProfile, need: Need) -> int:
    """The most cores that fit beside the rest of the need, found by bisection."""
    low, high = 0, min(need.cpus or 0, profile.cpu.cores)
    while low < high:
        middle = (low + high + 1) // 2
        trial = dataclasses.replace(need, cpus=middle, cpus_are_threads=False)
        failed = {c.name for c in evaluate(profile, trial).checks if not c.ok}
        if failed & {"cpus", "numa"}:
            high = middle - 1
        else:
            low = middle
    return low


def _most_bandwidth(profile: NodeProfile, need: Need) -> float | None:
    if not need.strict:
        return profile.memory_bandwidth_gb_s
    without = dataclasses.replace(need, memory_bandwidth_gb_s=None)
    fit = evaluate(profile, without).fit
    if fit is None or not fit.ok:
        return None
    sizes = sorted((n.memory_bandwidth_gb_s or 0 for n in profile.cpu_domains), reverse=True)
    return sum(sizes[: fit.count])
