"""The CRATER_ variables: GPUs as CUDA sees them, CPUs, folders, and no way out of a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.model.plan import Plan
from crater_slurm.node import environment, slurmcpus, verify
from crater_slurm.node.binding import Given
from crater_slurm.node.environment import TaskView, build, host_gpus, preprocessing_cpus, task_lines
from crater_slurm.node.gpus import GpuFact, GpuFacts, parse_indexes

FACTS = {i: GpuFact(f"GPU-{i:04d}", i // 2) for i in range(4)}
FOLDERS = {kind: f"/crater-cache/{kind}/c1/7" for kind in ("checkpoint", "dataset", "temp")}


def view(cpus=(0, 1, 2, 3), **gpus) -> TaskView:
    return TaskView(cpus=tuple(cpus), numa_nodes=(0,), **gpus)


def test_a_job_with_host_gpus_2_and_3_sees_0_and_1() -> None:
    found = build(
        view(job_gpus=(2, 3), step_gpus="2,3", visible="0,1"),
        Plan(id="p1", precision="bf16"), FOLDERS, FACTS,
    )  # fmt: skip
    assert found == {
        "CRATER_PLAN_ID": "p1",
        "CRATER_PRECISION": "bf16",
        "CRATER_GPU_IDS": "0,1",
        "CRATER_GPU_IDS_HOST": "2,3",
        "CRATER_GPU_SHARED": None,
        "CRATER_GPU_MEMORY_MIB": None,
        "CRATER_GPU_UUIDS": "GPU-0002,GPU-0003",
        "CRATER_CPU_CORES": "4",
        "CRATER_CPU_LIST": "0-3",
        "CRATER_PREPROC_CPUS": "3",
        "CRATER_NUMA_NODE": "0",
        "CRATER_CHECKPOINT_PATH": "/crater-cache/checkpoint/c1/7",
        "CRATER_DATASET_PATH": "/crater-cache/dataset/c1/7",
        "CRATER_CACHE_PATH": "/crater-cache/temp/c1/7",
        "CRATER_TMPDIR": "/crater-cache/temp/c1/7",
    }
    assert "CUDA_VISIBLE_DEVICES" not in found


SLICES = Plan(id="p1", gpus=1, shards=3, slices=31, gpu_memory_mib=2160, card="l4")


def test_a_job_with_slices_is_told_its_share() -> None:
    found = build(view(job_gpus=(2,), visible="0"), SLICES, {}, FACTS)
    assert (found["CRATER_GPU_SHARED"], found["CRATER_GPU_MEMORY_MIB"]) == ("1", "2160")
    assert found["CRATER_GPU_IDS_HOST"] == "2"
    assert not [name for name in found if name.startswith("CUDA_")]


@pytest.mark.parametrize("gpus", [(), (0, 1)])
def test_slurm_s_gpus_win_over_the_planned_share(gpus: tuple[int, ...]) -> None:
    found = build(view(job_gpus=gpus), SLICES, {}, FACTS)
    assert found["CRATER_GPU_SHARED"] is None
    assert found["CRATER_GPU_MEMORY_MIB"] is None
    assert environment.mps_limits(view(job_gpus=gpus, visible="0"), SLICES) == {}


def test_mps_limits_memory_and_threads_of_the_one_device_that_a_client_sees() -> None:
    task = view(job_gpus=(2,), visible="0")
    assert environment.mps_limits(task, SLICES) == {
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2160M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "9",  # 3 of 31, rounded down
    }
    assert environment.mps_limits(view(job_gpus=(2,), visible=""), SLICES) == {}
    assert environment.mps_limits(task, Plan(id="p1", gpus=1)) == {}


def test_the_threads_of_all_jobs_of_a_card_are_never_more_than_it_has() -> None:
    for shards in range(1, 32):
        plan = Plan(id="p1", gpus=1, shards=shards, slices=31, gpu_memory_mib=720 * shards)
        limits = environment.mps_limits(view(job_gpus=(0,), visible="0"), plan)
        percent = int(limits["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] or 0)
        assert percent >= 1
        assert percent * (31 // shards) <= 100


@pytest.mark.parametrize(
    ("job", "step", "visible", "host", "count"),
    [
        ((2, 3), "2,3", "0,1", (2, 3), 2),  # ConstrainDevices: counted within the step
        ((2, 3), "2,3", "2,3", (2, 3), 2),  # not constrained: the node's own numbers
        ((2, 3), "2,3", "1", (3,), 1),  # one task of two, constrained
        ((2, 3), "2,3", "3", (3,), 1),  # one task of two, not constrained
        ((0, 1, 2, 3), "1,2", "0", (1,), 1),
        ((2, 3), None, "0,1", (2, 3), 2),  # batch script: only the job's list
        ((2, 3), None, None, (2, 3), 2),
        ((), None, None, (), 0),
        ((2, 3), "2,3", "", (), 0),  # the user hides them
        ((2, 3), "2,3", "-1", (), 0),
        ((2, 3), "2,3", "GPU-0002,GPU-0003", (2, 3), 2),
        ((2, 3), "0,1,2,3", "0,1", (2, 3), 2),  # a step can't have more than its job
        ((2, 3), "2,3", "17", (), 1),  # a number that belongs to neither
        ((2, 3), "2,x", "0,1", (2, 3), 2),
    ],
)  # fmt: skip
def test_host_gpus(job, step, visible, host, count) -> None:
    task = view(job_gpus=job, step_gpus=step, visible=visible)
    if visible == "-1":
        assert environment.gpu_count(task) == 0
    else:
        assert (host_gpus(task), environment.gpu_count(task)) == (host, count)


def test_an_unknown_uuid_leaves_the_list_out_rather_than_short() -> None:
    facts = {2: GpuFact("GPU-2", 0), 3: GpuFact(None, 0)}
    found = build(view(job_gpus=(2, 3)), None, {}, facts)
    assert found["CRATER_GPU_UUIDS"] is None
    assert found["CRATER_GPU_IDS_HOST"] == "2,3"


@pytest.mark.parametrize(
    ("count", "share"),
    [(0, 0), (1, 0), (2, 1), (4, 1), (5, 1), (6, 2), (10, 2), (11, 3), (32, 7), (64, 13)],
)
def test_a_fifth_of_the_cores_is_for_preprocessing(count: int, share: int) -> None:
    cpus = tuple(range(100, 100 + count))
    assert preprocessing_cpus(cpus) == cpus[count - share :]


@given(st.sets(st.integers(0, 500), min_size=2))
def test_the_split_leaves_cores_on_either_side(cpus: set[int]) -> None:
    share = preprocessing_cpus(tuple(cpus))
    assert 1 <= len(share) < len(cpus)
    assert set(share) < cpus


def test_without_a_cache_inherited_paths_are_unset() -> None:
    lines = task_lines(build(view(), Plan(id="p1"), {}, {}))
    for name in ("CHECKPOINT_PATH", "DATASET_PATH", "CACHE_PATH", "TMPDIR"):
        assert f"unset CRATER_{name}" in lines
    assert "unset TMPDIR" not in lines


@pytest.mark.parametrize(
    "value", ["a\nexport LD_PRELOAD=/tmp/x", "a\rb", "a\0b", "\x1b[2J", "a\u2028b"]
)
def test_a_value_that_could_end_its_line_is_unset(value: str) -> None:
    assert task_lines({"CRATER_CACHE_PATH": value}) == ["unset CRATER_CACHE_PATH"]


@given(st.text())
def test_no_value_ever_makes_a_second_line(value: str) -> None:
    (line,) = task_lines({"CRATER_PLAN_ID": value})
    assert line.startswith(("export CRATER_PLAN_ID", "unset CRATER_PLAN_ID"))
    assert len(line.splitlines()) == 1


# The node's GPUs


def test_gpu_facts_are_read_by_slurms_index_and_again_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    facts = GpuFacts(path)
    assert facts.all() == {}
    gpus = [
        {"index": 1, "uuid": "GPU-b", "numa_node": 1},
        {"index": 0, "uuid": "GPU-a", "numa_node": 0},
    ]
    path.write_text(json.dumps({"name": "n1", "gpus": gpus}))
    assert facts.all() == {0: GpuFact("GPU-a", 0), 1: GpuFact("GPU-b", 1)}
    assert facts.numa_nodes([0, 1]) == {0, 1}
    assert facts.numa_nodes([0, 2]) is None
    (tmp_path / "new").write_text(
        json.dumps({"profile": {"gpus": [{"index": 0, "numa_node": -1}]}})
    )
    (tmp_path / "new").rename(path)
    assert facts.all() == {0: GpuFact(None, -1)}
    assert facts.numa_nodes([0]) is None, "the kernel's -1 is unknown"


def test_slurms_abstract_cpus_count_through_one_numa_node_after_the_other(tmp_path: Path) -> None:
    # The kernel numbers the second threads last (8-15); Slurm's ids go node by node.
    nodes = [
        {"id": 1, "cpus": "4-7,12-15", "socket": 1},
        {"id": 0, "cpus": "0-3,8-11", "socket": 0},
        {"id": 2, "cpus": "", "socket": 0},
    ]
    (tmp_path / "p.json").write_text(json.dumps({"numa_nodes": nodes}))
    facts = GpuFacts(tmp_path / "p.json")
    assert facts.cpu_nodes(range(8)) == {0}
    assert facts.cpu_nodes([7, 8]) == {0, 1}
    assert facts.cpu_nodes([15]) == {1}
    assert facts.cpu_nodes([16]) == frozenset()
    assert GpuFacts(tmp_path / "none.json").cpu_nodes([0]) == frozenset()


@pytest.mark.parametrize("text", ["{", "[]", '{"gpus": 3}', '{"gpus": [3]}', "\xff", ""])
def test_a_damaged_profile_is_no_profile(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_bytes(text.encode("latin-1"))
    assert GpuFacts(tmp_path / "p.json").all() == {}


@pytest.mark.parametrize(
    ("text", "indexes"),
    [
        ("0,1", (0, 1)),
        ("3,1", (3, 1)),
        ("0-2", (0, 1, 2)),
        (None, ()),
        ("", ()),
        ("GPU-1", ()),
        ("-1", ()),
    ],
)
def test_slurms_gpu_lists(text, indexes) -> None:
    assert parse_indexes(text) == indexes


# Verification


@pytest.mark.parametrize(
    ("cpus", "gpus", "domains", "local"),
    [
        ({0}, {0}, 0, True),
        ({0}, {1}, 0, False),
        ({0, 1}, {0}, 0, False),  # cores of node 1 are far from the GPU
        ({0}, {0, 1}, 0, False),  # the GPU of node 1 has no core beside it
        ({0, 1}, {0, 1}, 0, True),
        ({0}, None, 0, None),
        (set(), {0}, 0, None),
        ({1}, set(), 0, True),
        ({0, 1}, set(), 0, False),
        ({0, 1}, set(), 2, True),
    ],
)
def test_what_is_local(cpus, gpus, domains, local) -> None:
    nodes = None if gpus is None else frozenset(gpus)
    assert verify.is_local(frozenset(cpus), nodes, domains) is local


def test_a_grant_says_what_was_asked_and_given() -> None:
    given = Given("hard", "the memory limits of all jobs fit", frozenset({0}))
    plan = Plan(id="p1", numa="strict")
    assert verify.grant(plan, given, (0, 1), frozenset({0}), frozenset({0}), {0: 300}) == {
        "asked": "strict",
        "given": "hard",
        "reason": "the memory limits of all jobs fit",
        "cpus": "0-1",
        "numa_nodes": [0],
        "memory_nodes": [0],
        "gpu_numa_nodes": [0],
        "local": True,
        "memory_mib": {"0": 300},
    }


# CPUs by Slurm's word

SHOW_JOB = (
    "JobId=7 UserId=u(1000) Nodes=n[1-2],n4 CPU_IDs=0-3,16 Mem=100 GRES=gpu:a100:2(IDX:0-1) "
    "Nodes=n3 CPU_IDs=8-9 Mem=100 GRES= MinCPUsNode=1 NodeList=n[1-4]"
)


@pytest.mark.parametrize(
    ("node", "cpus"),
    [("n1", (0, 1, 2, 3, 16)), ("n4", (0, 1, 2, 3, 16)), ("n3", (8, 9)), ("n", ())],
)
def test_slurms_cpu_ids_of_a_node(node: str, cpus: tuple[int, ...]) -> None:
    assert slurmcpus.parse(SHOW_JOB, node) == cpus


def test_slurm_is_asked_once_per_job_and_its_failure_is_no_failure(tmp_path: Path) -> None:
    from crater_slurm.config.settings import Slurm

    script = tmp_path / "scontrol"
    script.write_text(f"#!/bin/sh\necho x >>{tmp_path}/asked\necho 'Nodes=n1 CPU_IDs=4-5 Mem=1'\n")
    script.chmod(0o755)
    subject = slurmcpus.SlurmCpus(Slurm(bin_dir=tmp_path))
    assert [subject.cpus("7", "n1") for _ in range(3)] == [(4, 5)] * 3
    assert (tmp_path / "asked").read_text() == "x\n"
    subject.forget("7")
    script.write_text("#!/bin/sh\nexit 1\n")
    assert subject.cpus("7", "n1") == ()
    assert slurmcpus.SlurmCpus(Slurm(bin_dir=tmp_path / "none")).cpus("7", "n1") == ()
