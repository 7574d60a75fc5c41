"""The CRATER_ variables: GPUs as CUDA sees them, CPUs, folders, and no way out of a line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.model.cpuset import parse_cpulist
from crater_slurm.model.plan import Plan
from crater_slurm.node import blockdev, environment, slurmcpus, verify
from crater_slurm.node.binding import Given
from crater_slurm.node.environment import TaskView, build, host_gpus, preprocessing_cpus, task_lines
from crater_slurm.node.gpus import GpuFact, GpuFacts, parse_indexes
from crater_slurm.node.topology import Topology

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
        "CRATER_PREPROC_CPU_COUNT": "1",
        "CRATER_COMPUTE_CPUS": "0-2",
        "CRATER_COMPUTE_CPU_COUNT": "3",
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


@pytest.mark.parametrize(
    ("cores", "percent", "prepare"),
    [
        # The kernel numbers second threads last: core c has CPUs c and c + 8.
        ([(0, 8), (1, 9), (2, 10), (3, 11)], 20, (3, 11)),
        ([(0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13)], 20, (4, 5, 12, 13)),
        ([(0, 8), (1,)], 20, (1,)),  # half a core at the end is a core
        ([(0, 8)], 20, ()),  # one core can't be split, also with two threads
        ([(0, 8), (1, 9)], 90, (1, 9)),  # one core always stays
        ([(0, 8), (1, 9)], 0, ()),
    ],
)
def test_the_split_is_by_cores_and_keeps_threads_together(
    cores: list[tuple[int, ...]], percent: int, prepare: tuple[int, ...]
) -> None:
    cpus = tuple(sorted(cpu for core in cores for cpu in core))
    assert preprocessing_cpus(cpus, cores, percent) == prepare


@given(st.lists(st.integers(1, 2), min_size=1, max_size=64), st.integers(0, 90))
def test_the_two_parts_are_the_whole_and_share_no_core(threads: list[int], percent: int) -> None:
    cores = tuple(tuple(range(2 * i, 2 * i + n)) for i, n in enumerate(threads))
    cpus = tuple(cpu for core in cores for cpu in core)
    task = TaskView(cpus=cpus, numa_nodes=(0,), cores=cores)
    found = build(task, None, {}, {}, percent)
    prepare = set(parse_cpulist(found["CRATER_PREPROC_CPUS"] or ""))
    compute = set(parse_cpulist(found["CRATER_COMPUTE_CPUS"] or ""))
    assert prepare | compute == set(cpus)
    assert not prepare & compute
    assert compute
    assert all(set(core) <= prepare or set(core) <= compute for core in cores)
    taken = sum(set(core) <= prepare for core in cores)
    assert taken == min(-(-len(cores) * percent // 100), len(cores) - 1)
    assert found["CRATER_PREPROC_CPU_COUNT"] == str(len(prepare))
    assert found["CRATER_COMPUTE_CPU_COUNT"] == str(len(compute))


def test_unknown_cpus_leave_no_count_behind() -> None:
    found = build(TaskView(cpus=(), numa_nodes=()), None, {}, {})
    names = [name for name in found if "PREPROC" in name or "COMPUTE" in name]
    assert len(names) == 4
    assert {found[name] for name in names} == {None}


def test_cores_are_read_from_the_siblings_that_sys_shows(tmp_path: Path) -> None:
    for cpu, siblings in {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"}.items():
        file = tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{siblings}\n")
    topology = Topology.read(tmp_path)
    assert topology.cores_of([5, 1, 4, 0]) == ((0, 4), (1, 5))
    assert topology.cores_of([4, 5]) == ((4,), (5,)), "in the order of the cores"
    assert topology.cores_of([7, 0]) == ((0,), (7,)), "unknown siblings: a core of its own"


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


@pytest.mark.parametrize(
    ("cache", "gpus", "near"),
    [({1}, {1}, True), ({1}, {0}, False), ({1}, {0, 1}, True), ({0}, set(), True)],
)
def test_a_grant_says_whether_the_cache_is_near(cache, gpus, near) -> None:
    found = verify.grant(
        None, Given("none", ""), (0,), frozenset({0}), frozenset(gpus), {}, frozenset(cache)
    )
    assert (found["cache_numa_nodes"], found["cache_near"]) == (sorted(cache), near)


# The drive of the cache


def drive(root: Path, name: str, numa: str, number: str) -> Path:
    """A namespace of a drive on a PCI function, as the kernel shows it; its folder."""
    function = root / f"devices/pci0000:00/0000:0{numa.strip('-')}:00.0"
    folder = function / f"nvme/{name[:5]}/{name}"
    folder.mkdir(parents=True)
    (function / "numa_node").write_text(f"{numa}\n")
    link(root, number, folder)
    return folder


def link(root: Path, number: str, folder: Path) -> None:
    (root / "dev/block").mkdir(parents=True, exist_ok=True)
    (root / f"dev/block/{number}").symlink_to(folder)


def nodes(root: Path, minor: int) -> frozenset[int] | None:
    return blockdev.numa_nodes(os.makedev(259, minor), root)


def test_a_drive_s_numa_node_is_found_from_its_partition_too(tmp_path: Path) -> None:
    folder = drive(tmp_path, "nvme0n1", "1", "259:0")
    (folder / "nvme0n1p1").mkdir()
    link(tmp_path, "259:1", folder / "nvme0n1p1")
    assert nodes(tmp_path, 0) == nodes(tmp_path, 1) == {1}


def test_a_raid_is_on_the_nodes_of_its_drives(tmp_path: Path) -> None:
    first = drive(tmp_path, "nvme0n1", "0", "259:0")
    second = drive(tmp_path, "nvme1n1", "1", "259:1")
    raid = tmp_path / "devices/virtual/block/md0"
    (raid / "slaves").mkdir(parents=True)
    (raid / "slaves/nvme0n1").symlink_to(first)
    (raid / "slaves/nvme1n1").symlink_to(second)
    link(tmp_path, "259:9", raid)
    assert nodes(tmp_path, 9) == {0, 1}


def test_a_drive_with_several_paths_is_beside_its_controller(tmp_path: Path) -> None:
    drive(tmp_path, "nvme0n1", "1", "259:0")
    subsystem = tmp_path / "devices/virtual/nvme-subsystem/nvme-subsys0"
    (subsystem / "nvme0n1").mkdir(parents=True)
    controller = tmp_path / "devices/pci0000:00/0000:01:00.0/nvme/nvme0"
    (controller / "numa_node").write_text("1\n")
    (subsystem / "nvme0").symlink_to(controller)
    link(tmp_path, "259:5", subsystem / "nvme0n1")
    assert nodes(tmp_path, 5) == {1}


def test_a_drive_that_nobody_can_place_is_unknown(tmp_path: Path) -> None:
    drive(tmp_path, "nvme0n1", "-1", "259:0")
    assert nodes(tmp_path, 0) is None, "the kernel's -1"
    assert nodes(tmp_path, 7) is None, "no such device"
    assert blockdev.numa_nodes(os.makedev(0, 45), tmp_path) is None, "tmpfs"


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
