"""What the context modules work with, built once from the settings, and the small joins between."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crater_slurm.config.settings import Settings
from crater_slurm.node import blockdev, cgroups, checkpoints_state, proc, quota
from crater_slurm.node.admission import KeyRing
from crater_slurm.node.binding import Binder
from crater_slurm.node.cache import Cache
from crater_slurm.node.cache_life import CacheLife
from crater_slurm.node.gpus import GpuFacts
from crater_slurm.node.jobs import JobRecord, JobStore
from crater_slurm.node.marks import Marks
from crater_slurm.node.slurmcpus import SlurmCpus
from crater_slurm.node.topology import Topology
from crater_slurm.slurm.spool import Spool

_log = logging.getLogger("crater.node")
_GRANTS = "/node/v1/grants"
_OBSERVATIONS = "/node/v1/observations"


@dataclass(frozen=True, slots=True)
class Roots:
    """The kernel's folders; tests put their own in place."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")


class StoreDirectory:
    """What the binder asks about a job's cgroup, answered from the job records."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    def strict(self, cgroup: str) -> bool:
        record = self._store.by_cgroup(cgroup)
        return record is not None and record.strict

    def soft(self, cgroup: str) -> str:
        record = self._store.by_cgroup(cgroup)
        return record.soft if record else ""

    def set_soft(self, cgroup: str, reason: str) -> None:
        record = self._store.by_cgroup(cgroup)
        if record and not record.soft:
            record.soft = reason
            if record.grant:
                record.grant = {**record.grant, "given": "soft", "reason": reason}
            self._store.save(record)


class Services:
    """All parts of the daemon that a hook's question may need."""

    def __init__(self, settings: Settings, roots: Roots | None = None) -> None:
        node = settings.node
        self.settings = settings
        self.roots = roots or Roots()
        self.boot = proc.boot_id(self.roots.proc)
        self.store = JobStore(node.state_dir / "jobs")
        self.marks = Marks(node.socket.parent / "jobs")
        self.keys = KeyRing(settings.plan.key_file)
        self.cache = Cache(node.cache)
        self.gpus = GpuFacts(node.profile)
        self.slurm_cpus = SlurmCpus(settings.slurm)
        self.topology = Topology.read(self.roots.sys)
        self.tree = cgroups.Tree(node.cgroup_root)
        self.life = CacheLife(settings, self.store, self.cache, self.tree)
        self.life.on_quota.append(lambda record, _: self.report(record, "task"))
        self.binder = Binder(
            self.tree,
            self.topology,
            StoreDirectory(self.store),
            mode=node.memory_binding,
            reserve_mib=node.memory_reserve_mib,
        )
        #: Folder that jobs find crater_slurm.job in; set at the start of the daemon.
        self.job_path = str(node.checkpoints.job_path or "")
        url = settings.scheduler.url.rstrip("/")
        self.spool = Spool(node.state_dir / "spool", url + _GRANTS) if node.report else None
        #: Apart from the others, so that a scheduler that doesn't know these takes those.
        self.observed = (
            Spool(node.state_dir / "observed", url + _OBSERVATIONS)
            if node.report and node.observe
            else None
        )

    def report(self, record: JobRecord, phase: str) -> None:
        """Send a record's grant; a plan that did not count is reported with its problem."""
        if self.spool is not None:
            grant = dict(record.grant)
            grant |= {"folders": record.folders, "cache_problem": record.cache_problem}
            grant |= quota.described(record)
            if record.direct_writes:
                grant["direct_writes"] = record.direct_writes
            if checkpoints := checkpoints_state.summary(record):
                grant["checkpoints"] = checkpoints
            grant |= {"gpus": record.gpus, "restarts": record.restarts}
            if record.exit_code:
                grant["exit_code"] = record.exit_code
            if record.plan_problem:
                grant["plan_problem"] = record.plan_problem
            self.tell(record, phase, grant)

    def tell(self, record: JobRecord, phase: str, grant: Mapping[str, Any]) -> None:
        """Send one report of a job, now or when the scheduler is there."""
        if self.spool is not None:
            self.spool.send(self._report(record, phase, grant))

    def tell_surely(self, record: JobRecord, phase: str, grant: Mapping[str, Any]) -> bool:
        """The same, though this process may die at once; False when it could not be kept."""
        return self.spool is not None and self.spool.keep(self._report(record, phase, grant))

    def _report(self, record: JobRecord, phase: str, grant: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "job_id": record.job_id,
            "plan_id": str((record.plan or {}).get("id", "")),
            "node": record.node,
            "time": time.time(),
            "phase": phase,
            "grant": dict(grant),
        }

    def nodes_of(self, cpus: Iterable[int]) -> frozenset[int]:
        """NUMA nodes of a job's CPUs, whose numbers are those of node.cpu_source."""
        if self.settings.node.cpu_source == "slurm":
            return self.gpus.cpu_nodes(cpus)
        return self.topology.nodes_of(cpus)

    def cores_of(self, cpus: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """The CPUs by core; none where they are Slurm's numbers, not the machine's."""
        if self.settings.node.cpu_source == "slurm":
            return ()
        return self.topology.cores_of(cpus)

    def cache_nodes(self) -> frozenset[int] | None:
        """NUMA nodes of the drives that hold the cache; None when a drive's is unknown."""
        device = self.cache.device_number()
        return None if device is None else blockdev.numa_nodes(device, self.roots.sys)

    def sample_memory(self, record: JobRecord) -> bool:
        """Read where a job's memory lies, while its cgroup is there; whether anything was read."""
        for scope in self.tree.scopes():
            for name in record.cgroup_names:
                found = cgroups.memory_by_node(scope / name)
                if found:
                    record.memory_mib = {str(node): mib for node, mib in found.items()}
                    return True
        return False

    def note_checkpoints(self, record: JobRecord, **known: Any) -> None:
        """Keep something of a job's checkpoints in its record, while it is this run's."""
        with self.store.exclusive(record.job_id):
            now = self.store.get(record.job_id)
            if now is not None and now.run == record.run:
                now.facts = record.facts
                now.checkpoints = {**now.checkpoints, **known}
                self.store.save(now)

    def release_folders(self, record: JobRecord) -> None:
        """Set a job's cache folders aside by the site's rule; what fails is tried again later."""
        stays = checkpoints_state.stays_after_end(record, self.settings.node.cache.keep)
        kinds = [kind for kind in record.folders if kind != "checkpoint" or not stays]
        if not kinds or self.cache.release(record.cluster, record.job_id, kinds):
            record.folders = {k: v for k, v in record.folders.items() if k not in kinds}
            self.life.end(record)
