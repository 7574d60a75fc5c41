"""What following tasks costs slurmctld: 50,000 jobs there, and none, 1,000 or all of them tasks.

``python -m bench following [--jobs 50000 --seconds 120]``. Every job has its nodes, which never
come up, so all are records of their own in slurmctld and nothing becomes of them: what is measured
is the looking after. Each case is a fresh crater-scheduler; its first looks are not counted.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import create_engine, delete, insert

from bench.submissions import cpu_seconds, rpcs
from bench.table import show
from crater_slurm.lab import Lab
from crater_slurm.store.task_tables import TaskRow

_ARRAY = 10_000
_NODES = 1_000
_WARM_SECONDS = 75
_QUESTIONS = ("REQUEST_JOB_INFO", "REQUEST_JOB_INFO_SINGLE", "REQUEST_JOB_USER_INFO")


def run(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench following")
    parser.add_argument("--jobs", type=int, default=50_000)
    parser.add_argument("--seconds", type=int, default=120)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        inventory = Path(folder) / "large.yaml"
        inventory.write_text(f"nodes: [{{name: 'c[1-{_NODES}]', profile: cpu-only}}]\n")
        lab = Lab(
            name="following",
            inventory=str(inventory),
            controller_only=True,
            cloud=True,
            daemons=(),
            # Nothing else of crater's is to ask slurmctld meanwhile.
            crater_conf={"filter": {"mode": "observe"}, "scheduler": {"refresh_seconds": 300}},
            slurm_conf={"SlurmctldDebug": "error", "MaxArraySize": str(_ARRAY + 1)},
        )
        with lab:
            jobs = _fill(lab, options.jobs)
            cases = [0, min(1000, len(jobs)), len(jobs)]
            rows = [_case(lab, jobs[:count], options.seconds) for count in cases]
    show(
        f"Following tasks, {len(jobs):,} jobs of one user in slurmctld, per minute "
        "(`python -m bench following`)",
        ["tasks", "questions after one job", "after a user's jobs", "mean, ms",
         "slurmctld's CPU, s", "crater-scheduler's CPU, s", "squeue's CPU, s"],
        rows,
    )  # fmt: skip


def _fill(lab: Lab, count: int) -> list[int]:
    """Jobs that have nodes; their ids."""
    for begin in range(0, count, _ARRAY):
        last = min(_ARRAY, count - begin) - 1
        lab.sbatch(f"--array=0-{last}", "-n1", "-c1", "--mem=1", wrap="sleep 1000")
    for _ in range(600):
        done = lab.run(
            ["squeue", "--noheader", "--user=alice", "--states=all", "--Format=JobID:0|,State:0|"],
            timeout=300,
            check=True,
        )
        found = re.findall(r"^(\d+)\|(?:CONFIGURING|RUNNING)", done.stdout, re.MULTILINE)
        if len(found) >= count:
            return sorted(map(int, found))
        time.sleep(5)
    raise SystemExit(f"only {len(found)} of {count} jobs got nodes")


def _case(lab: Lab, jobs: Sequence[int], seconds: int) -> list[str]:
    if lab.supervisor.pid("scheduler") is not None:
        lab.stop("scheduler")
    _tasks(lab.folders.controller / "lib" / "crater.db", jobs)
    lab.start("scheduler")
    time.sleep(_WARM_SECONDS)
    lab.run(["sdiag", "--reset"], user="root", check=True)
    before = cpu_seconds(lab)
    time.sleep(seconds)
    after = cpu_seconds(lab)
    seen = rpcs(lab.run(["sdiag"], user="root", check=True).stdout)
    minutes = seconds / 60
    one, whole = seen.get(_QUESTIONS[1], (0, 0.0)), seen.get(_QUESTIONS[2], (0, 0.0))
    if _QUESTIONS[0] in seen:
        raise SystemExit(f"slurmctld was asked after all jobs: {seen}")
    spent = (after[name] - before[name] for name in ("slurmctld", "scheduler", "sbatch of it"))
    return [
        f"{len(jobs):,}",
        f"{one[0] / minutes:.1f}",
        f"{whole[0] / minutes:.1f}",
        f"{whole[1] / 1e3:.1f}",
        *(f"{cost / minutes:.2f}" for cost in spent),
    ]


def _tasks(file: Path, jobs: Sequence[int]) -> None:
    """The store's tasks: these jobs, all due at once, as after a restart."""
    now = int(time.time() * 1e6)
    common = {
        "client": "bench", "body_hash": "h", "body": "{}", "user_name": "alice", "source": "api",
        "state": "scheduled", "settled": False, "sequence": 1, "restarts": 0, "reason": "",
        "created_us": now - 3600 * 10**6, "changed_us": now, "submitted_us": now, "look_us": now,
        "resources": '{"nodes": [{"node": "c1", "gpu_ids": [], "cpu_cores": [0]}]}',
    }  # fmt: skip
    rows = [common | {"task_id": f"t{j}", "token": f"k{j}", "job_id": j} for j in jobs]
    engine = create_engine(f"sqlite:///{file}")
    with engine.begin() as connection:
        connection.execute(delete(TaskRow))
        if rows:
            connection.execute(insert(TaskRow), rows)
    engine.dispose()
