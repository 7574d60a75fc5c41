"""The way of one job on a real Slurm, from its #CRATER lines to what crater explain says of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers import (
    Share,
    all_well,
    completed,
    crater,
    explained,
    inventory,
    numa_of_cpus,
    numa_of_gpus,
    output,
    patient_lab,
    profile,
    script,
    shares,
    variables,
    wait_until,
)

from crater_slurm.lab import Lab
from crater_slurm.model import token

DIRECTIVES = (
    "#CRATER task=llm_finetune gpus=2 gpu-memory=32GiB cpus=8 precision=bf16\n"
    "#CRATER memory-bandwidth=60GB/s ssd-iops=100k cache=1GB numa=strict\n"
)
SCRIPT = f"""#!/bin/bash
#SBATCH --job-name=main
{DIRECTIVES}
env > seen.$SLURM_JOB_ID
srun -n1 env > step.$SLURM_JOB_ID
touch ready.$SLURM_JOB_ID
until [ -e go.$SLURM_JOB_ID ]; do sleep 0.1; done
echo data > $CRATER_CHECKPOINT_PATH/model
"""
UUIDS = [f"GPU-0000000{i}-1111-2222-3333-444444444444" for i in range(8)]
KINDS = ("checkpoint", "dataset", "temp")


@pytest.fixture(scope="module")
def lab(lab_factory: Any, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """a1 can take the main job; l1 has too little GPU memory, e1 too little bandwidth."""
    a100 = profile("a100-pcie-40gb")
    for gpu in a100["gpus"]:
        gpu["uuid"] = UUIDS[gpu["index"]]
    nodes = [("a1", a100), ("l1", profile("l4-inference")), ("e1", profile("a100-sxm-nps4"))]
    file = inventory(tmp_path_factory.mktemp("main"), *nodes)
    return patient_lab(lab_factory, inventory=file, cache_mib=2048)


def start(lab: Lab, *options: str) -> tuple[int, str]:
    """Submit the main job and wait until it has told its environment; id and message."""
    done = lab.run(["sbatch", "--parsable", *options], input=SCRIPT, check=True)
    job = int(done.stdout)
    wait_until((lab.home() / f"ready.{job}").exists, f"job {job} has started its work")
    return job, done.stderr


def end(lab: Lab, job: int) -> None:
    (lab.home() / f"go.{job}").touch()
    completed(lab, job)


def environment(lab: Lab, job: int, where: str = "seen") -> dict[str, str]:
    return variables((lab.home() / f"{where}.{job}").read_text())


def expected_environment(lab: Lab, job: int, plan: str, share: Share) -> dict[str, str]:
    """What docs/hooks.md promises for a job on cores and GPUs of this share."""
    first, last = share.cpus[0], share.cpus[-1]
    cache = f"/crater-cache/{{}}/{lab.spec.name}/{job}"
    return {
        "CRATER_PLAN_ID": plan,
        "CRATER_PRECISION": "bf16",
        "CRATER_GPU_IDS": "0,1",
        "CRATER_GPU_IDS_HOST": ",".join(map(str, share.gpus)),
        "CRATER_GPU_UUIDS": ",".join(UUIDS[gpu] for gpu in share.gpus),
        "CRATER_CPU_CORES": "8",
        "CRATER_CPU_LIST": f"{first}-{last}",
        "CRATER_PREPROC_CPUS": f"{last - 1}-{last}",
        "CRATER_PREPROC_CPU_COUNT": "2",
        "CRATER_COMPUTE_CPUS": f"{first}-{last - 2}",
        "CRATER_COMPUTE_CPU_COUNT": "6",
        "CRATER_NUMA_NODE": str(first // 16),
        "CRATER_CHECKPOINT_PATH": cache.format("checkpoint"),
        "CRATER_DATASET_PATH": cache.format("dataset"),
        "CRATER_CACHE_PATH": cache.format("temp"),
        "CRATER_TMPDIR": cache.format("temp"),
        "CRATER_RUN": f"{job}.0",
        "CRATER_RING": "/run/crater/ring.sock",
    }


@pytest.fixture(scope="module")
def jobs(lab: Lab) -> Any:
    """The main job four times, which fills both sockets of a1; one of them on each socket."""
    started = [start(lab) for _ in range(4)]
    facts = {}
    for job, said in started:
        share = shares(lab, job)[0]
        folders = [f"/crater-cache/{kind}/{lab.spec.name}/{job}" for kind in KINDS]
        stat = lab.node_run("a1", ["stat", "-c", "%u %g %a %F", *folders])
        facts[min(share.gpus) // 4] = {
            "job": job,
            "said": said,
            "plan": said.split("crater explain ")[1].split(")")[0],
            "record": lab.job(job),
            "share": share,
            "folders": stat.stdout.splitlines(),
        }
    facts[0]["while_running"] = explained(lab, facts[0]["job"])
    for job, _ in started:
        (lab.home() / f"go.{job}").touch()
    for job, _ in started:
        completed(lab, job)
    return facts


@pytest.fixture(params=[0, 1], ids=["socket0", "socket1"])
def main_job(jobs: Any, request: pytest.FixtureRequest) -> Any:
    return jobs[request.param] | {"socket": request.param}


def test_the_user_is_told_the_plan(main_job: Any) -> None:
    assert main_job["said"] == (
        "sbatch: crater: planned 2 GPUs, 8 cores on one NUMA node; 1 of 3 nodes can run it "
        f"(crater explain {main_job['plan']})\n"
    )


def test_slurm_is_asked_for_it(lab: Lab, main_job: Any, slurm_version: tuple[int, int]) -> None:
    record = main_job["record"]
    prefix = "gres:" if slurm_version < (23, 2) else "gres/"
    wanted = ("gpu:2", "membw:60", "nviops:100000", "nvme:1")
    assert record["TresPerNode"].split(",") == [prefix + gres for gres in wanted]
    assert record["TresPerSocket"] == f"{prefix}gpu:2"
    assert record["GresEnforceBind"] == "Yes"
    assert (record["Socks/Node"], record["NumTasks"], record["CPUs/Task"]) == ("1", "1", "8")
    assert record["ExcNodeList"] == "e1,l1"
    payload = token.read_unverified(record["Comment"])
    assert payload is not None
    assert (payload["i"], payload["u"], payload["z"]) == (main_job["plan"], 61001, lab.spec.name)


def test_slurm_gives_it(lab: Lab, main_job: Any) -> None:
    share = main_job["share"]
    assert (share.node, len(share.cpus), len(share.gpus)) == ("a1", 8, 2)
    assert numa_of_cpus(lab, share) == numa_of_gpus(lab, share) == {main_job["socket"]}
    counts = {"membw": 60, "nviops": 100_000, "nvme": 1}
    assert {key: share.counts[key] for key in counts} == counts


def told(found: dict[str, str]) -> dict[str, str]:
    """crater's own, but for the module's folder, whose name is of what it holds."""
    own = {k: v for k, v in found.items() if k.startswith("CRATER_")}
    assert re.fullmatch(r"/run/crater/job/[0-9a-f]{12}", own.pop("CRATER_JOB_PATH"))
    return own


def test_the_job_is_told_what_it_has(lab: Lab, main_job: Any) -> None:
    number, given = main_job["job"], main_job["share"]
    found = environment(lab, number)
    expected = expected_environment(lab, number, main_job["plan"], given)
    assert told(found) == expected
    assert found["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, given.gpus))  # Slurm's own
    assert found["SLURM_CPUS_PER_TASK"] == "8"
    step = environment(lab, number, "step")
    assert told(step) == expected


def test_the_cache_is_the_jobs_own_and_goes_with_it(lab: Lab, main_job: Any) -> None:
    assert main_job["folders"] == ["61001 61001 700 directory"] * 3
    # What stays is empty: the kinds' folders and the cluster's within them, and the trash.
    find = ["find", "/crater-cache", "-mindepth", "3", "-o", "-path", "*/.crater-trash/*"]
    wait_until(lambda: not lab.node_run("a1", find).stdout.strip(), "the folders are gone")


def test_explain_says_what_was_asked_and_given(lab: Lab, main_job: Any) -> None:
    number, plan = main_job["job"], main_job["plan"]

    def reported() -> Any:
        told = explained(lab, number)
        return told if told["grants"] and told["grants"][0]["got"]["phase"] == "epilog" else None

    told = wait_until(reported, "the node has reported the end of the job")
    decision = told["decision"]
    assert (decision["id"], decision["verdict"], decision["mode"]) == (plan, "planned", "enforce")
    assert decision["passed_nodes"] == "a1"
    assert {row[0] for row in decision["excluded"]} == {"l1", "e1"}
    assert {c["name"]: c["passed_nodes"] for c in decision["conditions"]} == {
        "gpus": 3,
        "gpu-memory": 2,
        "precision": 3,
        "cpus": 3,
        "memory-bandwidth": 3,
        "ssd-iops": 3,
        "cache": 3,
        "numa": 1,
    }
    assert (told["job"]["JobState"], told["job"]["NodeList"]) == ("COMPLETED", "a1")
    got = told["grants"][0]
    assert (got["job_id"], got["node"], got["got"]["asked"]) == (number, "a1", "strict")
    first, last = main_job["share"].cpus[0], main_job["share"].cpus[-1]
    assert got["got"]["cpus"] == f"{first}-{last}"
    assert got["got"]["numa_nodes"] == got["got"]["gpu_numa_nodes"] == [main_job["socket"]]
    assert got["got"]["local"] is True
    assert explained(lab, plan)["decision"] == decision

    text = crater(lab, "explain", str(number)).stdout
    for part in (
        f"Job {number} (main) is COMPLETED; on a1",
        f"Plan {plan}: planned (enforce)",
        "Nodes: 1 of 3 can run it: a1",
        "not l1: GPU memory is 22.5 GiB",
        "not e1: one NUMA node gives 42.9 GB/s",
        "Plan, per node: 2 GPUs, 8 cores, on 1 NUMA node, 60 GB/s, 100000 IOPS",
        "exc_nodes=e1,l1",
        "  on a1 (epilog):",
    ):
        assert part in text, text
    assert text.splitlines()[1:] == crater(lab, "explain", plan).stdout.splitlines()


def test_explain_works_while_the_job_runs(jobs: Any) -> None:
    told = jobs[0]["while_running"]
    assert told["job"]["JobState"] == "RUNNING"
    assert told["decision"]["plan"]["gpus"] == 2


def test_check_says_the_same_and_submits_nothing(lab: Lab, jobs: Any) -> None:
    name = script(lab, "job.sh", SCRIPT)
    before = lab.run(["scontrol", "-o", "show", "job"], user="root").stdout
    done = crater(lab, "check", name)
    assert done.returncode == 0, done.stderr
    assert "Nodes: 1 of 3 can run it: a1" in done.stdout
    assert jobs[0]["plan"] not in done.stdout
    done = crater(lab, "check", name, "--nodes=2")
    assert done.returncode == 1
    assert "It would fit with --nodes=1" in done.stdout
    assert lab.run(["scontrol", "-o", "show", "job"], user="root").stdout == before


def test_nothing_is_left_on_the_node(lab: Lab, jobs: Any) -> None:
    for facts in jobs.values():
        assert output(lab, facts["job"]) == ""
    marks = lab.folders.node("a1") / "run/jobs"
    wait_until(lambda: not [m for m in marks.iterdir() if m.name.isdigit()], "marks are gone")
    all_well(lab)
