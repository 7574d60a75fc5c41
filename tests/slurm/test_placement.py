"""NUMA placement and the user's own options on a real slurmctld: what Slurm really allocates."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import (
    accepted,
    all_well,
    cancel,
    patient_lab,
    running,
    settled,
    shares,
    submit,
    waits,
)
from helpers import numa_of_cpus as cpu_nodes
from helpers import numa_of_gpus as gpu_nodes

from crater_slurm.lab import Lab

STRICT = "gpus=2 cpus=8 numa=strict"
ROUNDS = 20


@pytest.fixture(scope="module")
def cluster(lab_factory: Any) -> Lab:
    return patient_lab(lab_factory, inventory="demo")


@pytest.fixture
def empty(cluster: Lab) -> Iterator[Lab]:
    """The demo cluster without jobs, before and after."""
    yield cluster
    cancel(cluster)


def planned(said: Any) -> str:
    """The plan in words, without ids."""
    assert said.job is not None, said.text
    found = re.match(r"crater: planned (.*); \d+ of \d+ nodes can run it", said.lines[0])
    assert found, said.text
    return found.group(1)


def test_twenty_of_twenty_on_one_socket(empty: Lab) -> None:
    """A strict job among others that come and go, on a node where totals often tempt."""
    lab, dice = empty, random.Random(20260115)
    fillers: list[int] = []
    strict: list[int] = []
    waited = 0
    for turn in range(ROUNDS):
        for _ in range(dice.randint(1, 2)):
            gpus, cores = dice.randint(1, 3), dice.randint(1, 8)
            said = submit(lab, "-w", "a1", "-n1", f"-c{cores}", f"--gres=gpu:{gpus}", user="bob")
            fillers.append(accepted(said))
        job = accepted(submit(lab, "-w", "a1", crater=STRICT))
        while settled(lab, job) == "PENDING":
            waited += 1
            older = fillers or strict
            cancel(lab, older.pop(dice.randrange(len(older))))
        share = shares(lab, job)[0]
        assert (len(share.gpus), len(share.cpus)) == (2, 8)
        assert cpu_nodes(lab, share) == gpu_nodes(lab, share), (turn, share)
        assert len(cpu_nodes(lab, share)) == 1, (turn, share)
        strict.append(job)
        leaving = [j for group in (fillers, strict) for j in group if dice.random() < 0.3]
        if leaving:
            cancel(lab, *leaving)
        fillers = [j for j in fillers if j not in leaving]
        strict = [j for j in strict if j not in leaving]
    assert waited, "the node was never so full that a job had to wait"


def test_a_strict_job_waits_where_another_straddles(empty: Lab) -> None:
    """One GPU and eight cores are free on each socket: in total enough, together not."""
    lab = empty
    blockers = [
        accepted(submit(lab, "-w", "a1", crater="gpus=3 cpus=8 numa=strict")) for _ in range(2)
    ]
    for job in blockers:
        running(lab, job)
    strict = accepted(submit(lab, "-w", "a1", crater=STRICT))
    waits(lab, strict)
    straddling = accepted(submit(lab, "-w", "a1", "--nice=-1", crater="gpus=2 cpus=8", user="root"))
    running(lab, straddling)
    assert len(gpu_nodes(lab, shares(lab, straddling)[0])) == 2
    assert settled(lab, strict) == "PENDING"
    cancel(lab, blockers[0])
    running(lab, strict)
    share = shares(lab, strict)[0]
    assert cpu_nodes(lab, share) == gpu_nodes(lab, share)
    assert len(cpu_nodes(lab, share)) == 1


def test_more_cores_than_a_socket_has(empty: Lab) -> None:
    lab = empty
    asked = "gpus=2 cpus=20 gpu-type=a100"
    said = submit(lab, crater=f"{asked} numa=strict")
    assert said.job is None
    assert said.lines[:3] == (
        "crater: refused: none of the 6 nodes that its options allow can run this job",
        "crater:   nearest is a1: numa: needs 2 GPUs, 20 cores together (strict), "
        "one NUMA node has at most 16 cores beside 2 GPUs",
        "crater:   it would fit with cpus=16, or with numa=best_effort",
    )
    # Both ways out are true.
    for way in (f"{asked} numa=best_effort", "gpus=2 cpus=16 gpu-type=a100 numa=strict"):
        job = accepted(submit(lab, crater=way))
        running(lab, job)
        share = shares(lab, job)[0]
        assert len(share.gpus) == 2
        cores = 16 if "strict" in way else 20
        assert len(share.cpus) in (cores, 2 * cores)  # e1 has two threads a core


@pytest.mark.parametrize(
    ("node", "asked", "words", "cores", "domains"),
    [
        ("e1", STRICT, "2 GPUs, 8 cores on one NUMA node", 8, 1),
        ("e1", "gpus=1 cpus=16 numa=strict", "1 GPU, 16 cores on one NUMA node", 16, 1),
        ("e1", "gpus=4 cpus=8 numa=strict", "4 GPUs, 8 cores on 2 NUMA nodes", 8, 2),
        ("h1", "gpus=4 cpus=56 numa=strict", "4 GPUs, 56 cores on one NUMA node", 56, 1),
        ("h1", "gpus=8 cpus=64 numa=strict", "8 GPUs, 64 cores on 2 NUMA nodes", 64, 2),
        ("l1", "gpus=4 cpus=24 numa=strict", "4 GPUs, 24 cores on one NUMA node", 24, 1),
    ],
)
def test_other_machines(
    empty: Lab, node: str, asked: str, words: str, cores: int, domains: int
) -> None:
    said = submit(empty, "-w", node, crater=asked)
    assert planned(said) == words
    job = accepted(said)
    running(empty, job)
    share = shares(empty, job)[0]
    threads = empty.nodes.profile_of(node).cpu.threads_per_core
    assert len(share.cpus) == cores * threads
    assert cpu_nodes(empty, share) == gpu_nodes(empty, share)
    assert len(cpu_nodes(empty, share)) == domains


def test_nps4_fills_up_numa_node_by_numa_node(empty: Lab) -> None:
    """Eight NUMA nodes, GPUs beside four of them: four such jobs fit, each alone on its own."""
    jobs = [accepted(submit(empty, "-w", "e1", crater=STRICT)) for _ in range(4)]
    used = []
    for job in jobs:
        running(empty, job)
        share = shares(empty, job)[0]
        assert cpu_nodes(empty, share) == gpu_nodes(empty, share)
        used += sorted(cpu_nodes(empty, share))
    assert sorted(used) == [1, 3, 5, 7]


def test_machines_of_different_make_are_not_mixed(empty: Lab) -> None:
    """Four GPUs are on one NUMA node or on two, by machine: those with one are taken.

    l1 is one socket in all, for which Slurm has no such request.
    """
    said = submit(empty, crater="gpus=4 cpus=8 numa=strict")
    assert planned(said) == "4 GPUs, 8 cores on one NUMA node"
    record = running(empty, accepted(said))
    assert record["ExcNodeList"] == "e1,l1,s1"
    share = shares(empty, accepted(said))[0]
    assert cpu_nodes(empty, share) == gpu_nodes(empty, share)
    assert len(cpu_nodes(empty, share)) == 1
    said = submit(empty, "-w", "e1,s1", "-N2", crater="gpus=4 cpus=8 numa=strict")
    assert planned(said) == "4 GPUs, 8 cores on 2 NUMA nodes on each of 2 nodes"
    running(empty, accepted(said))
    for share in shares(empty, accepted(said)):
        assert cpu_nodes(empty, share) == gpu_nodes(empty, share)


@pytest.mark.parametrize("consumed", ["", " memory-bandwidth=100 cache=10"])
def test_cores_alone_stay_on_one_socket(empty: Lab, consumed: str) -> None:
    """48 cores a socket: two of 20 fit on each, and the fifth waits though 16 cores are free."""
    jobs = []
    for _ in range(5):
        said = submit(empty, "-p", "cpu", crater=f"cpus=20 numa=strict{consumed}")
        assert planned(said) == "20 cores on one NUMA node"
        jobs.append(accepted(said))
    used = []
    for job in jobs[:4]:
        running(empty, job)
        share = shares(empty, job)[0]
        assert len(share.cpus) == 20
        assert len(cpu_nodes(empty, share)) == 1, share
        used += sorted(cpu_nodes(empty, share))
    assert sorted(used) == [0, 0, 1, 1]
    waits(empty, jobs[4])


def test_several_tasks_stay_together(empty: Lab) -> None:
    said = submit(empty, "-w", "a1", "-n4", crater=STRICT)
    assert planned(said) == "2 GPUs, 8 cores on one NUMA node"
    record = running(empty, accepted(said))
    assert (record["NumTasks"], record["CPUs/Task"], record["NumCPUs"]) == ("4", "2", "8")
    share = shares(empty, accepted(said))[0]
    assert cpu_nodes(empty, share) == gpu_nodes(empty, share)
    assert len(cpu_nodes(empty, share)) == 1


@pytest.mark.parametrize("options", [(), ("-n4",), ("--ntasks-per-node=2",)], ids=str)
def test_two_nodes_get_the_same_each(empty: Lab, options: tuple[str, ...]) -> None:
    said = submit(empty, "-N2", "-w", "a[1-2]", *options, crater=STRICT)
    assert planned(said) == "2 GPUs, 8 cores on one NUMA node on each of 2 nodes"
    running(empty, accepted(said))
    both = shares(empty, accepted(said))
    assert [share.node for share in both] == ["a1", "a2"]
    for share in both:
        assert (len(share.gpus), len(share.cpus)) == (2, 8)
        assert cpu_nodes(empty, share) == gpu_nodes(empty, share)
        assert len(cpu_nodes(empty, share)) == 1


#: Options on a1, what is allocated there, and what the user is told.
SPELLINGS = [
    (("--gpus=3",), 3, 8, "--gpus asks for 3 per node and wins over gpus=2"),
    (("--gpus-per-node=3",), 3, 8, "asks for 3 per node and wins over gpus=2"),
    (("--gres=gpu:3",), 3, 8, "asks for 3 per node and wins over gpus=2"),
    (("--gres=gpu:a100:3",), 3, 8, "asks for 3 per node and wins over gpus=2"),
    (("--gpus=a100:2",), 2, 8, ""),
    (("-n2", "--gpus-per-task=1"), 2, 8, "use --gpus-per-node with numa=strict"),
    (("-n3", "--gpus-per-task=1"), 3, 9, "--gpus-per-task asks for 3 per node"),
    (("-c4",), 2, 4, "the options ask for 4 CPUs and win over cpus=8"),
    (("-n4", "-c1"), 2, 4, "the options ask for 4 CPUs and win over cpus=8"),
    (("-n16",), 2, 16, ""),
    (("--cpus-per-gpu=3", "--gres=gpu:2"), 2, 6, "--cpus-per-gpu asks for 6 CPUs and wins"),
    (("--gres-flags=disable-binding",), 2, 8, "disable-binding wins over numa=strict"),
    (("--sockets-per-node=1",), 2, 8, "win over numa=strict"),
    (("--gpus=0",), 0, 8, "--gpus asks for 0 per node and wins over gpus=2"),
]


@pytest.mark.parametrize(("options", "gpus", "cores", "told"), SPELLINGS, ids=lambda v: str(v)[:24])
def test_the_users_options_win(
    empty: Lab, options: tuple[str, ...], gpus: int, cores: int, told: str
) -> None:
    said = submit(empty, "-w", "a1", *options, crater=STRICT)
    assert told in said.text
    job = accepted(said)
    record = running(empty, job)
    share = shares(empty, job)[0]
    assert (len(share.gpus), len(share.cpus)) == (gpus, cores)
    if "on one NUMA node" in said.lines[0]:
        assert len(cpu_nodes(empty, share)) == 1
        assert gpu_nodes(empty, share) <= cpu_nodes(empty, share)
    # One spelling of GPUs only; 26.05 refuses two.
    spelled = [
        k for k in ("TresPerNode", "TresPerJob", "TresPerTask") if "gpu" in record.get(k, "")
    ]
    assert len(spelled) == 1


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (("--mem=3G",), "MinMemoryNode", "3G"),
        (("--mem-per-cpu=100",), "MinMemoryCPU", "100M"),
        (("--mem-per-gpu=200", "--gpus=2"), "NumCPUs", "8"),
        (("-x", "a1,h1,l1"), "ExcNodeList", "a1,h1,l1"),
        (("-x", "a1", "--gpus-per-node=a100:4"), "ExcNodeList", "a1,e1,h1,l1,s1"),
        (("-w", "s1"), "ReqNodeList", "s1"),
        (("-p", "gpu"), "Partition", "gpu"),
        (("--comment=mine",), "Comment", "mine crater-plan:"),
        (("--nodes=1-2",), "NumCPUs", "8"),
    ],
    ids=str,
)
def test_other_options_stay(empty: Lab, options: tuple[str, ...], field: str, value: str) -> None:
    job = accepted(submit(empty, *options, crater=STRICT))
    record = running(empty, job)
    assert record[field].startswith(value)
    share = shares(empty, job)[0]
    assert len(share.gpus) in (2, 4)
    assert cpu_nodes(empty, share) == gpu_nodes(empty, share)


def test_a_node_that_the_user_names_must_be_able(empty: Lab) -> None:
    said = submit(empty, "-w", "l1", crater="gpus=2 gpu-memory=40GiB")
    assert said.job is None
    assert "nearest is l1: gpu-memory: needs 40 GiB, GPU memory is 22.5 GiB" in said.text
    said = submit(empty, "-x", "a1,a2,e1,h1,s1", crater="gpus=2 gpu-memory=40GiB")
    assert said.job is None
    assert "none of the 1 nodes that its options allow" in said.text


def test_slurms_own_errors_stay_slurms(empty: Lab) -> None:
    said = submit(empty, "-p", "nowhere", crater=STRICT)
    assert said.job is None
    assert "crater: the job is left as it is: crater knows no partition 'nowhere'" in said.lines
    assert "Invalid partition name" in said.lines[-1]
    said = submit(empty, "--constraint=nothing", crater=STRICT)
    assert said.job is None
    assert "Invalid feature specification" in said.lines[-1]
    said = submit(empty, "-w", "zz9", crater=STRICT)
    assert said.job is None
    assert "Invalid node name" in said.lines[-1]


def test_a_whole_node_is_the_users_word(empty: Lab) -> None:
    said = submit(empty, "-w", "a1", "--exclusive", crater=STRICT)
    assert planned(said) == "2 GPUs, 8 cores"
    job = accepted(said)
    running(empty, job)
    share = shares(empty, job)[0]
    assert (len(share.cpus), len(share.gpus)) == (32, 8)


def test_the_nodes_are_well(empty: Lab) -> None:
    all_well(empty)


def test_a_single_socket_alone_takes_strict_jobs(empty: Lab) -> None:
    """Its GPUs and cores are together anyway, and the request that says so it would refuse."""
    job = accepted(submit(empty, "-w", "l1", crater="gpus=2 cpus=8 numa=strict"))
    assert running(empty, job)["NodeList"] == "l1"
    by_hand = submit(
        empty, "-w", "l1", "-n1", "-c2", "--gres=gpu:2", "--gpus-per-socket=2",
        "--sockets-per-node=1", "--gres-flags=enforce-binding",
    )  # fmt: skip
    assert by_hand.job is None, "Slurm can do it now: machines of one socket need no group apart"
