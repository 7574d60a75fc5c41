"""NUMA nodes and what a process may use of a machine, on trees written here."""

from __future__ import annotations

from pathlib import Path

import pytest
from probe_trees import two_sockets, write

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import NumaKind
from crater_slurm.probe.limits import Limits
from crater_slurm.probe.profile import Scan, scan

NODE = "sys/devices/system/node"
EVERYTHING = Limits(cpus=(0, 1, 2, 3, 4, 5, 6), memory_nodes=(0, 1))


def test_a_kernel_without_numa_shows_one_node_with_all_memory(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"sys/devices/system/cpu/online": "0-1", "proc/meminfo": "MemTotal:  2097152 kB"},
    )
    (node,) = scan("n1", tmp_path).profile.numa_nodes
    assert (node.id, node.cpus, node.memory_mib) == (0, (0, 1), 2048)
    assert node.kind is NumaKind.CPU


def test_distances_of_sparse_nodes_have_one_entry_per_online_node(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    write(
        tmp_path,
        {
            f"{NODE}/online": "0-1,8",
            f"{NODE}/node0/distance": "10 21 31",
            f"{NODE}/node1/distance": "21 10 32",
            f"{NODE}/node8/distance": "31 32 10",
            f"{NODE}/node8/cpulist": "",
            f"{NODE}/node8/meminfo": "Node 8 MemTotal:  1048576 kB",
        },
    )
    nodes = scan("n1", tmp_path).profile.numa_nodes
    assert [(n.id, n.distances) for n in nodes] == [
        (0, (10, 21, 31)),
        (1, (21, 10, 32)),
        (8, (31, 32, 10)),
    ]
    assert (nodes[2].kind, nodes[2].cpus, nodes[2].socket) == (NumaKind.MEMORY, (), None)


def test_gpu_memory_is_told_by_the_driver_and_a_node_with_nothing_has_no_kind(
    tmp_path: Path,
) -> None:
    two_sockets(tmp_path)
    for node, memory_kib in ((2, 1048576), (3, 0)):
        write(
            tmp_path,
            {
                f"{NODE}/node{node}/cpulist": "",
                f"{NODE}/node{node}/meminfo": f"Node {node} MemTotal:  {memory_kib} kB",
            },
        )
    gpu = "proc/driver/nvidia/gpus/0000:01:00.0/numa_status"
    write(tmp_path, {gpu: "Node:      2\nStatus:    online"})
    kinds = [n.kind for n in scan("n1", tmp_path).profile.numa_nodes]
    assert kinds == [NumaKind.CPU, NumaKind.CPU, NumaKind.GPU_MEMORY, None]


def test_firmware_figures_are_those_from_the_nearest_cpus(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    for access, mib_s, latency_ns in (("access0", 400000, 8), ("access1", 131072, 26)):
        base = f"{NODE}/node0/{access}/initiators"
        write(
            tmp_path,
            {f"{base}/read_bandwidth": str(mib_s), f"{base}/read_latency": str(latency_ns)},
        )
    first, second = scan("n1", tmp_path).profile.numa_nodes
    assert first.firmware_bandwidth_gb_s == 137.439  # 131072 MiB/s
    assert first.firmware_latency_ns == 26
    assert (second.firmware_bandwidth_gb_s, second.firmware_latency_ns) == (None, None)


def test_a_node_that_claims_the_cpus_of_another_is_left_out(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    write(tmp_path, {f"{NODE}/node1/cpulist": "1-3,6-7"})
    found = scan("n1", tmp_path)
    assert [(n.id, n.distances) for n in found.profile.numa_nodes] == [(0, (10,))]
    assert "NUMA node 1 claims CPUs of an earlier node and is left out" in found.notes
    assert "CPUs 2-3,6 belong to no NUMA node that is online" in found.notes


def test_a_damaged_row_leaves_no_distances(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    write(tmp_path, {f"{NODE}/node1/distance": "21"})
    found = scan("n1", tmp_path)
    assert [n.distances for n in found.profile.numa_nodes] == [(), ()]
    assert any("distances of NUMA node 1" in note for note in found.notes)


@pytest.mark.parametrize("text", ["0-99999999999", "0-65535," * 9000, "1-0", "\udc80"])
def test_a_cpulist_beyond_all_machines_is_one_sentence(text: str, tmp_path: Path) -> None:
    two_sockets(tmp_path)
    (tmp_path / NODE / "node0/cpulist").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CraterError, match="node0/cpulist can't be read"):
        scan("n1", tmp_path)


# --- limits


def limited(root: Path, files: dict[str, str]) -> Scan:
    two_sockets(root)
    write(root, files)
    return scan("n1", root)


def test_without_a_cgroup_everything_may_be_used(tmp_path: Path) -> None:
    assert limited(tmp_path, {}).limits == EVERYTHING


def test_cgroup_v2_limits_by_the_nearest_group_that_has_the_controller(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    found = limited(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/job/step",
            "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0",
            f"{base}/cpuset.cpus.effective": "0-7",
            f"{base}/cpuset.mems.effective": "0-1",
            f"{base}/system.slice/job/cpuset.cpus.effective": "2-3,7",
            f"{base}/system.slice/job/cpuset.mems.effective": "1",
            f"{base}/system.slice/job/step/memory.max": "max",
            f"{base}/system.slice/job/memory.max": "2147483648",
        },
    )
    assert found.limits == Limits(cpus=(2, 3), memory_nodes=(1,), memory_limit_mib=2048)
    assert set(found.notes) >= {
        "this process may use CPUs 2-3 of 0-6 by its cgroup; the profile lists all",
        "this process may use memory nodes 1 of 0-1 by its cgroup; the profile lists all",
        "this process may use 2048 MiB of memory by its cgroup",
    }
    assert sum(len(n.cpus) for n in found.profile.numa_nodes) == 7


def test_cgroup_v1_limits_by_its_cpuset_and_memory_controllers(tmp_path: Path) -> None:
    found = limited(
        tmp_path,
        {
            "proc/self/cgroup": "9:memory:/m\n7:cpu,cpuset:/job",
            "proc/mounts": "cgroup /cg/cpuset cgroup rw,cpu,cpuset 0 0\n"
            "cgroup /cg/memory cgroup rw,memory 0 0",
            "cg/cpuset/job/cpuset.cpus": "0-3",
            "cg/cpuset/job/cpuset.mems": "0-1",
            "cg/memory/m/memory.limit_in_bytes": "1073741824",
            "cg/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert found.limits == Limits(cpus=(0, 1, 2, 3), memory_nodes=(0, 1), memory_limit_mib=1024)


@pytest.mark.parametrize(
    "mount", ["none /c cpuset rw 0 0", "none /c cgroup rw,cpuset,noprefix 0 0"]
)
def test_a_cpuset_file_system_limits_by_short_names(mount: str, tmp_path: Path) -> None:
    found = limited(
        tmp_path,
        {
            "proc/self/cpuset": "/batch",
            "proc/mounts": mount,
            "c/batch/cpus": "4-6",
            "c/batch/mems": "0",
        },
    )
    assert found.limits == Limits(cpus=(4, 5, 6), memory_nodes=(0,))


def test_a_cgroup_path_can_not_leave_the_root(tmp_path: Path) -> None:
    write(tmp_path, {"out/cpus": "0", "out/mems": "0"})
    found = limited(
        tmp_path / "machine",
        {
            "proc/self/cpuset": "/../../out",
            "proc/mounts": "none /../../../c cpuset rw 0 0",
            "c/cpus": "1-2",
            "c/mems": "0-1",
        },
    )
    assert found.limits.cpus == (1, 2)
