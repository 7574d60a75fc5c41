"""crater explain and crater check against a real Slurm, for jobs of every kind and state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import (
    accepted,
    cancel,
    crater,
    explained,
    patient_lab,
    running,
    script,
    submit,
    waits,
)

from crater_slurm.lab import Lab


@pytest.fixture(scope="module")
def cluster(lab_factory: Any) -> Lab:
    return patient_lab(lab_factory, inventory="a100-pcie")


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    yield cluster
    cancel(cluster)


def text(lab: Lab, *words: str) -> str:
    done = crater(lab, *words)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_a_job_that_waits(lab: Lab) -> None:
    blockers = [accepted(submit(lab, "--exclusive")) for _ in range(2)]
    for job in blockers:
        running(lab, job)
    said = submit(lab, "--job-name=later", crater="gpus=2 cpus=8 numa=strict")
    waits(lab, accepted(said))
    told = text(lab, "explain", str(said.job))
    assert f"Job {said.job} (later) is PENDING; Slurm's reason: Resources\n" in told
    assert "Nodes: 2 of 2 can run it: a[1-2]" in told
    assert "What the job got" not in told


def test_a_refusal_can_be_read_again(lab: Lab) -> None:
    said = submit(lab, crater="gpus=2 cpus=20 numa=strict gpu-memory=80GB")
    assert said.job is None
    told = text(lab, "explain", said.plan)
    assert f"Plan {said.plan}: refused (enforce)" in told
    for line in (
        "  ✓ gpus        2",
        "  ✗ gpu-memory  ",
        "  ✗ numa        ",
        "Nodes: 0 of 2 can run it",
        "Nearest: a1",
    ):
        assert line in told, told
    document = explained(lab, said.plan)
    assert document["decision"]["verdict"] == "refused"
    assert (document["job"], document["grants"]) == ({}, [])
    # The way out is one.
    change = document["decision"]["smallest_change"][0]
    assert change in said.text
    changes = dict(word.split("=") for word in change.split())
    asked = {"gpus": "2", "cpus": "20", "numa": "strict", "gpu-memory": "80GB"} | changes
    accepted(submit(lab, crater=" ".join(f"{k}={v}" for k, v in asked.items())))


def test_jobs_without_a_plan(lab: Lab) -> None:
    for said in (submit(lab), submit(lab, crater="gpus=1 mode=off")):
        told = text(lab, "explain", str(accepted(said)))
        assert "this job has no crater plan" in told
        assert f"Job {said.job} (sbatch) is " in told


def test_words_in_the_comment_hide_nothing(lab: Lab) -> None:
    comment = "--comment=run=7 StdErr=x NodeList=y; crater: gpus=1"
    done = lab.run(["sbatch", "--parsable", comment, "--wrap=sleep 600"], check=True)
    job = int(done.stdout)
    running(lab, job)
    told = explained(lab, job)
    assert told["decision"]["plan"]["gpus"] == 1
    assert told["job"]["NodeList"] in ("a1", "a2")


def test_parts_of_arrays_and_het_jobs(lab: Lab) -> None:
    said = submit(lab, "--array=1-2", crater="gpus=1")
    for task in (1, 2):
        running(lab, f"{said.job}_{task}")
        told = explained(lab, f"{said.job}_{task}")
        assert told["job"]["ArrayTaskId"] == str(task)
        assert told["decision"]["id"] == said.plan
    words = [
        "--parsable",
        "-n1",
        "--comment=crater: gpus=1",
        ":",
        "-n1",
        "--comment=crater: gpus=3",
    ]
    name = script(lab, "het.sh", "#!/bin/sh\nsleep 600\n")
    done = lab.run(["sbatch", *words, name], check=True)
    job = done.stdout.strip().split(";")[0]
    told = explained(lab, f"{job}+1")
    assert told["job"]["HetJobOffset"] == "1"
    assert told["decision"]["plan"]["gpus"] == 3


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("999999", "Invalid job id"),
        ("0123456789ab", "there is no decision 0123456789ab"),
        ("no-such-file.sh", "there is no decision"),
        ("..%2Fhealthz", "no decision"),
    ],
)
def test_what_is_not_there(lab: Lab, word: str, says: str) -> None:
    done = crater(lab, "explain", word)
    assert done.returncode != 0
    assert done.stdout == ""
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_check_reads_a_script_with_sbatchs_own_options(lab: Lab) -> None:
    name = script(lab, "job.sh", "#!/bin/sh\n#CRATER gpus=2 cpus=4\n#SBATCH -n2\ntrue\n")
    assert "Nodes: 2 of 2 can run it: a[1-2]" in text(lab, "check", name)
    one, other = (
        [line for line in text(lab, word, name).splitlines() if not line.startswith(("Pl", "Sl"))]
        for word in ("explain", "check")
    )
    assert one == other
    told = json.loads(text(lab, "check", name, "--json"))
    assert (told["decision"]["plan"]["gpus"], told["decision"]["options"]["tasks"]) == (2, 2)
    told = json.loads(text(lab, "check", "--json", name, "-w", "a2", "--gpus=3"))
    assert told["decision"]["passed_nodes"] == "a2"
    assert told["decision"]["plan"]["gpus"] == 3
    refused = crater(lab, "check", name, "--json", "--gpus=9")
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["decision"]["verdict"] == "refused"


def test_check_is_not_fooled_by_its_surroundings(lab: Lab) -> None:
    """Run inside a job, sbatch would take options from the job's environment."""
    name = script(lab, "job.sh", "#!/bin/sh\n#CRATER gpus=2\ntrue\n")
    inside = {"SBATCH_GPUS": "7", "SLURM_GPUS": "7", "SBATCH_PARTITION": "no", "SLURM_JOB_ID": "1"}
    done = crater(lab, "check", name, "--json", environment=inside)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["decision"]["plan"]["gpus"] == 2


def test_check_tells_slurms_own_errors_and_mistakes(lab: Lab) -> None:
    name = script(lab, "job.sh", "#!/bin/sh\n#CRATER gpus=2\ntrue\n")
    done = crater(lab, "check", name, "-p", "no")
    assert done.returncode != 0
    assert "invalid partition specified: no" in done.stderr
    plain = script(lab, "plain.sh", "#!/bin/sh\n# CRATER gpus=2\ntrue\n#CRATER gpus=3\n")
    told = text(lab, "check", plain)
    assert "crater made no decision" in told
    assert "line 2: '# CRATER gpus=2' is not read" in told
    wrong = script(lab, "wrong.sh", "#!/bin/sh\n#CRATER gpus=many colour=red\ntrue\n")
    done = crater(lab, "check", wrong)
    assert done.returncode == 1
    assert "gpus='many'" in done.stdout
    assert "colour" in done.stdout
    done = crater(lab, "check", "nowhere.sh")
    assert done.returncode != 0
    assert "there is no script nowhere.sh" in done.stderr
