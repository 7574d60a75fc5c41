"""Parts of GPUs on a real slurmctld: what shares a card fits it, and the impossible never waits."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import (
    accepted,
    all_well,
    cancel,
    explained,
    inventory,
    numa_of_cpus,
    output,
    patient_lab,
    profile,
    running,
    settled,
    shares,
    submit,
    variables,
    wait_until,
    waits,
)

from crater_slurm.lab import Lab
from crater_slurm.model.cpuset import parse_cpulist
from crater_slurm.slurm import gres

SMALL = "gpus=1 gpu-memory=2GiB gpu-sharing=yes"
TOLD = "env; echo told=yes; sleep 600"


@pytest.fixture(scope="module")
def cluster(lab_factory: Any, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """l1: one package with four L4; a1: two packages with 16 cores and two A100 each."""
    a100 = profile("a100-pcie-40gb")
    a100["gpus"] = [gpu | {"index": i} for i, gpu in enumerate(a100["gpus"][2:6])]
    file = inventory(
        tmp_path_factory.mktemp("sharing"), ("l1", profile("l4-inference")), ("a1", a100)
    )
    return patient_lab(
        lab_factory, inventory=file, crater_conf={"sharing": {"allow": "shard", "mps": True}}
    )


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    yield cluster
    cancel(cluster)


def told(lab: Lab, job: int) -> dict[str, str]:
    """A running job's environment, as it told it."""
    running(lab, job)
    wait_until(lambda: "told=yes" in output(lab, job), f"job {job} has told its environment")
    return variables(output(lab, job))


def card_of(lab: Lab, job: int) -> int:
    """Index of the one GPU that a job was given."""
    return int(told(lab, job)["CRATER_GPU_IDS_HOST"])


def test_slurm_counts_the_shards_that_crater_counts(lab: Lab) -> None:
    counts = {name: gres.totals(lab.node(name)["Gres"])["shard"] for name in ("l1", "a1")}
    assert counts == {"l1": 4 * 30, "a1": 4 * 31}


def test_two_jobs_share_one_gpu(lab: Lab) -> None:
    jobs = []
    for user in ("alice", "bob"):
        said = submit(lab, "-w", "l1", crater=f"{SMALL} cpus=1", body=TOLD, user=user)
        assert "3 of 31 slices of an L4 (2,160 MiB), shared, not isolated" in said.text
        assert "a neighbour can take it" in said.text or "limited by CUDA MPS" in said.text
        jobs.append(accepted(said))
    devices = []
    for job, user in zip(jobs, ("alice", "bob"), strict=True):
        running(lab, job)
        wait_until(lambda: "told=yes" in output(lab, job, user), "it has started")  # noqa: B023
        devices.append(variables(output(lab, job, user))["CUDA_VISIBLE_DEVICES"])
        assert shares(lab, job)[0].counts == {"shard": 3}
    assert devices[0] == devices[1]


def test_many_jobs_never_have_more_of_a_card_than_it_has(lab: Lab) -> None:
    chance = random.Random(5)
    jobs: dict[int, int] = {}
    for _ in range(30):
        memory = chance.randrange(500, 15_000)
        said = submit(
            lab, "-w", "l1", "--mem=100", body=TOLD,
            crater=f"gpus=1 gpu-memory={memory}MiB gpu-sharing=yes cpus=1",
        )  # fmt: skip
        jobs[accepted(said)] = -(-memory // 720)
    states = {job: settled_or_behind(lab, job) for job in jobs}
    started = [job for job, state in states.items() if state == "RUNNING"]
    used: Counter[int] = Counter()
    holders: Counter[int] = Counter()
    for job in started:
        assert shares(lab, job)[0].counts == {"shard": jobs[job]}
        used[card_of(lab, job)] += jobs[job]
        holders[card_of(lab, job)] += 1
    assert max(used.values()) <= 30
    assert max(holders.values()) >= 2
    # Slurm had no room for one more: what waits is more than any card has left.
    assert len(started) < len(jobs)
    assert len(used) == 4
    agrees_with(lab, used)


def agrees_with(lab: Lab, used: Counter[int]) -> None:
    """slurmctld has the same in use: card by card, or before 23.02 which cards at all."""
    text = lab.run(["scontrol", "-d", "-o", "show", "node", "l1"], user="root").stdout
    found = re.search(r"GresUsed=\S*shard:l4:(\d+)\(([^)]*)\)", text)
    assert found, text
    if lab.version < (23, 2):
        assert parse_cpulist(found.group(2).removeprefix("IDX:")) == tuple(sorted(used))
        return
    assert int(found.group(1)) == sum(used.values())
    assert found.group(2) == ",".join(f"{used[card]}/30" for card in range(4))


def settled_or_behind(lab: Lab, job: int) -> str:
    """RUNNING, or PENDING for want of resources or behind one that pends for them."""

    def state() -> str:
        record = lab.job(job)
        if record["JobState"] == "PENDING" and record["Reason"] == "None":
            return ""
        return record["JobState"]

    return str(wait_until(state, f"job {job} is scheduled"))


def test_a_whole_gpu_is_nobody_else_s(lab: Lab) -> None:
    running(lab, accepted(submit(lab, "-w", "l1", crater="gpus=3 cpus=1")))
    first = accepted(submit(lab, "-w", "l1", crater=f"{SMALL} cpus=1", body=TOLD))
    second = accepted(submit(lab, "-w", "l1", crater=f"{SMALL} cpus=1", body=TOLD))
    assert card_of(lab, first) == card_of(lab, second) == 3
    waits(lab, accepted(submit(lab, "-w", "l1", crater="gpus=1 cpus=1")))


@pytest.mark.parametrize("crater", ["", "cpus=1", "mode=off cpus=1"])
def test_shards_that_no_card_has_are_refused_and_hold_nobody_back(lab: Lab, crater: str) -> None:
    said = submit(lab, "--gres=shard:32", crater=crater)
    assert said.job is None
    assert "one GPU has 31 slices of 1,280 MiB for jobs" in said.text
    assert "it would fit with --gres=shard:31" in said.text
    running(lab, accepted(submit(lab, "--gres=shard:31", crater=crater)))
    running(lab, accepted(submit(lab, crater=f"{SMALL} cpus=1")))


def test_more_than_any_card_has_is_refused(lab: Lab) -> None:
    said = submit(lab, crater="gpus=1 gpu-memory=60GiB gpu-sharing=yes")
    assert said.job is None
    assert "gpu-memory: needs 60 GiB, GPU memory is 40 GiB" in said.text


def test_the_environment_has_what_is_promised(lab: Lab) -> None:
    job = accepted(submit(lab, "-w", "l1", crater=f"{SMALL} cpus=1", body=TOLD))
    found = told(lab, job)
    assert (found["CRATER_GPU_SHARED"], found["CRATER_GPU_MEMORY_MIB"]) == ("1", "2160")
    assert found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=2160M"
    assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "9"
    assert found["CRATER_GPU_IDS"] == "0"
    stale = {"CRATER_GPU_SHARED": "1"}  # of the shell that submits
    said = submit(lab, "-w", "a1", crater="gpus=1 cpus=1", body=TOLD, environment=stale)
    whole = accepted(said)
    found = told(lab, whole)
    assert "CRATER_GPU_SHARED" not in found
    assert "CRATER_GPU_MEMORY_MIB" not in found
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in found


def test_explain_tells_the_share(lab: Lab) -> None:
    said = submit(lab, "-w", "l1", crater=f"{SMALL} cpus=1")
    plan = explained(lab, accepted(said))["decision"]["plan"]
    assert (plan["shards"], plan["slices"], plan["gpu_memory_mib"], plan["card"]) == (
        *(3, 31, 2160, "l4"),
    )


def test_a_strict_job_has_cores_beside_the_gpu_that_it_shares(lab: Lab) -> None:
    running(lab, accepted(submit(lab, "-w", "a1", crater="gpus=2 cpus=1 numa=strict")))
    job = accepted(submit(lab, "-w", "a1", crater=f"{SMALL} cpus=4 numa=strict", body=TOLD))
    card = card_of(lab, job)
    (share,) = shares(lab, job)
    assert len(share.cpus) == 4
    near = {gpu.numa_node for gpu in lab.nodes.profile_of("a1").gpus if gpu.index == card}
    assert numa_of_cpus(lab, share) == near


def test_a_strict_job_waits_rather_than_straddle(lab: Lab) -> None:
    for _ in range(2):
        running(lab, accepted(submit(lab, "-w", "a1", crater="cpus=13 numa=strict")))
    strict = accepted(submit(lab, "-w", "a1", crater=f"{SMALL} cpus=4 numa=strict"))
    waits(lab, strict)
    cancel(lab, strict)
    loose = accepted(submit(lab, "-w", "a1", crater=f"{SMALL} cpus=4"))
    assert settled(lab, loose) == "RUNNING"
    assert numa_of_cpus(lab, shares(lab, loose)[0]) == {0, 1}


def test_the_nodes_are_well(lab: Lab) -> None:
    all_well(lab)
