"""The terms of a health score: one rule for each thing that can be wrong with a node.

A rule looks at one thing in a report and says nothing where nothing is known. The worst part (the
hottest GPU, the slowest drive) speaks for the node, since Slurm may give a job that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from crater_slurm.model import drives
from crater_slurm.model.health import GpuHealth, NodeHealth
from crater_slurm.model.profile import NodeProfile

#: The most that each mild term takes from a score. Together 0.6: a node on which nothing but these
#: is wrong keeps 0.4, and one that is merely busy (load and bandwidth) 0.8.
SHARES = {
    "ecc_corrected": 0.10,
    "memory_bandwidth": 0.10,
    "drive_latency": 0.20,
    "drive_wear": 0.10,
    "load": 0.10,
}
#: What a GPU that is slowed down is worth. A power cap is no fault: a busy GPU always meets it.
THROTTLED = {"thermal": 0.5, "hardware_thermal": 0.3, "hardware_slowdown": 0.3, "power_brake": 0.3}
#: The driver's error codes after which a GPU is broken until it is reset or replaced (48 double-bit
#: error, 64 row remapping failed, 79 fallen off the bus, 95 uncontained error, 119 and 120 its own
#: firmware does not answer). The others are mostly a program's own fault.
GRAVE_XIDS = frozenset({48, 64, 79, 95, 119, 120})
#: Of a part that works on but has lost data, or is about to.
BROKEN = 0.2
#: NVMe's critical warning bits: 0 spare blocks run out, 1 temperature; the others (reliability,
#: read-only, backup of its memory, persistent memory) are graver.
_LESSER_WARNINGS = 0b11
_LESSER = 0.5
_SECONDS_AN_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Thresholds of the terms. Pairs are where a term begins to fall, and where it is 0."""

    stale_seconds: float = 180
    gpu_warm_c: float = 80
    gpu_hot_c: float = 92
    ecc_corrected_some: int = 100
    ecc_corrected_many: int = 1000
    bandwidth_busy_percent: float = 80
    wear_percent: float = 90
    load_per_cpu: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One part of a score: what was seen, and the threshold that it was held against.

    ``share`` is None for a grave term. ``fault`` says that it is bad enough to drain a node for,
    where an admin wants that.
    """

    name: str
    value: float
    seen: str
    threshold: str
    share: float | None = None
    fault: bool = False

    @property
    def lost(self) -> float:
        """How much of a score this term takes by itself."""
        return (1 if self.share is None else self.share) * (1 - self.value)


def falling(value: float, good: float, bad: float) -> float:
    """1 up to ``good``, 0 from ``bad`` on, a straight line between."""
    if value <= good:
        return 1.0
    return 0.0 if value >= bad else (bad - value) / (bad - good)


def gpus_there(profile: NodeProfile | None, health: NodeHealth, slurm_gpus: int) -> Iterator[Term]:
    """Whether each GPU that should be there answers."""
    expected = len(profile.gpus) if profile else 0
    if profile and not any(gpu.mig_instances for gpu in profile.gpus):
        expected = max(expected, slurm_gpus)  # which counts MIG instances, where there are some
    answering = {gpu.index for gpu in health.gpus if gpu.answers}
    # No GPU in profile and report, but in Slurm: all are gone. Silent ones: nobody knows.
    none_left = profile is not None and not profile.gpus and not health.gpus
    if not expected or not (answering or none_left):
        return
    lost = max(0, expected - len(answering))
    silent = sorted({gpu.index for gpu in profile.gpus} - answering) if profile else []
    which = f"; silent: {', '.join(map(str, silent))}" if lost and silent else ""
    yield Term(
        name="gpu_lost",
        value=0.0 if lost else 1.0,
        seen=f"{len(answering)} of {expected} GPUs answer{which}",
        threshold="all",
        fault=lost > 0,
    )


def gpus(health: NodeHealth, limits: Limits) -> Iterator[Term]:
    """Heat, slowing down and errors: the worst GPU speaks for the node."""
    if hot := [(gpu.temperature_c, gpu) for gpu in health.gpus if gpu.temperature_c is not None]:
        degrees, gpu = max(hot, key=lambda pair: pair[0])
        value = falling(degrees, limits.gpu_warm_c, limits.gpu_hot_c)
        yield Term(
            name="gpu_temperature",
            value=value,
            seen=f"GPU {gpu.index} at {degrees:g} °C",
            threshold=f"falls from {limits.gpu_warm_c:g} °C, 0 at {limits.gpu_hot_c:g} °C",
            fault=value == 0,
        )
    answering = [gpu for gpu in health.gpus if gpu.answers]
    if answering:
        yield _throttled(answering)
    wrong = [(gpu.ecc_uncorrected, gpu) for gpu in health.gpus if gpu.ecc_uncorrected is not None]
    if wrong:
        errors, gpu = max(wrong, key=lambda pair: pair[0])
        yield Term(
            name="ecc_uncorrected",
            value=BROKEN if errors else 1.0,
            seen=f"GPU {gpu.index}: {errors} uncorrected errors" if errors else "none",
            threshold="0",
            fault=errors > 0,
        )
    if told := [gpu for gpu in health.gpus if gpu.xid is not None]:
        grave = [gpu for gpu in told if gpu.xid in GRAVE_XIDS]
        yield Term(
            name="gpu_xid",
            value=BROKEN if grave else 1.0,
            seen=f"GPU {grave[0].index}: XID {grave[0].xid}" if grave else "none that is grave",
            threshold="none of " + ", ".join(map(str, sorted(GRAVE_XIDS))),
            fault=bool(grave),
        )


def _throttled(gpus: list[GpuHealth]) -> Term:
    found = [
        (THROTTLED[reason], gpu.index, reason)
        for gpu in gpus
        for reason in gpu.throttled
        if reason in THROTTLED
    ]
    value, index, reason = min(found, default=(1.0, -1, ""))
    return Term(
        name="gpu_throttled",
        value=value,
        seen=f"GPU {index}: {reason}" if found else "none",
        threshold="none of " + ", ".join(THROTTLED),
        fault=value <= THROTTLED["hardware_slowdown"],
    )


def ecc_corrected(health: NodeHealth, earlier: NodeHealth | None, limits: Limits) -> Iterator[Term]:
    """Corrected errors since the earlier report, at most an hour old, so that a count is a rate."""
    if earlier is None or not 0 < health.time - earlier.time <= 1.5 * _SECONDS_AN_HOUR:
        return
    before = {gpu.index: gpu.ecc_corrected for gpu in earlier.gpus}
    new = []
    for gpu in health.gpus:
        was = before.get(gpu.index)
        if gpu.ecc_corrected is not None and was is not None:
            # The counter starts anew with the driver.
            errors = gpu.ecc_corrected - was if gpu.ecc_corrected >= was else gpu.ecc_corrected
            new.append((errors, gpu.index))
    if new:
        errors, index = max(new)
        some, many = limits.ecc_corrected_some, limits.ecc_corrected_many
        yield _mild(
            "ecc_corrected",
            falling(errors, some, many),
            f"GPU {index}: {errors} in {(health.time - earlier.time) / 60:.0f} min",
            f"falls from {some} in an hour, 0 at {many}",
        )


def drives_well(profile: NodeProfile | None, health: NodeHealth, limits: Limits) -> Iterator[Term]:
    warnings = [
        (d.critical_warning, d.name) for d in health.drives if d.critical_warning is not None
    ]
    if warnings:
        bits, name = max(warnings, key=lambda pair: (pair[0] & ~_LESSER_WARNINGS, pair[0]))
        grave = bits & ~_LESSER_WARNINGS
        yield Term(
            name="drive_warning",
            value=BROKEN if grave else _LESSER if bits else 1.0,
            seen=f"{name}: critical warning {bits:#04x}" if bits else "none",
            threshold="0",
            fault=bool(grave),
        )
    if slow := _slowest(profile, health):
        ratio, name, latency_us, calibrated_us = slow
        yield _mild(
            "drive_latency",
            0.0 if drives.is_slow(latency_us, calibrated_us) else 1.0,
            f"{name}: {latency_us:g} µs, {ratio:.2f} of its calibration",
            f"at most {1 / (1 - drives.SLOW_SHARE):.2f} of the calibration",
        )
    if worn := [(d.wear_percent, d.name) for d in health.drives if d.wear_percent is not None]:
        percent, name = max(worn)
        limit = limits.wear_percent
        value = 1.0 if percent < limit else 0.5 * falling(percent, limit, max(100, limit + 1))
        yield _mild("drive_wear", value, f"{name}: {percent} % used", f"below {limit:g} %")


def _slowest(
    profile: NodeProfile | None, health: NodeHealth
) -> tuple[float, str, float, float] | None:
    calibrated: Mapping[str, float | None] = {
        drive.name: drive.read_latency_us for drive in (profile.nvmes if profile else ())
    }
    found = []
    for drive in health.drives:
        before = calibrated.get(drive.name)
        if drive.latency_us is not None and before:
            found.append((drive.latency_us / before, drive.name, drive.latency_us, before))
    return max(found, default=None)


def busy(profile: NodeProfile | None, health: NodeHealth, limits: Limits) -> Iterator[Term]:
    """Load and memory bandwidth: not faults, but another node is the better choice."""
    if profile is None:
        return
    there = {node.id: node.memory_bandwidth_gb_s for node in profile.numa_nodes}
    used = []
    for node in health.numa_nodes:
        capacity = there.get(node.id)
        if node.memory_bandwidth_gb_s is not None and capacity:
            used.append((100 * node.memory_bandwidth_gb_s / capacity, node.id))
    if used:
        percent, numa = max(used)
        limit = limits.bandwidth_busy_percent
        yield _mild(
            "memory_bandwidth",
            falling(percent, limit, 100),
            f"NUMA node {numa}: {percent:.0f} % of the measured bandwidth in use",
            f"falls from {limit:g} %, 0 at 100 %",
        )
    cpus = sum(len(node.cpus) for node in profile.numa_nodes)
    if health.load is not None and cpus:
        each = health.load / cpus
        limit = limits.load_per_cpu
        yield _mild(
            "load",
            falling(each, limit, 2 * limit),
            f"{each:.2f} of each CPU ({health.load:g} on {cpus})",
            f"falls from {limit:g}, 0 at {2 * limit:g}",
        )


def _mild(name: str, value: float, seen: str, threshold: str) -> Term:
    return Term(name=name, value=value, seen=seen, threshold=threshold, share=SHARES[name])
