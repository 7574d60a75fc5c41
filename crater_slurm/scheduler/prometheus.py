"""Node health from a Prometheus server, for sites that scrape crater-probe or the DCGM exporter.

It is asked from a thread of its own, and only what it said last is used: a server that is away
costs the health of the nodes that report none themselves, which then count as healthy, and never
an answer to a submission.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from crater_slurm.config.health import PrometheusSource
from crater_slurm.guard import Guard
from crater_slurm.model.health import (
    THROTTLE_REASONS,
    DriveHealth,
    GpuHealth,
    NodeHealth,
    NumaHealth,
)
from crater_slurm.scheduler import prometheus_api
from crater_slurm.scheduler.prometheus_api import Sample

_log = logging.getLogger("crater.scheduler.prometheus")

Query = Callable[[str], list[Sample]]
#: Where a metric goes: the part of a node, the label that tells parts apart, the field. DCGM's
#: come first, so that what crater-probe says of the same GPU wins.
_METRICS: tuple[tuple[str, str, str, str], ...] = (
    ("DCGM_FI_DEV_GPU_TEMP", "gpu", "gpu", "temperature_c"),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "gpu", "gpu", "ecc_uncorrected"),
    ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "gpu", "gpu", "ecc_corrected"),
    ("DCGM_FI_DEV_XID_ERRORS", "gpu", "gpu", "xid"),
    ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "gpu", "gpu", "throttle_bits"),
    ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "gpu", "gpu", "throttle_bits"),
    ("crater_gpu_temperature_celsius", "gpu", "gpu", "temperature_c"),
    ('crater_gpu_ecc_errors_total{kind="uncorrected"}', "gpu", "gpu", "ecc_uncorrected"),
    ('crater_gpu_ecc_errors_total{kind="corrected"}', "gpu", "gpu", "ecc_corrected"),
    ("crater_ssd_latency_us", "drive", "device", "latency_us"),
    ("crater_ssd_wear_percent", "drive", "device", "wear_percent"),
    ("crater_ssd_critical_warning", "drive", "device", "critical_warning"),
    ("crater_cpu_numa_memory_bandwidth_used_gb_s", "numa", "numa", "memory_bandwidth_gb_s"),
    ("crater_node_load", "node", "", "load"),
    ("crater_probe_sample_timestamp_seconds", "node", "", "sampled"),
)
_WHOLE = {
    *("ecc_uncorrected", "ecc_corrected", "xid", "throttle_bits"),
    *("wear_percent", "critical_warning"),
}
#: A series that ends is at an end: a look back would show a reason that is over.
_THROTTLED = "crater_gpu_throttled == 1"
#: DCGM's exporter has no metric that tells when it looked; Prometheus knows when it asked.
_DCGM_TIME = "timestamp(DCGM_FI_DEV_GPU_TEMP)"
_LONGEST_LABEL = 255


@dataclass(slots=True)
class _Found:
    """What the series say of one node so far; parts by their label, fields by name."""

    node: dict[str, float] = field(default_factory=dict)
    parts: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)


class Prometheus:
    """Polls a server. ``known`` gives the names of Slurm's nodes; ``problem`` is for people."""

    def __init__(
        self,
        settings: PrometheusSource,
        known: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._known = known
        self._clock = clock
        self._health: dict[str, NodeHealth] = {}
        self._guard = Guard(_log, "no health from Prometheus")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prometheus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        # A question that is under way ends by its own limit; a daemon thread holds nobody up.
        self._thread.join(timeout=1)

    @property
    def problem(self) -> str:
        return self._guard.problem

    def health(self, node: str) -> NodeHealth | None:
        """What the server said last of a node; its time tells how old that is."""
        return self._health.get(node)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.poll()
            self._stop.wait(self._settings.poll_seconds)

    def poll(self) -> None:
        """Ask once. A failure keeps what was known, which grows stale by itself."""
        self._guard.run(self._poll)

    def _poll(self) -> None:
        names = frozenset(self._known())
        # A scrape that failed once must not make a node unknown at once.
        kept = self._health | self._read(names)
        self._health = {name: health for name, health in kept.items() if name in names}

    def _read(self, names: frozenset[str]) -> dict[str, NodeHealth]:
        url, file = self._settings.url, self._settings.token_file
        assert url is not None
        token = prometheus_api.read_token(file) if file else None

        def ask(expression: str) -> list[Sample]:
            return prometheus_api.query(
                url, expression, timeout_seconds=self._settings.timeout_seconds, token=token
            )

        labels = self._settings.node_labels
        window = self._settings.window_seconds

        def named(sample: Sample) -> str | None:
            return node_of(sample.labels, labels, names)

        return read(ask, named, window, self._clock())


def node_of(
    labels: Mapping[str, str], candidates: Iterable[str], known: Collection[str]
) -> str | None:
    """The node that a series is of; None when no label names one that Slurm has."""
    for name in candidates:
        value = labels.get(name, "")
        host = value.rpartition(":")[0] or value
        for text in (value, host, host.partition(".")[0]):
            if text in known:
                return text
    return None


def read(
    ask: Query, named: Callable[[Sample], str | None], window_seconds: float, now: float
) -> dict[str, NodeHealth]:
    """Health of every node that the server knows, from one round of questions."""
    found: dict[str, _Found] = {}

    def of(expression: str) -> Iterator[tuple[_Found, Sample]]:
        for sample in ask(expression):
            if (node := named(sample)) is not None:
                yield found.setdefault(node, _Found()), sample

    for metric, part, label, attribute in _METRICS:
        for entry, sample in of(f"last_over_time({metric}[{window_seconds:.0f}s])"):
            value = int(sample.value) if attribute in _WHOLE else sample.value
            if part == "node":
                entry.node[attribute] = value
            elif key := _text(sample.labels.get(label, "")):
                fields = entry.parts.setdefault((part, key), {})
                # The instances of a MIG GPU are series of their own.
                fields[attribute] = value
    for entry, sample in of(_THROTTLED):
        key, reason = (_text(sample.labels.get(name, "")) for name in ("gpu", "reason"))
        if key and reason:
            entry.parts.setdefault(("gpu", key), {}).setdefault("throttled", []).append(reason)
    for entry, sample in of(_DCGM_TIME):
        entry.times.append(sample.value)
    for entry in found.values():
        if (sampled := entry.node.get("sampled")) is not None:
            entry.times.append(sampled)
    # Without a time it is a target that is gone: its last values would look new at each round.
    return {name: _health(name, entry, now) for name, entry in found.items() if entry.times}


def _health(name: str, found: _Found, now: float) -> NodeHealth:
    """As old as the oldest that it is made of."""
    parts: dict[str, list[tuple[str, dict[str, Any]]]] = {"gpu": [], "drive": [], "numa": []}
    for (part, key), fields in sorted(found.parts.items()):
        parts[part].append((key, fields))
    return NodeHealth(
        node=name,
        time=min(*found.times, now),
        load=found.node.get("load"),
        gpus=tuple(_gpu(int(k), f) for k, f in parts["gpu"] if _index(k)),
        drives=tuple(DriveHealth(name=k, **f) for k, f in parts["drive"]),
        numa_nodes=tuple(NumaHealth(id=int(k), **f) for k, f in parts["numa"] if _index(k)),
    )


def _text(label: str) -> str:
    """A label as it may be shown to people; nothing of what a terminal would obey."""
    return label if label.isprintable() and len(label) <= _LONGEST_LABEL else ""


def _index(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 4


def _gpu(index: int, fields: dict[str, Any]) -> GpuHealth:
    known = dict(fields)
    bits = known.pop("throttle_bits", 0)
    reasons = [*known.pop("throttled", ()), *(w for b, w in THROTTLE_REASONS.items() if bits & b)]
    return GpuHealth(index=index, throttled=tuple(dict.fromkeys(reasons)), **known)
