"""An admin's view: jobs run in a real Slurm, and its own record of them is replayed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from crater_slurm.cli import simulate_nodes
from crater_slurm.cli.main import crater
from crater_slurm.lab import Lab
from crater_slurm.lab.places import INSIDE
from crater_slurm.simulate import sacct
from crater_slurm.simulate.trace import Notes, Task

NODES = "a100-pcie"
COLUMNS = ("JobID", "Submit", "Eligible", "ElapsedRaw", "ReqTRES", "NNodes", "Timelimit", "State")


@dataclass(frozen=True)
class History:
    """Two records of the same jobs: the one that slurmctld writes, and one as sacct prints it."""

    jobcomp: Path
    sacct: Path


@pytest.fixture(scope="module")
def history(lab_factory: Any, tmp_path_factory: pytest.TempPathFactory) -> History:
    """Three jobs: four GPUs of one node, one on each of two nodes, an array of two tasks."""
    lab: Lab = lab_factory(
        inventory=NODES,
        crater=False,
        slurm_conf={"JobCompType": "jobcomp/filetxt", "JobCompLoc": f"{INSIDE}/log/jobcomp"},
    )
    jobs = [
        lab.sbatch("-t5", "-n4", "--mem=2G", "--gres=gpu:a100:4", wrap="sleep 1"),
        lab.sbatch("-t5", "-N2", "--gres=gpu:1", "-J", "JobState=odd name", wrap="sleep 1"),
        lab.sbatch("-t5", "--array=1-2", wrap="true"),
    ]
    for job in jobs:
        lab.wait_job(job)
    file = tmp_path_factory.mktemp("history") / "sacct"
    lines = [sacct_line(lab.job(job)) for job in (*jobs[:2], f"{jobs[2]}_1", f"{jobs[2]}_2")]
    file.write_text("\n".join(["|".join(COLUMNS), *lines]) + "\n")
    return History(lab.folders.log / "jobcomp", file)


def sacct_line(job: dict[str, str]) -> str:
    """What sacct would print of a job that scontrol shows: a lab has no slurmdbd to ask."""
    nodes = int(job["NumNodes"].partition("-")[0])
    gpus = re.search(r"gpu\S*?:(\d+)$", job.get("TresPerNode", ""))
    tres = f"cpu={job['NumCPUs']},mem=64M" + (f",gres/gpu={int(gpus[1]) * nodes}" if gpus else "")
    hours, minutes, seconds = map(int, job["RunTime"].split(":"))
    elapsed = 3600 * hours + 60 * minutes + seconds
    values = (
        job["JobId"], job["SubmitTime"], job["EligibleTime"], elapsed, tres, nodes,
        job["TimeLimit"], job["JobState"],
    )  # fmt: skip
    return "|".join(map(str, values))


def simulate(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(crater, ["simulate", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def asked(file: Path) -> list[tuple[int, int, float | None]]:
    """GPUs, nodes and time limit of each job of a record, sorted."""
    tasks: list[Task] = list(sacct.tasks(file, simulate_nodes.read(NODES), Notes()))
    return sorted((task.need.count, task.nodes, task.limit) for task in tasks)


def test_the_history_of_a_real_cluster_is_replayed(history: History, tmp_path: Path) -> None:
    options = ("--nodes", NODES, "--policy", "firstfit", "--plot", str(tmp_path))
    found = simulate("--from-sacct", str(history.sacct), *options)
    (run,) = found["runs"]
    assert found["format"] == "slurm"
    assert run["seeds"][0]["jobs"] == 4
    assert run["mean"]["max_wait_s"] == 0
    assert any(line.startswith("several nodes") for line in found["assumed"])
    assert {file.name for file in tmp_path.iterdir()} == {
        "waiting.png", "waiting.svg", "use.png", "use.svg",
    }  # fmt: skip
    assert asked(history.sacct) == [(0, 1, 300), (0, 1, 300), (1, 2, 300), (4, 1, 300)]


def test_the_file_that_slurmctld_writes_is_read_too(history: History) -> None:
    """Without slurmdbd Slurm counts no GPUs there, which the result says."""
    found = simulate("--from-jobcomp", str(history.jobcomp), "--nodes", NODES, "--seeds", "2")
    assert found["runs"][0]["seeds"][1]["jobs"] == 4
    assert any(line.startswith("GPUs: none recorded") for line in found["assumed"])
    limits = [(nodes, limit) for _, nodes, limit in asked(history.jobcomp)]
    assert sorted(limits) == [(1, 300), (1, 300), (1, 300), (2, 300)]
