"""slurm.conf, gres.conf and cgroup.conf from profiles, against values worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from crater_slurm.errors import CraterError
from crater_slurm.lab import inventory
from crater_slurm.model.cpuset import parse_cpulist
from crater_slurm.model.profile import Cpu, Gpu, NodeProfile, NumaNode, NvLink, Nvme
from crater_slurm.slurm import render


def numa(number: int, cpus: str, socket: int | None = None, **more: Any) -> NumaNode:
    return NumaNode(id=number, cpus=parse_cpulist(cpus), socket=socket, **more)


def profile(*nodes: NumaNode, cpu: Cpu, gpus: tuple[Gpu, ...] = (), **more: Any) -> NodeProfile:
    return NodeProfile(name="n1", cpu=cpu, numa_nodes=nodes, gpus=gpus, **more)


def gpu(index: int, numa_node: int | None = None, **more: Any) -> Gpu:
    return Gpu(
        **{"index": index, "model": "m", "gres_type": "a100", "numa_node": numa_node, **more}
    )


def gres_lines(made: NodeProfile) -> list[str]:
    text = render.gres_conf([render.NodeGroup("n1", made)])
    return [line for line in text.splitlines() if line.startswith("NodeName=")]


TWO = Cpu(sockets=2, cores_per_socket=4)


def test_packages_are_sockets_when_each_holds_one_numa_node() -> None:
    made = profile(numa(0, "0-3", 0), numa(1, "4-7", 1), cpu=TWO, gpus=(gpu(0, 1), gpu(1, 0)))
    form = render.layout(made)
    assert (form.sockets, form.cores_per_socket, form.numa_as_socket) == (2, 4, False)
    assert gres_lines(made) == [
        "NodeName=n1 Name=gpu Type=a100 File=/dev/nvidia0 Cores=4-7",
        "NodeName=n1 Name=gpu Type=a100 File=/dev/nvidia1 Cores=0-3",
    ]


def test_numa_nodes_are_sockets_when_a_package_holds_several() -> None:
    nodes = [numa(i, f"{4 * i}-{4 * i + 3}", i // 2) for i in range(4)]
    cpu = Cpu(sockets=2, cores_per_socket=8)
    made = profile(*nodes, cpu=cpu, gpus=(gpu(0, 3), gpu(1, 3), gpu(2, 1)))
    form = render.layout(made)
    assert (form.sockets, form.cores_per_socket, form.numa_as_socket) == (4, 4, True)
    assert [line.split()[-1] for line in gres_lines(made)] == ["Cores=12-15", "Cores=4-7"]
    conf = render.SlurmConf(version=(24, 11), groups=[render.NodeGroup("n1", made)]).render()
    assert "SlurmdParameters=numa_node_as_socket" in conf.splitlines()


def test_cores_are_counted_in_hwlocs_order_not_by_cpu_number() -> None:
    # Packages that take CPU numbers in turn; the kernel's NUMA node 0 has the second package.
    odd, even = numa(0, "1,3,5,7", 1), numa(1, "0,2,4,6", 0)
    made = profile(odd, even, cpu=TWO, gpus=(gpu(0, 0),))
    assert gres_lines(made)[0].endswith("Cores=4-7")


def test_hardware_threads_do_not_count_as_cores() -> None:
    cpu = Cpu(sockets=1, cores_per_socket=8, threads_per_core=2)
    made = profile(numa(0, "0-3,8-11", 0), numa(1, "4-7,12-15", 0), cpu=cpu, gpus=(gpu(0, 1),))
    form = render.layout(made)
    assert (form.sockets, form.cores_per_socket, form.threads_per_core) == (2, 4, 2)
    assert gres_lines(made)[0].endswith("Cores=4-7")


def test_unequal_numa_nodes_can_not_be_sockets() -> None:
    nodes = (numa(0, "0-1", 0), numa(1, "2-3", 0), numa(2, "4-7", 1))
    made = profile(*nodes, cpu=TWO, gpus=(gpu(0, 1), gpu(1, 2)))
    form = render.layout(made)
    assert (form.sockets, form.numa_as_socket) == (2, False)
    assert [line.split()[-1] for line in gres_lines(made)] == ["Cores=0-3", "Cores=4-7"]


@pytest.mark.parametrize(
    "made",
    [
        profile(numa(0, "0-7"), cpu=TWO, gpus=(gpu(0, 0),)),
        profile(numa(0, "0-3", 0), cpu=Cpu(sockets=1, cores_per_socket=4), gpus=(gpu(0, 0),)),
        profile(numa(0, "0-3", 0), numa(1, "4-7", 1), cpu=TWO, gpus=(gpu(0, None),)),
    ],
    ids=["one NUMA node over two packages", "one package", "GPU of unknown place"],
)
def test_no_cores_are_named_where_none_are_nearer(made: NodeProfile) -> None:
    assert gres_lines(made) == ["NodeName=n1 Name=gpu Type=a100 File=/dev/nvidia0"]


def test_a_gpu_on_a_numa_node_without_cpus_takes_the_nearest_with_some() -> None:
    nodes = (
        numa(0, "0-3", 0, distances=(10, 20, 80)),
        numa(1, "4-7", 1, distances=(20, 10, 40)),
        numa(2, "", None, distances=(80, 40, 10)),
    )
    assert gres_lines(profile(*nodes, cpu=TWO, gpus=(gpu(0, 2),)))[0].endswith("Cores=4-7")


def test_gpus_of_two_types_and_of_none() -> None:
    gpus = (gpu(0), gpu(1, gres_type="l4"), gpu(2), gpu(3, gres_type=None))
    made = profile(numa(0, "0-3", 0), cpu=Cpu(sockets=1, cores_per_socket=4), gpus=gpus)
    assert render.node_gres(made) == "gpu:a100:2,gpu:l4:1,gpu:1"
    assert [line.split(" ", 2)[2] for line in gres_lines(made)] == [
        "Type=a100 File=/dev/nvidia0",
        "Type=l4 File=/dev/nvidia1",
        "Type=a100 File=/dev/nvidia2",
        "File=/dev/nvidia3",
    ]


def test_links_are_written_only_where_they_tell_pairs_apart() -> None:
    def linked(pairs: dict[int, dict[int, float]]) -> NodeProfile:
        gpus = tuple(
            gpu(i, nvlinks=tuple(NvLink(peer, width) for peer, width in row.items()))
            for i, row in pairs.items()
        )
        return profile(numa(0, "0-3", 0), cpu=Cpu(sockets=1, cores_per_socket=4), gpus=gpus)

    bridges = {0: {1: 200.0, 2: 100.0}, 1: {0: 200.0}, 2: {0: 100.0}}
    links = [line.split()[-1] for line in gres_lines(linked(bridges))]
    assert links == ["Links=-1,2,1", "Links=2,-1,0", "Links=1,0,-1"]
    switched = {i: {j: 600.0 for j in range(3) if j != i} for i in range(3)}
    assert "Links" not in gres_lines(linked(switched))[0]


def test_what_jobs_consume_is_rounded_down_and_unknown_is_left_out() -> None:
    # 142.3 + 137.7 is 280 on paper, and a little less in floating point.
    nodes = (
        numa(0, "0-3", 0, memory_bandwidth_gb_s=142.3),
        numa(1, "4-7", 1, memory_bandwidth_gb_s=137.7),
    )
    drives = (
        Nvme(name="nvme0n1", size_gb=1000, random_read_iops=800_000),
        Nvme(name="nvme1n1", size_gb=500),
    )
    made = profile(*nodes, cpu=TWO, nvmes=drives)
    assert render.count_only(made) == {"membw": 280, "nviops": 800_000, "nvme": 1500}
    assert render.count_only(replace(made, cache_gb=900))["nvme"] == 900
    half = replace(made, numa_nodes=(nodes[0], numa(1, "4-7", 1)), nvmes=())
    assert render.count_only(half) == {}
    assert render.node_gres(made, consume=("membw",)) == "membw:280"


def test_a_group_is_what_slurm_can_not_tell_apart() -> None:
    one = profile(numa(0, "0-3", 0), cpu=Cpu(sockets=1, cores_per_socket=4), memory_mib=1000)
    makes = [
        render.named(one, "n1"),
        render.named(replace(one, cpu=replace(one.cpu, model="other name")), "n2"),
        render.named(replace(one, memory_mib=2000), "m1"),
    ]
    assert [made.names for made in render.group(makes)] == ["n[1-2]", "m1"]


def test_the_whole_of_a_mixed_cluster() -> None:
    groups = [
        render.NodeGroup(entry.hostlist, entry.profile) for entry in inventory.load("demo").entries
    ]
    conf = render.SlurmConf(
        version=(22, 5),
        groups=groups,
        slurmd_parameters=("config_overrides",),
        settings={"JobSubmitPlugins": "lua"},
    ).render()
    lines = [line for line in conf.splitlines() if line and not line.startswith("#")]
    assert lines[:3] == [
        "GresTypes=gpu,membw,nviops,nvme",
        "SlurmdParameters=config_overrides,numa_node_as_socket",
        "JobSubmitPlugins=lua",
    ]
    assert lines[3] == (
        "NodeName=a[1-2] Sockets=2 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=515072 "
        "Gres=gpu:a100:8,membw:280,nviops:850000,nvme:3500"
    )
    gres = render.gres_conf(groups).splitlines()
    assert "NodeName=e1 Name=gpu Type=a100_80gb File=/dev/nvidia[0-1] Cores=48-63" in gres
    assert "NodeName=c1 Name=membw Count=720 Flags=CountOnly" in gres
    assert "AutoDetect=off" in gres


def test_one_make_everywhere_needs_no_names() -> None:
    made = profile(numa(0, "0-3", 0), cpu=Cpu(sockets=1, cores_per_socket=4), gpus=(gpu(0),))
    text = render.gres_conf([render.NodeGroup("n[1-9]", made)], everywhere=True)
    assert text.splitlines()[-1] == "Name=gpu Type=a100 File=/dev/nvidia0"


@pytest.mark.parametrize(
    ("version", "arguments", "expected"),
    [
        ((22, 5), {}, ["CgroupPlugin=autodetect"]),
        ((22, 5), {"hierarchy": "none"}, ["CgroupPlugin=autodetect"]),
        ((24, 11), {"hierarchy": "none"}, ["CgroupPlugin=disabled"]),
        ((24, 11), {"hierarchy": "v1", "systemd": False}, ["CgroupPlugin=cgroup/v1"]),
        (
            (22, 5),
            {"hierarchy": "v2", "systemd": False},
            ["CgroupPlugin=cgroup/v2", "IgnoreSystemd=yes"],
        ),
        (
            (26, 5),
            {"hierarchy": "v2", "systemd": False, "memory": False},
            ["CgroupPlugin=cgroup/v2", "IgnoreSystemd=yes", "EnableControllers=yes"],
        ),
    ],
)
def test_cgroup_conf(
    version: tuple[int, int], arguments: dict[str, Any], expected: list[str]
) -> None:
    lines = render.cgroup_conf(version, **arguments).splitlines()[1:]
    constraints = []
    if arguments.get("hierarchy") != "none":
        memory = "yes" if arguments.get("memory", True) else "no"
        constraints = ["ConstrainCores=yes", "ConstrainDevices=yes", f"ConstrainRAMSpace={memory}"]
    assert lines == expected + constraints


def test_a_missing_variable_is_an_error() -> None:
    with pytest.raises(Exception, match="is undefined"):
        render.template("gres.conf.j2")


def test_share_folders_are_found_and_missed(tmp_path: Any, monkeypatch: Any) -> None:
    from crater_slurm import paths

    assert (paths.share("templates") / "gres.conf.j2").is_file()
    assert (paths.hooks() / "frame.py").is_file()
    package = tmp_path / "crater_slurm"
    (package / "share" / "etc").mkdir(parents=True)
    monkeypatch.setattr(paths, "PACKAGE", package)
    assert paths.share("etc") == package / "share" / "etc"
    with pytest.raises(CraterError, match="lacks its prolog folder"):
        paths.share("prolog")
