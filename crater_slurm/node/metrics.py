"""The daemon's figures as Prometheus metrics, made from memory at each scrape.

A scrape asks neither a drive nor a worker: figures are those of the last round. Series by job are
those of the jobs that hold most, a fixed number. What is unknown has no series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from crater_slurm import __version__
from crater_slurm.node.jobs import PREPARED, JobRecord
from crater_slurm.node.services import Services

if TYPE_CHECKING:
    from prometheus_client.core import Metric

#: Jobs with series of their own.
_MOST_JOBS = 32
_PREFIX = "crater_io_daemon_"

#: A node has no more lanes than that, whatever workers say.
_MOST_LANES = 100_000


@dataclass(slots=True)
class Family:
    """One metric with its series; ``kind`` is gauge, counter, or summary (count and sum)."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: str = "gauge"
    series: list[tuple[tuple[str, ...], tuple[float, ...]]] = field(default_factory=list)

    def add(self, *labels: str, value: float | tuple[float, float]) -> Family:
        values = value if isinstance(value, tuple) else (value,)
        self.series.append((labels, values))
        return self

    def metric(self) -> Metric:
        from prometheus_client import core

        if self.kind == "summary":
            summary = core.SummaryMetricFamily(_PREFIX + self.name, self.help, labels=self.labels)
            for labels, (count, total) in self.series:
                summary.add_metric(labels, int(count), total)
            return summary
        kind = core.CounterMetricFamily if self.kind == "counter" else core.GaugeMetricFamily
        family = kind(_PREFIX + self.name, self.help, labels=self.labels)
        for labels, (value,) in self.series:
            family.add_metric(labels, value)
        return family


def families(services: Services, workers: Callable[[], int] = lambda: 0) -> Iterator[Family]:
    """Every metric with what is known now."""
    records = services.store.all()
    services.life.totals.see(records)
    yield Family("info", "Version of crater-io-daemon.", ("version",)).add(__version__, value=1)
    yield from _checkpoints(services.life.totals.get())
    yield from _cache(services, records)
    pending = services.life.totals.pending
    yield _one("flush_pending_bytes", "Checkpoints not at their destination yet.", pending.bytes)
    yield _one(
        "flush_oldest_seconds", "How long the oldest of them has waited.", pending.oldest_seconds
    )
    yield _one("flush_pending_steps", "How many they are.", pending.steps)
    yield _one("workers", "Checkpoint workers that run.", workers())
    yield _one("lanes", "Lanes of the ring in use, one for each rank.", _lanes(records))
    phases = Family("jobs", "Jobs with a record: running, or ended.", ("phase",))
    running = sum(record.phase == PREPARED for record in records)
    yield phases.add("running", value=running).add("ended", value=len(records) - running)
    yield _one(
        "direct_writes", "Jobs that were told of large files beside the cache.",
        services.life.direct_writers, "counter",
    )  # fmt: skip


def _lanes(records: list[JobRecord]) -> int:
    """Lanes of running jobs, as far as their workers' word can be true."""
    told = (r.checkpoints.get("counters", {}) for r in records if r.phase == PREPARED)
    lanes = (counters.get("lanes", 0) for counters in told)
    return sum(int(n) for n in lanes if type(n) in (int, float) and 0 <= n <= _MOST_LANES)


def _one(name: str, text: str, value: float, kind: str = "gauge") -> Family:
    return Family(name, text, kind=kind).add(value=value)


def _checkpoints(total: dict[str, float]) -> Iterator[Family]:
    hits = total["cache_hits"] + total["staged_hits"]
    asked = hits + total["cache_misses"] + total["staged_misses"]
    if asked:
        text = "Restores and staged data that were in the cache, of all since the start."
        yield _one("cache_hit_ratio", text, hits / asked)
    moved = Family("checkpoint_bytes", "Bytes that each stage moved.", ("stage",), "counter")
    took = Family("checkpoint_seconds", "Time that each stage took.", ("stage",), "summary")
    for stage, name, count, seconds in (
        ("drain", "drained_bytes", "saved", "drain_seconds"),
        ("flush", "flushed_bytes", "flushed", "flush_seconds"),
        ("restore", "restored_bytes", "restored", "restore_seconds"),
    ):
        moved.add(stage, value=total[name])
        took.add(stage, value=(total[count], total[seconds]))
    yield moved
    yield took
    results = Family("checkpoints", "Parts of checkpoints by result.", ("result",), "counter")
    for result in ("saved", "direct", "failed", "flushed", "restored"):
        results.add(result, value=total[result])
    yield results
    staged = Family("staged", "Questions for staged data by answer.", ("answer",), "counter")
    yield staged.add("copy", value=total["staged_hits"]).add(
        "original", value=total["staged_misses"]
    )


def _cache(services: Services, records: list[JobRecord]) -> Iterator[Family]:
    life, room = services.life, services.life.room
    held = Family("cache_bytes", "Bytes of the cache: total, free, and held by whom.", ("state",))
    if room.total_bytes:
        held.add("total", value=room.total_bytes).add("free", value=room.free_bytes)
    by_job = {record.job_id: life.held_bytes(record) for record in records if record.folders}
    for state, running in (("running", True), ("ended", False)):
        held.add(
            state,
            value=sum(by_job.get(r.job_id, 0) for r in records if (r.phase == PREPARED) == running),
        )
    held.add("trash", value=services.cache.holdings.trash_bytes)
    yield held
    largest = sorted(by_job.items(), key=lambda item: -item[1])[:_MOST_JOBS]
    jobs = Family("job_cache_bytes", "Bytes of the jobs that hold most.", ("job_id",))
    for job_id, size in largest:
        jobs.add(job_id, value=size)
    if jobs.series:
        yield jobs
    evicted = Family("evicted", "Folders removed to make room.", ("kind",), "counter")
    for kind, count in life.evictor.evicted.items():
        evicted.add(kind, value=count)
    yield evicted
    text = "Bytes removed to make room."
    yield _one("evicted_bytes", text, life.evictor.evicted_bytes, "counter")
    text = "Times that a job went beyond its space or its user's."
    yield _one("quota_exceeded", text, life.quotas.exceeded, "counter")
    text = "Folders with checkpoints that no record knows."
    yield _one("leftovers_kept", text, len(life.leftovers.kept))
    text = "Folders of dead jobs that no record knew."
    yield _one("leftovers_removed", text, life.leftovers.removed, "counter")
