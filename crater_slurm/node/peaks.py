"""A job's peaks so far, added up from samples and kept on disk: a restart of the daemon, which
happens while jobs run, forgets none of them. One small JSON file per job.

Not synced to the disk at once: jobs do not outlive the machine either. A file that can't be read
costs the peaks so far, nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crater_slurm.files import write_atomically
from crater_slurm.node.gpu_share import GpuShare
from crater_slurm.node.job_io import Io
from crater_slurm.node.usage import Usage

_log = logging.getLogger("crater.node.peaks")
_MIB = 2**20
#: The clock was set back, or two looks came at once: no time to divide by.
_SHORTEST_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a job; ``time`` is seconds since 1970."""

    time: float
    usage: Usage
    io: Io | None = None
    gpus: tuple[GpuShare, ...] = ()


@dataclass(slots=True)
class Mean:
    """A mean of values that come one by one, and the largest of them."""

    total: float = 0.0
    count: int = 0
    most: float = 0.0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.most = max(self.most, value)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class Peaks:
    """Everything known of one run of a job: one start of one job id. Sizes in MiB, rates in MB/s,
    ``gpus`` the peak memory by GPU, ``recent`` its utilization since it was last reported."""

    job_id: str
    started: float
    plan_id: str = ""
    node: str = ""
    gpu_count: int = 0
    time: float = 0.0
    samples: int = 0
    need_mib: int | None = None
    total_mib: int | None = None
    cores: float | None = None
    oom_kills: int = 0
    gpus: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    utilization: Mean = field(default_factory=Mean)
    recent: Mean = field(default_factory=Mean)
    read: Mean | None = None
    written: Mean | None = None
    iops: float | None = None

    def add(self, sample: Sample) -> None:
        """Take a sample in."""
        since = sample.time - (self.time or self.started)
        self.time = max(self.time, sample.time)
        self.samples += 1
        usage = sample.usage
        self.need_mib = _larger(self.need_mib, usage.need_bytes)
        self.total_mib = _larger(self.total_mib, usage.total_bytes)
        self.oom_kills = max(self.oom_kills, usage.oom_kills or 0)
        if usage.cpu_seconds is not None:
            self.cores = usage.cpu_seconds / max(self.time - self.started, 1e-3)
        if sample.io is not None:
            self._add_io(sample.io, since)
        self._add_gpus(sample.gpus)

    def _add_io(self, io: Io, since: float) -> None:
        self.read, self.written = self.read or Mean(), self.written or Mean()
        for kind, size in ((self.read, io.read_bytes), (self.written, io.written_bytes)):
            kind.total += size / 1e6
            kind.count += 1
            if since >= _SHORTEST_SECONDS:
                kind.most = max(kind.most, size / 1e6 / since)
        if io.operations is not None and since >= _SHORTEST_SECONDS:
            self.iops = max(self.iops or 0.0, io.operations / since)

    def _add_gpus(self, shares: tuple[GpuShare, ...]) -> None:
        for share in shares:
            if share.memory_mib is not None:
                self.gpus[share.uuid] = max(self.gpus.get(share.uuid, 0), share.memory_mib)
            if share.size_mib is not None:
                self.sizes[share.uuid] = share.size_mib
        known = [s.utilization_percent for s in shares if s.utilization_percent is not None]
        if known:
            self.utilization.add(sum(known) / len(known))
            self.recent.add(sum(known) / len(known))

    def figures(self) -> dict[str, float]:
        """The measured fields of an Observation; what is unknown is left out."""
        seconds = max(self.time - self.started, 1e-3)
        fullest = max(self.gpus, key=lambda uuid: self.gpus[uuid], default="")
        used, read, written = self.utilization, self.read, self.written
        found = {
            "host_memory_peak_mib": self.need_mib,
            "host_memory_total_peak_mib": self.total_mib,
            "gpu_memory_peak_mib": self.gpus.get(fullest),
            "gpu_memory_size_mib": self.sizes.get(fullest),
            "cpu_cores_mean": self.cores,
            "gpu_utilization_mean_percent": used.mean,
            "gpu_utilization_max_percent": used.most if used.count else None,
            "gpu_utilization_recent_percent": self.recent.mean,
            "ssd_read_mb_s_peak": read.most if read else None,
            "ssd_write_mb_s_peak": written.most if written else None,
            "ssd_read_mb_s_mean": read.total / seconds if read else None,
            "ssd_write_mb_s_mean": written.total / seconds if written else None,
            "ssd_iops_peak": self.iops,
        }
        return {k: round(v, 3) for k, v in found.items() if v is not None}


def _larger(before: int | None, size_bytes: int | None) -> int | None:
    if size_bytes is None:
        return before
    return max(before or 0, -(-size_bytes // _MIB))


def _from_json(text: str) -> Peaks:
    data: Any = json.loads(text)
    if not isinstance(data, dict):
        raise TypeError("it is no JSON object")
    means = {}
    for name in ("utilization", "recent", "read", "written"):
        value = data.pop(name, None)
        if value is not None:
            means[name] = Mean(float(value["total"]), int(value["count"]), float(value["most"]))
    known = {entry.name for entry in dataclasses.fields(Peaks)}
    fields: Mapping[str, Any] = {k: v for k, v in data.items() if k in known} | means
    peaks = Peaks(**fields)
    peaks.figures()  # raises on fields of another kind
    return peaks


class PeakStore:
    """The peaks of all running jobs, in memory and on disk. Used from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._peaks: dict[str, Peaks] = {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in sorted(folder.iterdir()):
            try:
                peaks = _from_json(path.read_text())
                if path.name != f"{peaks.job_id}.json":
                    raise ValueError(f"it is of job {peaks.job_id}")
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                if not path.name.endswith(".tmp"):
                    _log.warning("peaks: couldn't read %s: %s; it is dropped", path, error)
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            self._peaks[peaks.job_id] = peaks

    def of(self, job_id: str, started: float) -> Peaks:
        """The peaks of a run; those of an earlier run of the same job are not its own."""
        known = self._peaks.get(job_id)
        if known is None or known.started != started:
            known = self._peaks[job_id] = Peaks(job_id, started)
        return known

    def get(self, job_id: str) -> Peaks | None:
        return self._peaks.get(job_id)

    def all(self) -> list[Peaks]:
        return list(self._peaks.values())

    def save(self, peaks: Peaks) -> None:
        """Keep peaks; a full disk costs them only if the daemon restarts, and is logged."""
        path = self._folder / f"{peaks.job_id}.json"
        try:
            write_atomically(path, json.dumps(dataclasses.asdict(peaks)), durable=False)
        except OSError as error:
            _log.error("peaks: couldn't save those of job %s: %s", peaks.job_id, error)

    def drop(self, job_id: str) -> None:
        """Forget a job."""
        self._peaks.pop(job_id, None)
        with contextlib.suppress(OSError):
            (self._folder / f"{job_id}.json").unlink()
