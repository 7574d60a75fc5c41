"""A store with tasks, a Slurm that says what it is told to, and a clock: for tests of alldata/."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crater_slurm.alldata.marker import Marker
from crater_slurm.alldata.run_as import Account
from crater_slurm.alldata.submission import Submitted
from crater_slurm.alldata.task import Task
from crater_slurm.config.alldata import AllData, Callback
from crater_slurm.errors import SlurmError
from crater_slurm.store.repository import Store
from crater_slurm.store.task_records import NewTask, StoredTask

#: As the source text has it.
LLAMA: dict[str, Any] = {
    "task_id": "task-20240520-llama3-8b",
    "task_type": "llm_finetune",
    "model_config": {"name": "Llama-3-8B", "precision": "bf16", "quantization": "none"},
    "data_config": {
        "train_dataset": "s3://datasets/alpaca/train",
        "val_dataset": "s3://datasets/alpaca/val",
        "io_pattern": "random",
    },
    "resource_requirements": {
        "gpu": {"count": 2, "memory_mb": 16384, "type": "a100-pcie-40gb"},
        "cpu": {"cores": 32, "avx_support": "avx512"},
        "memory": {"bandwidth_gbps": 140},
        "ssd": {"iops_min": 800000, "latency_us_max": 100},
    },
    "sla": {"max_queue_time_seconds": 1800, "min_gpu_utilization_percent": 65},
}
NOW = 1_800_000_000.0


def llama(task_id: str = "t1", **fields: Any) -> str:
    """The body of a task."""
    return json.dumps(LLAMA | {"task_id": task_id} | fields)


@dataclass
class Clock:
    """A clock that moves when told to."""

    now: float = NOW

    def __call__(self) -> float:
        return self.now


def settings(**fields: Any) -> AllData:
    """Callbacks to somewhere, AllData's tasks are alice's."""
    given: dict[str, Any] = {
        "submit_as": {"alldata": "alice"},
        "callback": Callback(url="https://alldata.example/callback"),
    }
    return AllData(**given | fields)


_made: dict[str, bytes] = {}


def open_store(tmp_path: Path) -> Store:
    """A fresh store; its tables are made once for all tests."""
    file = tmp_path / "crater.db"
    if "store" in _made:
        file.write_bytes(_made["store"])
    store = Store.open(f"sqlite:///{file}", create=True)
    if "store" not in _made:
        store.close()  # which puts the log into the file
        _made["store"] = file.read_bytes()
    return store


def account(name: str, least_uid: int) -> Account:
    return Account(name, 1000, 1000, f"/home/{name}")


def add_job(
    store: Store, task_id: str = "t1", job_id: int | None = 7, **changes: Any
) -> StoredTask:
    """A task whose job Slurm has, or perhaps has."""
    new = NewTask(
        client="alldata",
        task_id=task_id,
        body_hash="h",
        body=llama(task_id),
        user="alice",
        token=f"token-{task_id}",
        source="api",
        state="submitting",
        time=NOW - 10,
    )
    task, _ = store.add_task(new)
    given = {"state": "submitted", "job_id": job_id, "submitted": NOW - 10, "look": NOW}
    assert store.change_task(task, given | {"changed": NOW - 9} | changes)
    found = store.task_of_number(task.number)
    assert found
    return found


@dataclass
class FakeSlurm:
    """A Client that answers squeue, scontrol and sacct from ``jobs``; ``asked`` counts."""

    jobs: dict[int, dict[str, Any]] = field(default_factory=dict)
    layouts: dict[int, str] = field(default_factory=dict)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    accounting: bool = False
    ends: list[str] = field(default_factory=list)
    memory_seconds: int = 300
    away: bool = False
    asked: list[tuple[str, ...]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    bin_dir: None = None
    conf: None = None

    def set(self, job_id: int, word: str, **fields: Any) -> None:
        base = {"user": "alice", "submitted": NOW - 10, "started": "N/A", "ended": "N/A"}
        base |= {"nodes": "", "restarts": 0, "code": 0, "reason": "None"}
        self.jobs[job_id] = base | {"word": word} | fields

    def run(self, command: str, *words: str) -> str:
        self.asked.append((command, *words))
        if self.away:
            raise SlurmError(f"{command} did not answer within 15 s; is slurmctld up?")
        if command == "squeue":
            return self._squeue(words)
        if command == "sacct" and "--duplicates" in words:
            return "".join(f"{word}\n" for word in self.ends)
        if command == "sacct":
            wanted = words[words.index("--jobs") + 1].split(",")
            return "".join(self._record(int(job)) for job in wanted if int(job) in self.records)
        if command == "scontrol" and words[:2] == ("show", "config"):
            kind = "accounting_storage/slurmdbd" if self.accounting else "accounting_storage/none"
            return f"AccountingStorageType   = {kind}\nMinJobAge = {self.memory_seconds} sec\n"
        if command == "scontrol":
            job = int(words[-1])
            if job not in self.jobs:
                raise SlurmError("scontrol failed: slurm_load_jobs error: Invalid job id specified")
            return (
                f"JobId={job} JobName=x JOB_GRES=(null)   {self.layouts.get(job, '')} MinCPUs=1\n"
            )
        raise AssertionError(command)

    def config(self) -> dict[str, str]:
        text = self.run("scontrol", "show", "config")
        pairs = (line.partition("=") for line in text.splitlines())
        return {key.strip(): value.strip() for key, _, value in pairs}

    def _squeue(self, words: tuple[str, ...]) -> str:
        if "--user" in words:
            user = words[words.index("--user") + 1]
            chosen = [job for job, about in self.jobs.items() if about["user"] == user]
        else:
            chosen = [int(words[words.index("--jobs") + 1])]
            if chosen[0] not in self.jobs:
                raise SlurmError("squeue failed: slurm_load_jobs error: Invalid job id specified")
        return "".join(self._line(job) for job in chosen)

    def _line(self, job: int) -> str:
        names = ("user", "word", "submitted", "started", "ended", "nodes", "restarts", "code")
        about = self.jobs[job]
        return "|".join(str(v) for v in (job, *(about[n] for n in names), about["reason"])) + "|\n"

    def _record(self, job: int) -> str:
        names = ("user", "word", "submitted", "started", "ended", "nodes", "code")
        return "|".join(str(v) for v in (job, *(self.records[job][n] for n in names))) + "\n"


@dataclass
class FakeSubmitter:
    """Slurm as the intake sees it: jobs by token, in the order of their coming."""

    jobs: dict[str, list[int]] = field(default_factory=dict)
    recorded: list[int] | None = None
    memory: float = 300.0
    error: BaseException | None = None
    #: Raised after Slurm took the job.
    after: BaseException | None = None
    cancelled: list[int] = field(default_factory=list)
    submitted: list[str] = field(default_factory=list)

    def submit(self, task: Task, user: Account, token: str) -> Submitted:
        if self.error:
            raise self.error
        job = 100 + len(self.submitted)
        self.submitted.append(task.task_id)
        self.jobs.setdefault(token, []).append(job)
        if self.after:
            raise self.after
        return Submitted(job, "plan1")

    def find(self, user: str, token: str) -> list[int]:
        return list(self.jobs.get(token, []))

    def find_task(self, user: str, marker: Marker) -> list[int]:
        return list(self.jobs.get(f"{user}/{marker}", []))

    def find_recorded(self, user: str, task: Task, since: float) -> list[int] | None:
        return self.recorded

    def memory_seconds(self) -> float:
        return self.memory

    def cancel(self, user: str, job_id: int) -> None:
        self.cancelled.append(job_id)
