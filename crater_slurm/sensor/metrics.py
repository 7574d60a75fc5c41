"""The node's facts and health as Prometheus metrics, made from the last sample at each scrape.

A scrape reads memory only: ten Prometheus servers cost no more than one. What is unknown has no
series. GB are 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from crater_slurm import __version__
from crater_slurm.model.health import DriveHealth, GpuHealth, NodeHealth, NumaHealth
from crater_slurm.model.profile import Gpu, NodeProfile, NumaNode, Nvme

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Picture:
    """What the metrics are made of: the last scan and sample, and what could not be read."""

    profile: NodeProfile
    health: NodeHealth
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class _Family:
    """One metric with its series; ``counter`` for what only grows."""

    name: str
    help: str
    labels: tuple[str, ...]
    counter: bool = False
    series: list[tuple[tuple[str, ...], float]] = field(default_factory=list)

    def add(self, value: float | None, *labels: object) -> None:
        if value is not None:
            self.series.append((tuple(map(str, labels)), float(value)))

    def metric(self) -> Metric:
        kind = CounterMetricFamily if self.counter else GaugeMetricFamily
        family = kind(self.name, self.help, labels=self.labels)
        for labels, value in self.series:
            family.add_metric(labels, value)
        return family


class NodeCollector(Collector):
    """Registers with a prometheus_client registry. ``picture`` gives the last one, or None."""

    def __init__(self, picture: Callable[[], Picture | None]) -> None:
        self._picture = picture

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield _info().metric()
        picture = self._picture()
        if picture is None:
            return
        node = picture.profile.name
        families = (
            *_gpus(node, picture.profile.gpus, picture.health.gpus),
            *_numa_nodes(node, picture.profile.numa_nodes, picture.health.numa_nodes),
            *_drives(node, picture.profile.nvmes, picture.health.drives),
            *_probe(node, picture),
        )
        yield from (family.metric() for family in families if family.series)


def _info() -> _Family:
    family = _Family("crater_probe_info", "Version of crater-probe.", ("version",))
    family.add(1, __version__)
    return family


_GPU_LABELS = ("node", "gpu", "uuid", "model")
_GPU_FACTS = {
    "sm_count": ("sm_count", "Streaming multiprocessors of the GPU."),
    "memory_bandwidth_gb_s": (
        "memory_bandwidth_gb_s",
        "Memory bandwidth that the model has, GB/s.",
    ),
}
_GPU_STATES = {
    "temperature_c": ("temperature_celsius", "Temperature of the GPU."),
    "utilization_percent": ("utilization_percent", "Share of time with a kernel running."),
    "memory_utilization_percent": (
        "memory_utilization_percent",
        "Share of time in which memory was read or written.",
    ),
    "power_w": ("power_watts", "Power drawn."),
}


def _gpus(node: str, gpus: Iterable[Gpu], states: Iterable[GpuHealth]) -> Iterator[_Family]:
    facts = _families("gpu", _GPU_FACTS, _GPU_LABELS)
    now = _families("gpu", _GPU_STATES, _GPU_LABELS)
    used = _Family("crater_gpu_memory_used_bytes", "GPU memory in use.", _GPU_LABELS)
    total = _Family("crater_gpu_memory_total_bytes", "GPU memory.", _GPU_LABELS)
    throttled = _Family(
        "crater_gpu_throttled", "1 while the driver slows it down.", (*_GPU_LABELS, "reason")
    )
    errors = _Family(
        "crater_gpu_ecc_errors",
        "Memory errors since the driver's start.",
        (*_GPU_LABELS, "kind"),
        counter=True,
    )
    by_index = {state.index: state for state in states}
    for gpu in gpus:
        labels = (node, gpu.index, gpu.uuid or "", gpu.model)
        state = by_index.get(gpu.index, GpuHealth(index=gpu.index))
        for name, family in facts.items():
            family.add(getattr(gpu, name), *labels)
        for name, family in now.items():
            family.add(getattr(state, name), *labels)
        used.add(_bytes(state.memory_used_mib), *labels)
        total.add(_bytes(gpu.memory_mib), *labels)
        errors.add(state.ecc_corrected, *labels, "corrected")
        errors.add(state.ecc_uncorrected, *labels, "uncorrected")
        for reason in state.throttled:
            throttled.add(1, *labels, reason)
    yield from (*facts.values(), *now.values(), used, total, throttled, errors)


def _numa_nodes(
    node: str, nodes: Iterable[NumaNode], states: Iterable[NumaHealth]
) -> Iterator[_Family]:
    labels = ("node", "numa")
    cpu = _Family("crater_cpu_utilization_percent", "CPU time not idle.", labels)
    bandwidth = _Family(
        "crater_cpu_numa_memory_bandwidth_gb_s", "Memory bandwidth as measured, GB/s.", labels
    )
    used = _Family(
        "crater_cpu_numa_memory_bandwidth_used_gb_s", "Memory bandwidth in use, GB/s.", labels
    )
    memory = _Family("crater_cpu_numa_memory_used_bytes", "Memory in use.", labels)
    for numa in nodes:
        bandwidth.add(numa.memory_bandwidth_gb_s, node, numa.id)
    for state in states:
        cpu.add(state.cpu_utilization_percent, node, state.id)
        used.add(state.memory_bandwidth_gb_s, node, state.id)
        memory.add(_bytes(state.memory_used_mib), node, state.id)
    yield from (cpu, bandwidth, used, memory)


_DRIVE_STATES = {
    "read_iops": ("read_iops", "Reads a second."),
    "write_iops": ("write_iops", "Writes a second."),
    "read_mb_s": ("read_mb_s", "MB read a second."),
    "write_mb_s": ("write_mb_s", "MB written a second."),
    "read_await_ms": ("read_await_ms", "Mean time of a read with its wait in the queue, ms."),
    "write_await_ms": ("write_await_ms", "Mean time of a write with its wait in the queue, ms."),
    "busy_percent": ("busy_percent", "Share of time with a request under way."),
    "latency_us": (
        "latency_us",
        "Median of reads of 4 KiB at queue depth 1, µs; the cache drive only.",
    ),
    "wear_percent": ("wear_percent", "Share of the rated endurance that is used."),
    "temperature_c": ("temperature_celsius", "Temperature of the drive."),
    "critical_warning": ("critical_warning", "The drive's own warning bits; 0 is well."),
}
_DRIVE_FACTS = {
    "read_latency_us": ("calibrated_latency_us", "Latency at queue depth 1 as calibrated, µs."),
    "random_read_iops": ("calibrated_read_iops", "Random reads of 4 KiB a second as calibrated."),
    "iops_stability_ratio": ("iops_stability_ratio", "Slowest second against the fastest."),
}


def _drives(node: str, drives: Sequence[Nvme], states: Iterable[DriveHealth]) -> Iterator[_Family]:
    labels = ("node", "device", "model")
    models = {drive.name: drive.model or "" for drive in drives}
    facts = _families("ssd", _DRIVE_FACTS, labels)
    for drive in drives:
        for name, family in facts.items():
            family.add(getattr(drive, name), node, drive.name, models[drive.name])
    now = _families("ssd", _DRIVE_STATES, labels)
    for state in states:
        for name, family in now.items():
            family.add(getattr(state, name), node, state.name, models.get(state.name, ""))
    yield from (*facts.values(), *now.values())


def _families(
    what: str, table: Mapping[str, tuple[str, str]], labels: tuple[str, ...]
) -> dict[str, _Family]:
    """A family for each field of the table, by field."""
    return {
        field: _Family(f"crater_{what}_{name}", text, labels)
        for field, (name, text) in table.items()
    }


def _probe(node: str, picture: Picture) -> Iterator[_Family]:
    load = _Family("crater_node_load", "Processes that run or wait, mean of a minute.", ("node",))
    load.add(picture.health.load, node)
    sampled = _Family(
        "crater_probe_sample_timestamp_seconds", "When the node was looked at last.", ("node",)
    )
    sampled.add(picture.health.time, node)
    problems = _Family(
        "crater_probe_problems", "Things that could not be read; see the probe's log.", ("node",)
    )
    problems.add(len(picture.problems), node)
    yield from (load, sampled, problems)


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib * _MIB
