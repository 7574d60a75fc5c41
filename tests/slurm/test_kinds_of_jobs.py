"""Every way in which Slurm takes a job: arrays, het jobs, salloc, srun, cron, requeue, and none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import (
    accepted,
    all_well,
    cancel,
    completed,
    output,
    patient_lab,
    running,
    script,
    shares,
    submit,
    variables,
    wait_until,
)

from crater_slurm.lab import Lab

SHOW = "env; ls -d $CRATER_CACHE_PATH; hostname"


@pytest.fixture(scope="module")
def cluster(lab_factory: Any) -> Lab:
    conf = {"ScronParameters": "enable"}
    return patient_lab(lab_factory, inventory="a100-pcie", slurm_conf=conf)


@pytest.fixture(scope="module")
def without(lab_factory: Any) -> Lab:
    """The same cluster as if crater had never been there."""
    return lab_factory(inventory="a100-pcie", crater=False)


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    yield cluster
    cancel(cluster)


def told(lab: Lab, job: int | str) -> dict[str, str]:
    return variables(output(lab, job), "CRATER_")


# Arrays, het jobs --------------------------------------------------------------------------------


def test_each_array_task_has_its_own(lab: Lab) -> None:
    said = submit(lab, "--array=1-3", crater="gpus=1 cpus=2", body=SHOW)
    job = accepted(said)
    records = [completed(lab, f"{job}_{task}") for task in (1, 2, 3)]
    numbers = {record["JobId"] for record in records}
    assert len(numbers) == 3
    paths = set()
    for task, record in zip((1, 2, 3), records, strict=True):
        found = told(lab, f"{job}_{task}")
        assert found["CRATER_PLAN_ID"] == said.plan
        assert found["CRATER_CPU_CORES"] == "2"
        assert found["CRATER_CACHE_PATH"].endswith(f"/{record['JobId']}")
        paths.add(found["CRATER_CACHE_PATH"])
    assert len(paths) == 3


def test_het_jobs_by_script_and_by_command_line(lab: Lab) -> None:
    text = (
        "#!/bin/bash\n#CRATER gpus=1 cpus=2\n#SBATCH -n1\n#SBATCH hetjob\n"
        f"#SBATCH -n1 --comment='crater: cpus=4'\n{SHOW}\nsleep 600\n"
    )
    by_script = lab.run(["sbatch", "--parsable"], input=text, check=True)
    name = script(lab, "het.sh", f"#!/bin/bash\n#CRATER gpus=1 cpus=2\n{SHOW}\nsleep 600\n")
    by_line = lab.run(["sbatch", "--parsable", "-n1", ":", "-n3", name], check=True)
    assert "1: crater: planned 4 cores" in by_script.stderr, by_script.stderr
    assert "1: crater" not in by_line.stderr  # the script's lines are the first component's
    for done, cores in ((by_script, 4), (by_line, 3)):
        job = int(done.stdout.split(";")[0])
        assert "0: crater: planned 1 GPU, 2 cores" in done.stderr, done.stderr
        running(lab, f"{job}+0")
        parts = shares(lab, f"{job}+0") + shares(lab, f"{job}+1")
        assert [(len(s.cpus), len(s.gpus)) for s in parts] == [(2, 1), (cores, 0)]
        wait_until(lambda job=job: told(lab, job).get("CRATER_CPU_CORES"), "the job has started")
        assert told(lab, job)["CRATER_CPU_CORES"] == "2"
        cancel(lab, job)
    assert "each component of a heterogeneous job is planned on its own" in by_script.stderr
    assert "srun makes its step" not in by_script.stderr


# Without a script --------------------------------------------------------------------------------


def test_test_only_makes_no_job(lab: Lab) -> None:
    before = lab.run(["scontrol", "-o", "show", "job"], user="root").stdout
    said = submit(lab, "--test-only", crater="gpus=1 cpus=2")
    assert said.job is None
    assert said.lines[0].startswith("crater: planned 1 GPU, 2 cores; 2 of 2 nodes can run it")
    assert "to start at" in said.lines[-1]
    said = submit(lab, "--test-only", crater="gpus=9")
    assert said.lines[0].startswith("crater: refused: none of the 2 nodes")
    assert lab.run(["scontrol", "-o", "show", "job"], user="root").stdout == before


@pytest.mark.parametrize("command", ["salloc", "srun"])
def test_interactive_jobs_ask_by_comment(lab: Lab, command: str) -> None:
    inner = "env; squeue --noheader --format='ROW %C %b %k' --job $SLURM_JOB_ID"
    words = [command, "--comment=my words; crater: gpus=1 cpus=4 numa=strict"]
    words += ["srun", "-n1", "-c4"] if command == "salloc" else ["-c4"]
    done = lab.run([*words, "bash", "-c", inner], timeout=120, check=True)
    assert f"{command}: crater: planned 1 GPU, 4" in done.stderr, done.stderr
    found = variables(done.stdout, "CRATER_")
    assert found["CRATER_CPU_CORES"] == "4"
    assert found["CRATER_GPU_IDS"] == "0"
    row = next(line for line in done.stdout.splitlines() if line.startswith("ROW "))
    assert row.split()[1] == "4"
    assert "gpu:1" in row
    assert "my words; crater: gpus=1 cpus=4 numa=strict crater-plan:1." in row
    refused = lab.run([command, "--comment=crater: gpus=9", "true"])
    assert refused.returncode != 0
    assert "crater: refused: none of the 2 nodes" in refused.stderr


def test_wrap_asks_by_comment(lab: Lab) -> None:
    words = ["sbatch", "--parsable", "--comment=crater: gpus=2 cpus=4", "--wrap", SHOW]
    job = int(lab.run(words, check=True).stdout)
    completed(lab, job)
    found = told(lab, job)
    assert (found["CRATER_GPU_IDS"], found["CRATER_CPU_CORES"]) == ("0,1", "4")
    assert found["CRATER_CACHE_PATH"] in output(lab, job).splitlines()


def test_the_comment_wins_over_the_script(lab: Lab) -> None:
    said = submit(lab, "--comment=crater: gpus=3", crater="gpus=1 cpus=2")
    assert "--comment says gpus too and wins over line 2 of the script" in said.text
    job = accepted(said)
    running(lab, job)
    assert len(shares(lab, job)[0].gpus) == 3


def test_cron_jobs(lab: Lab, slurm_version: tuple[int, int]) -> None:
    if lab.run(["sh", "-c", "command -v scrontab"]).returncode:
        pytest.skip("scrontab is not in the packages that this lab is made of")
    table = "#SCRON --comment=crater:gpus=1\n* * * * * env\n"
    done = lab.run(["scrontab", "-"], input=table)
    assert done.returncode == 0, done.stderr
    jobs = lab.run(["squeue", "--noheader", "--format=%A %k"], user="root").stdout
    lab.run(["scrontab", "-r"])
    assert "crater:gpus=1 crater-plan:1." in jobs


# Requeue -----------------------------------------------------------------------------------------


def test_a_requeued_job_has_its_plan_again(lab: Lab) -> None:
    body = f"{SHOW}; touch $CRATER_CACHE_PATH/left; touch ran.$SLURM_RESTART_COUNT; sleep 600"
    said = submit(lab, "-w", "a1", "--open-mode=append", "--requeue", crater="gpus=1", body=body)
    job = accepted(said)
    wait_until((lab.home() / "ran.").exists, "the first run")
    lab.run(["scontrol", "requeue", str(job)], user="root", check=True)
    # Slurm would let it wait for two minutes; within the same second its slurmd refuses it.
    wait_until(lambda: lab.job(job)["JobState"] == "PENDING", "the job is back in the queue")
    lab.run(["scontrol", "update", f"job={job}", "StartTime=now+3"], user="root", check=True)
    wait_until((lab.home() / "ran.1").exists, "the second run")
    lines = output(lab, job).splitlines()
    assert [line for line in lines if line.startswith("CRATER_PLAN_ID=")] == [
        f"CRATER_PLAN_ID={said.plan}"
    ] * 2
    cache = f"/crater-cache/temp/{lab.spec.name}/{job}"
    assert lines.count(cache) == 2
    assert lab.node_run("a1", ["ls", cache]).stdout.split() == ["left"]
    assert lab.node("a1")["State"].startswith("MIXED")


# Jobs that crater does not touch -----------------------------------------------------------------

PLAIN: list[tuple[tuple[str, ...], str]] = [
    ((), ""),
    (("--gres=gpu:a100:2", "-n1", "-c8", "--mem=1G", "--comment=mine"), ""),
    (("--gpus=3", "-N1", "-n4", "--gres-flags=enforce-binding"), ""),
    (("-N2", "--ntasks-per-node=2", "--gpus-per-node=1"), ""),
    (("-n2", "--gpus-per-task=1", "--cpus-per-gpu=2"), ""),
    (("--exclusive", "-x", "a2"), ""),
    (("-w", "a2", "-c4"), "gpus=2 cpus=8 numa=strict mode=off"),
]
#: Of the job itself, and two variables by which Slurm's own use of a TaskProlog shows.
_DIFFERENT = (
    *("SLURM_JOB_ID=", "SLURM_JOBID=", "SLURM_TASK_PID=", "TMPDIR="),
    *("SLURM_JOB_SLUID=", "SLURM_SCRIPT_CONTEXT=", "_="),
)
_OWN = re.compile(
    r"\b(\w*Time|LastSchedEval|EndTime|Deadline|SubmitLine|AllocNode:Sid)=\S+( \d\d:\d\d:\d\d)?"
)


def settled_record(lab: Lab, options: tuple[str, ...], crater: str) -> tuple[str, list[str]]:
    """A job's whole record and its environment, without what differs from job to job."""
    said = submit(lab, "--time=60", *options, crater=crater, body="env | sort; sleep 600")
    job = accepted(said)
    assert said.lines == ()
    running(lab, job)
    wait_until(lambda: "\nUSER=" in output(lab, job), f"job {job} has told its environment")
    done = lab.run(["scontrol", "-d", "show", "job", str(job)], user="root", check=True)
    text = _OWN.sub(r"\1=", done.stdout).replace(f"JobId={job} ", "JobId=N ")
    text = text.replace(f"slurm-{job}.", "slurm-N.")
    text = re.sub(r"SLUID=\w+", "SLUID=N", text)
    text = re.sub(r"Priority=\d+", "Priority=N", text).replace("Reason=Prolog", "Reason=None")
    text = text.replace("Scheduler=Backfill", "Scheduler=Main")  # whichever came first
    text = text.replace(lab.spec.name, "NAME")
    environment = [
        re.sub(r"\d{5,}", "N", line.replace(lab.spec.name, "NAME"))
        for line in output(lab, job).splitlines()
        if not line.startswith(_DIFFERENT)
    ]
    cancel(lab)
    return text, environment


@pytest.mark.parametrize(("options", "asked"), PLAIN, ids=lambda v: str(v)[:40])
def test_a_job_without_directives_is_bit_by_bit_the_same(
    lab: Lab, without: Lab, options: tuple[str, ...], asked: str
) -> None:
    here, there = settled_record(lab, options, asked), settled_record(without, options, asked)
    assert here[0].splitlines() == there[0].splitlines()
    assert here[1] == there[1]


def test_the_nodes_are_well(lab: Lab) -> None:
    all_well(lab)
