"""What the daemon knows of each job, kept on disk so that a restart forgets nothing.

One JSON file per job. The daemon is the only writer; a file that can't be read is set aside with
a log line, because a damaged record must neither stop the daemon nor be taken for an answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crater_slurm.files import write_atomically
from crater_slurm.model.plan import Plan

_log = logging.getLogger("crater.node.jobs")

PREPARED = "prepared"
ENDED = "ended"


@dataclass(slots=True)
class JobRecord:
    """A job on this node. ``token`` is the fingerprint of the plan token, ``restarts`` Slurm's
    restart count, ``folders`` its cache folders by kind, ``soft`` why its memory is not limited
    to its NUMA nodes (for good, once decided), ``memory_mib`` its last sample per NUMA node,
    ``exit_code`` Slurm's code:signal of its end, empty until an Epilog told it, ``checkpoints``
    what its worker says of them (checkpoints_state), ``facts`` what only slurmctld knows of it
    (name, array job, array task), ``nodes`` its host list."""

    job_id: str
    uid: int
    gid: int
    cluster: str
    node: str = ""
    sluid: str = ""
    restarts: int = 0
    boot: str = ""
    phase: str = PREPARED
    started: float = 0.0
    ended: float | None = None
    exit_code: str = ""
    plan: dict[str, Any] | None = None
    token: str = ""
    plan_problem: str = ""
    gpus: list[int] = field(default_factory=list)
    folders: dict[str, str] = field(default_factory=dict)
    cache_problem: str = ""
    told: bool = False
    soft: str = ""
    grant: dict[str, Any] = field(default_factory=dict)
    memory_mib: dict[str, int] = field(default_factory=dict)
    user: str = ""
    nodes: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    checkpoints: dict[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> str:
        """What tells this run of the job from its earlier ones, as manifests name it."""
        return f"{self.job_id}.{self.restarts}"

    @property
    def parsed_plan(self) -> Plan | None:
        """The verified plan; None for a job without one."""
        return Plan(**self.plan) if self.plan else None

    @property
    def strict(self) -> bool:
        """Whether the plan asks for memory on the job's own NUMA nodes only."""
        return bool(self.plan) and (self.plan or {}).get("numa") == "strict"

    @property
    def cgroup_names(self) -> tuple[str, ...]:
        """Names that Slurm may give the job's cgroup: by id, or by SLUID from 26.05 on."""
        return (f"job_{self.job_id}", *([self.sluid] if self.sluid else []))


#: What a record's fields must be for the daemon to act on it; the others are only shown.
_KINDS: dict[str, type] = {
    "job_id": str,
    "uid": int,
    "gid": int,
    "cluster": str,
    "folders": dict,
    "grant": dict,
    "gpus": list,
    "memory_mib": dict,
    "exit_code": str,
    "restarts": int,
    "user": str,
    "nodes": str,
    "facts": dict,
    "checkpoints": dict,
}


def _from_json(text: str) -> JobRecord:
    data = json.loads(text)
    if not isinstance(data, dict):
        raise TypeError("it is no JSON object")
    known = {entry.name: entry for entry in dataclasses.fields(JobRecord)}
    record = JobRecord(**{name: value for name, value in data.items() if name in known})
    if record.plan is not None:
        Plan(**record.plan)
    for name, kind in _KINDS.items():
        if not isinstance(getattr(record, name), kind):
            raise TypeError(f"{name} is no {kind.__name__}")
    return record


class JobStore:
    """All job records, in memory and on disk. Methods may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._records: dict[str, JobRecord] = {}
        self._busy: dict[str, tuple[threading.RLock, int]] = {}  # with how many hold or want it
        #: Running jobs by the names their cgroups may have, and the first job of each token.
        self._cgroups: dict[str, JobRecord] = {}
        self._tokens: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in sorted(folder.iterdir()):
            if path.name.endswith(".tmp"):
                path.unlink(missing_ok=True)
            elif path.suffix == ".json":
                self._load(path)

    def _load(self, path: Path) -> None:
        try:
            record = _from_json(path.read_text(encoding="utf-8", errors="surrogateescape"))
            if record.job_id != path.stem:
                raise ValueError(f"it is the record of job {record.job_id}")
        except (OSError, ValueError, TypeError) as error:
            _log.warning("jobs: couldn't read %s: %s; set aside as .damaged", path, error)
            with contextlib.suppress(OSError):
                path.rename(path.with_suffix(".damaged"))
            return
        self._enter(record)

    def _enter(self, record: JobRecord) -> None:
        self._leave(record.job_id)
        self._records[record.job_id] = record
        if record.phase == PREPARED:
            self._cgroups |= dict.fromkeys(record.cgroup_names, record)
        if record.token and not record.plan_problem:
            self._tokens.setdefault(record.token, record.job_id)

    def _leave(self, job_id: str) -> None:
        record = self._records.pop(job_id, None)
        if record:
            for name in record.cgroup_names:
                self._cgroups.pop(name, None)
            if self._tokens.get(record.token) == job_id:
                del self._tokens[record.token]

    @contextlib.contextmanager
    def exclusive(self, job_id: str) -> Iterator[None]:
        """Only one hook at a time works on a job: a cancelled job's Epilog meets its Prolog."""
        with self._lock:
            lock, users = self._busy.get(job_id, (threading.RLock(), 0))
            self._busy[job_id] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, users = self._busy.pop(job_id)
                if users > 1:
                    self._busy[job_id] = (lock, users - 1)

    def get(self, job_id: str) -> JobRecord | None:
        with self._lock:
            return self._records.get(job_id)

    def all(self) -> list[JobRecord]:
        with self._lock:
            return list(self._records.values())

    def by_cgroup(self, name: str) -> JobRecord | None:
        """The running job whose cgroup has this name."""
        with self._lock:
            return self._cgroups.get(name)

    def holder_of(self, token: str) -> str | None:
        """Job id that first came with a plan token (its fingerprint), if it came here before."""
        with self._lock:
            return self._tokens.get(token)

    def save(self, record: JobRecord) -> None:
        """Keep a record. A full or broken disk is logged: the job still gets what it should."""
        with self._lock:
            self._enter(record)
            text = json.dumps(dataclasses.asdict(record), indent=1)
        try:
            write_atomically(self._folder / f"{record.job_id}.json", text)
        except OSError as error:
            _log.error("jobs: couldn't save the record of job %s: %s", record.job_id, error)

    def forget(self, job_id: str) -> None:
        with self._lock:
            self._leave(job_id)
        with contextlib.suppress(OSError):
            (self._folder / f"{job_id}.json").unlink()
