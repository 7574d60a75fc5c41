"""Watches what each running job of this node really needs, and reports its peaks.

Looks at every job with a record of ours at ``node.sample_seconds``, in a thread of its own: no hook
waits for it, and a driver that hangs only makes the GPUs' figures unknown. It changes nothing.
Running jobs are reported now and then, but only while the scheduler takes reports, as the next
report tells more; the last one, after the Epilog, is kept until it is delivered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from crater_slurm.node import direct_writes
from crater_slurm.node.gpu_share import GpuShare, Holder, Owners, shares
from crater_slurm.node.job_io import IoMeter, processes
from crater_slurm.node.jobs import PREPARED, JobRecord
from crater_slurm.node.peaks import Mean, Peaks, PeakStore, Sample
from crater_slurm.node.services import Services
from crater_slurm.node.usage import Usage, read
from crater_slurm.probe.health.gpu_use import GpuUse, UseSampler
from crater_slurm.slurm.spool import Spool

_log = logging.getLogger("crater.node.observe")
#: A running job is reported after this many samples: every five minutes by default.
_SAMPLES_PER_REPORT = 10
#: Slurm's exit code of a job that was killed for its memory: signal 125.
_OOM = ":125"


class Observer:
    """Samples and reports. ``round`` is to be called from one thread again and again."""

    def __init__(
        self,
        services: Services,
        spool: Spool | None,
        gpus: UseSampler | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._services = services
        self._spool = spool
        self._gpus = gpus or UseSampler()
        self._clock = clock
        self._peaks = PeakStore(services.settings.node.state_dir / "peaks")
        self._io = IoMeter(services.roots.proc, services.roots.sys)
        self._next = 0.0
        self._gpu_problem = ""
        self.direct_writes = direct_writes.DirectWriteWatch(
            services.settings.node.checkpoints, services.roots.proc
        )

    def round(self) -> None:
        """Report jobs that ended, and look at the others when it is time to."""
        running = self._settle()
        now, seconds = self._clock(), self._services.settings.node.sample_seconds
        # Woken early by an end; and a clock that was set back must not stop it for long.
        if self._next - seconds <= now < self._next:
            return
        self._next = now + seconds
        self._look(running)

    def close(self) -> None:
        """Report what ended, and end the driver's child."""
        self._settle()
        self._gpus.close()

    def _settle(self) -> dict[str, JobRecord]:
        """The jobs that run; what is known of others is reported and forgotten."""
        services = self._services
        running = {
            record.job_id: record
            for record in services.store.all()
            if record.phase == PREPARED and record.boot == services.boot
        }
        for peaks in self._peaks.all():
            record = running.get(peaks.job_id)
            if record is None or record.started != peaks.started:
                self._report_end(peaks)
        self._io.keep(running)
        self.direct_writes.keep(running)
        return running

    def _look(self, running: Mapping[str, JobRecord]) -> None:
        scopes = self._services.tree.scopes()
        gpus = self._ask_gpus(running)
        owners = Owners(self._services.roots.proc)
        reporting = self._spool is not None and not self._spool.waits()
        for record in running.values():
            folder = _folder(record, scopes)
            if folder is not None and self.direct_writes.wanted(record):
                self._look_for_direct_writes(record, folder)
            own = shares(gpus, self._holder(record, running), owners) if gpus else ()
            if folder is not None or own:
                peaks = self._take(record, folder, own)
                if reporting and peaks.samples % _SAMPLES_PER_REPORT == 0:
                    self._send(_report(peaks, peaks.time, ended=False))
                    peaks.recent = Mean()
                self._peaks.save(peaks)

    def _look_for_direct_writes(self, record: JobRecord, folder: Path) -> None:
        files = self.direct_writes.look(record, processes(folder))
        if not files:
            return
        services = self._services
        with services.store.exclusive(record.job_id):
            if services.store.get(record.job_id) is not record:
                return
            record.direct_writes = files
            services.store.save(record)
        _log.info("observe: job %s writes beside its cache: %s", record.job_id, "; ".join(files))
        services.life.direct_writers += 1
        services.life.notices.tell(record.job_id, direct_writes.sentence(files))
        services.report(record, "task")

    def _send(self, report: dict[str, Any]) -> None:
        if self._spool is not None:
            self._spool.send(report)

    def _ask_gpus(self, running: Mapping[str, JobRecord]) -> tuple[GpuUse, ...]:
        if not any(record.gpus for record in running.values()):
            self._gpus.close()  # nothing of ours holds on to an idle driver
            return ()
        found = self._gpus.sample()
        if self._gpus.problem != self._gpu_problem:
            self._gpu_problem = self._gpus.problem
            if self._gpu_problem:
                _log.warning("observe: couldn't see who uses the GPUs: %s", self._gpu_problem)
        return found

    def _holder(self, record: JobRecord, running: Mapping[str, JobRecord]) -> Holder:
        facts = self._services.gpus.all()
        uuids = {facts[index].uuid for index in record.gpus if index in facts}
        shared = any(
            set(record.gpus) & set(other.gpus) for other in running.values() if other is not record
        )
        # A plan without GPUs, or none, may be for GPU shards, which others share.
        whole = bool((record.plan or {}).get("gpus")) and not shared
        return Holder(record.cgroup_names, frozenset(u for u in uuids if u), whole)

    def _take(self, record: JobRecord, folder: Path | None, own: tuple[GpuShare, ...]) -> Peaks:
        known = self._peaks.get(record.job_id)
        first = known is None or not known.samples
        peaks = self._peaks.of(record.job_id, record.started)
        peaks.plan_id = str((record.plan or {}).get("id", ""))
        peaks.node, peaks.gpu_count = record.node, len(record.gpus)
        usage, io = Usage(), None
        if folder is not None:
            usage, io = read(folder), self._io.advance(record.job_id, folder, first=first)
        peaks.add(Sample(self._clock(), usage, io, own))
        return peaks

    def _report_end(self, peaks: Peaks) -> None:
        record = self._services.store.get(peaks.job_id)
        end, code = peaks.time, ""
        if record is not None and record.started == peaks.started:
            end, code = record.ended or end, record.exit_code
        if code.endswith(_OOM):
            peaks.oom_kills = max(peaks.oom_kills, 1)
        report = _report(peaks, max(end, peaks.time), ended=True)
        if code:
            report["succeeded"] = code == "0:0"
        self._send(report)
        self._peaks.drop(peaks.job_id)


def _folder(record: JobRecord, scopes: list[Path]) -> Path | None:
    """The job's cgroup; several slurmd on one machine each have a scope of their own."""
    own = f"{record.node}_slurmstepd.scope"
    for scope in sorted(scopes, key=lambda path: path.name != own):
        for name in record.cgroup_names:
            if (scope / name).is_dir():
                return scope / name
    return None


def _report(peaks: Peaks, until: float, *, ended: bool) -> dict[str, Any]:
    return {
        "job_id": peaks.job_id,
        "plan_id": peaks.plan_id,
        "node": peaks.node,
        "time": until,
        "seconds": max(0.0, round(until - peaks.started, 3)),
        "ended": ended,
        "oom_kills": peaks.oom_kills,
        "samples": peaks.samples,
        "gpus": peaks.gpu_count,
        "figures": peaks.figures(),
    }
