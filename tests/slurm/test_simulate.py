"""An admin's view: jobs run in a real Slurm, and its own record of them is replayed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers import wait_until

from crater_slurm.cli import simulate_nodes
from crater_slurm.cli.main import crater
from crater_slurm.errors import LabError
from crater_slurm.lab import Lab
from crater_slurm.lab.places import INSIDE
from crater_slurm.simulate import sacct
from crater_slurm.simulate.trace import Notes, Task

NODES = "a100-pcie"
FORMAT = (
    "JobID,Submit,Eligible,Start,End,ElapsedRaw,ReqTRES,AllocTRES,NNodes,TimelimitRaw,Partition,"
    "State"
)


@dataclass(frozen=True)
class History:
    """Records of the same jobs: the one that slurmctld writes, and what sacct prints."""

    jobcomp: Path
    sacct: Path
    json: Path


@pytest.fixture(scope="module")
def history(lab_factory: Any, tmp_path_factory: pytest.TempPathFactory) -> History:
    """Three jobs: four GPUs of one node, one on each of two nodes, an array of two tasks."""
    conf = {"JobCompType": "jobcomp/filetxt", "JobCompLoc": f"{INSIDE}/log/jobcomp"}
    try:
        lab: Lab = lab_factory(inventory=NODES, crater=False, accounting=True, slurm_conf=conf)
    except LabError as error:
        if "a lab with accounting needs" in str(error):
            pytest.skip(str(error))
        raise
    jobs = [
        lab.sbatch("-t5", "-n4", "--mem=2G", "--gres=gpu:a100:4", wrap="sleep 1"),
        lab.sbatch("-t5", "-N2", "--gres=gpu:1", "-J", "JobState=odd name", wrap="sleep 1"),
        lab.sbatch("-t5", "--array=1-2", wrap="true"),
    ]
    for job in jobs:
        lab.wait_job(job)
    folder = tmp_path_factory.mktemp("history")
    found = History(lab.folders.log / "jobcomp", folder / "table", folder / "json")
    everybody = ["sacct", "--allusers", "--starttime", "now-1hour"]
    table = [*everybody, "--parsable2", f"--format={FORMAT}"]

    def recorded() -> bool:
        text = lab.run(table, user="root", check=True).stdout
        found.sacct.write_text(text)
        jobs = [line for line in text.splitlines() if "." not in line.partition("|")[0]]
        return sum(line.endswith("|COMPLETED") for line in jobs) == 4

    wait_until(recorded, "slurmdbd has all jobs")
    found.json.write_text(lab.run([*everybody, "--json"], user="root", check=True).stdout)
    return found


def simulate(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(crater, ["simulate", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def asked(file: Path) -> list[tuple[int, int, float | None]]:
    """GPUs, nodes and time limit of each job of a record, sorted."""
    tasks: list[Task] = list(sacct.tasks(file, simulate_nodes.read(NODES), Notes()))
    return sorted((task.need.count, task.nodes, task.limit) for task in tasks)


@pytest.mark.parametrize("form", ["sacct", "json"])
def test_the_history_of_a_real_cluster_is_replayed(
    history: History, tmp_path: Path, form: str
) -> None:
    file = getattr(history, form)
    options = ("--nodes", NODES, "--policy", "firstfit", "--plot", str(tmp_path))
    found = simulate("--from-sacct", str(file), *options)
    (run,) = found["runs"]
    assert found["format"] == "slurm"
    assert run["seeds"][0]["jobs"] == 4
    assert run["mean"]["max_wait_s"] == 0
    assert any(line.startswith("several nodes") for line in found["assumed"])
    assert {file.name for file in tmp_path.iterdir()} == {
        "waiting.png", "waiting.svg", "use.png", "use.svg",
    }  # fmt: skip
    assert asked(file) == [(0, 1, 300), (0, 1, 300), (1, 2, 300), (4, 1, 300)]


def test_the_file_that_slurmctld_writes_is_read_too(history: History) -> None:
    """It has GPUs too where slurm.conf tracks them (AccountingStorageTRES=gres/gpu)."""
    found = simulate("--from-jobcomp", str(history.jobcomp), "--nodes", NODES, "--seeds", "2")
    assert found["runs"][0]["seeds"][1]["jobs"] == 4
    assert asked(history.jobcomp) == asked(history.sacct)
