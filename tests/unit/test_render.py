"""slurm.conf, gres.conf and cgroup.conf from profiles, against values worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from render_samples import TWO, gpu, numa, profile

from crater_slurm.errors import CraterError, UsageError
from crater_slurm.lab import inventory
from crater_slurm.model.profile import Cpu, NodeProfile, NumaKind, NvLink, Nvme
from crater_slurm.slurm import node_gres, render
from crater_slurm.slurm.node_gres import Choices
from crater_slurm.slurm.published import features

SHARDS = Choices(shard_reserve=1)
ONE = Cpu(sockets=1, cores_per_socket=4)


def gres_lines(made: NodeProfile, choices: Choices = node_gres.PLAIN) -> list[str]:
    text = render.gres_conf([render.NodeGroup("n1", made)], choices)
    return [line for line in text.splitlines() if line.startswith("NodeName=")]


def test_gpus_of_two_types_and_of_none() -> None:
    gpus = (gpu(0), gpu(1, gres_type="l4"), gpu(2), gpu(3, gres_type=None))
    made = profile(numa(0, "0-3", 0), cpu=Cpu(sockets=1, cores_per_socket=4), gpus=gpus)
    assert node_gres.node_gres(made) == "gpu:a100:2,gpu:l4:1,gpu:1"
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
    assert node_gres.count_only(made) == {"membw": 280, "nviops": 800_000, "nvme": 1500}
    assert node_gres.count_only(replace(made, cache_gb=900))["nvme"] == 900
    half = replace(made, numa_nodes=(nodes[0], numa(1, "4-7", 1)), nvmes=())
    assert node_gres.count_only(half) == {}
    assert node_gres.node_gres(made, Choices(consume=("membw",))) == "membw:280"


def test_a_group_is_what_slurm_can_not_tell_apart() -> None:
    one = profile(numa(0, "0-3", 0), cpu=Cpu(sockets=1, cores_per_socket=4), memory_mib=1000)
    makes = [
        replace(one, name="n1"),
        replace(one, name="n2", cpu=replace(one.cpu, model="other name")),
        replace(one, name="m1", memory_mib=2000),
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


# --- sockets in the text


def test_the_word_for_slurmd_is_given_with_its_reason() -> None:
    nodes = [numa(i, f"{4 * i}-{4 * i + 3}", i // 2) for i in range(4)]
    made = profile(*nodes, cpu=Cpu(sockets=2, cores_per_socket=8))
    conf = render.SlurmConf(version=(24, 11), groups=[render.NodeGroup("n1", made)])
    lines = conf.render().splitlines()
    assert "SlurmdParameters=numa_node_as_socket" in lines
    assert lines[1].startswith("# n1: SlurmdParameters=numa_node_as_socket (Slurm 22.05 and later;")
    assert "a package holds 2 NUMA nodes" in lines[1]


def test_needs_that_exclude_each_other_need_slurm_25_11() -> None:
    nps2 = [numa(i, f"{4 * i}-{4 * i + 3}", i // 2) for i in range(4)]
    unequal = (numa(0, "0-1", 0), numa(1, "2-3", 0), numa(2, "4-7", 1))
    groups = [
        render.NodeGroup("a1", profile(*nps2, cpu=Cpu(sockets=2, cores_per_socket=8))),
        render.NodeGroup("b1", profile(*unequal, cpu=TWO)),
    ]
    with pytest.raises(UsageError, match="on a1 a NUMA node; b1 a package.*until Slurm 25.11"):
        render.SlurmConf(version=(24, 11), groups=groups).render()
    assert render.SlurmConf(version=(25, 11), groups=groups).node_lines() == [
        "NodeName=a1 Sockets=4 CoresPerSocket=4 ThreadsPerCore=1 Parameters=numa_node_as_socket",
        "NodeName=b1 Sockets=2 CoresPerSocket=4 ThreadsPerCore=1",
    ]


# --- shards


def test_each_card_has_a_line_with_its_own_count_and_the_waste_is_told() -> None:
    gpus = (gpu(0, memory_mib=40960, model="a100"), gpu(1, memory_mib=23034, model="l4"))
    made = profile(numa(0, "0-3", 0), cpu=ONE, gpus=gpus)
    assert node_gres.node_gres(made, SHARDS) == "gpu:a100:2,shard:61"
    assert node_gres.node_gres(made, Choices(shard_reserve=0)) == "gpu:a100:2,shard:63"
    assert gres_lines(made, SHARDS)[1:] == [
        "NodeName=n1 Name=shard Count=31 File=/dev/nvidia0",
        "NodeName=n1 Name=shard Count=30 File=/dev/nvidia1",
    ]
    text = render.gres_conf([render.NodeGroup("n1", made)], SHARDS)
    assert (
        "# Shards of l4: 23034 MiB = 31 slices of 720 MiB, 1 kept back (720 MiB, 3.1 %), 30 usable; "
        "714 MiB, 3.1 % lost to rounding." in text.splitlines()
    )
    groups = [render.NodeGroup("n1", made)]
    assert render.gres_types(groups, SHARDS) == ["gpu", "shard"]
    assert "shard" not in render.gres_conf(groups)


@pytest.mark.parametrize(
    ("memory_mib", "sentence"), [(None, "is not known"), (600, "has no slice left for jobs")]
)
def test_a_card_that_can_not_be_cut_is_refused(memory_mib: int | None, sentence: str) -> None:
    made = profile(numa(0, "0-3", 0), cpu=ONE, gpus=(gpu(0, memory_mib=memory_mib),))
    with pytest.raises(UsageError, match=sentence):
        node_gres.node_gres(made, SHARDS)


# --- memory


@pytest.mark.parametrize(
    ("memory_mib", "expected"),
    [
        (515072, 512256),  # 2575 off is 512497, and 2001 x 256 below that
        (16000, 15616),  # 256 off is 15744, and 61 x 256 below that
        (300, None),
        (None, None),
    ],
)
def test_real_memory_stays_below_what_slurmd_counts(
    memory_mib: int | None, expected: int | None
) -> None:
    made = profile(numa(0, "0-3", 0), cpu=ONE, memory_mib=memory_mib)
    assert render.real_memory_mib(made, margin=True) == expected
    assert render.real_memory_mib(made, margin=False) == memory_mib


def test_the_memory_of_a_gpu_is_no_job_s() -> None:
    """Grace Hopper: the kernel counts 96 GiB of the GPU's memory while its driver is loaded."""
    nodes = (numa(0, "0-3", 0), numa(1, "", memory_mib=98304, kind=NumaKind.GPU_MEMORY))
    made = profile(*nodes, cpu=ONE, memory_mib=98304 + 491520)
    assert render.real_memory_mib(made, margin=False) == 491520


# --- features


def test_features_are_what_no_job_uses_up() -> None:
    cpu = replace(ONE, avx=frozenset({"avx", "avx2", "avx512f", "avx512vl"}))
    drives = (Nvme(name="a", read_latency_us=82.0), Nvme(name="b", read_latency_us=165.0))
    gpus = (gpu(0, model="l4", compute_capability="8.9"), gpu(1, model="l4"))
    made = profile(numa(0, "0-3", 0), cpu=cpu, gpus=gpus, nvmes=drives)
    assert features(made) == ["avx", "avx2", "avx512", "gpu_l4", "cc8.9", "nvme_200us"]
    assert features(replace(made, nvmes=drives[:1]))[-2:] == ["nvme_100us", "nvme_200us"]
    unknown = (*drives, Nvme(name="c"))
    assert features(replace(made, nvmes=unknown))[-1] == "cc8.9"
    assert features(profile(numa(0, "0-3", 0), cpu=ONE)) == []


# --- what can't be written


def test_mig_instances_and_other_vendors_are_refused_with_what_to_do() -> None:
    plain = profile(numa(0, "0-3", 0), cpu=ONE, gpus=(gpu(0), gpu(1)))
    assert node_gres.unwritable(plain) is None
    mig = replace(plain, gpus=(gpu(0, mig_instances=("1g.5gb",)), gpu(1)))
    assert "n1: GPU 0 is cut into MIG instances" in str(node_gres.unwritable(mig))
    assert "AutoDetect=nvml" in str(node_gres.unwritable(mig))
    amd = replace(plain, gpus=(gpu(0, compute_capability="gfx90a"),))
    assert "AutoDetect=rsmi" in str(node_gres.unwritable(amd))


HOSTILE = ["n1\nNodeName=evil", "n1 Gres=gpu:99", "n1=x", "n1#", 'n"1', "n1,n2", "n[1-9]", "", "é"]


@pytest.mark.parametrize("name", [*HOSTILE, "DEFAULT", "default", "ALL"])
def test_a_node_s_name_can_not_become_a_line(name: str) -> None:
    made = profile(numa(0, "0-3", 0), cpu=ONE, name=name)
    with pytest.raises(UsageError, match="in Slurm's configuration|can't be named"):
        render.group([made])


@pytest.mark.parametrize("text", [*HOSTILE, "a:b"])
def test_a_gres_type_or_a_model_can_not_become_a_word(text: str) -> None:
    made = profile(numa(0, "0-3", 0), cpu=ONE, gpus=(gpu(0, gres_type=text),))
    with pytest.raises(UsageError, match="can't be a gres type"):
        node_gres.node_gres(made)
    with pytest.raises(UsageError, match="can't be a gres type"):
        gres_lines(made)
    if text != "":  # behind "gpu_" nothing is a name too
        with pytest.raises(UsageError, match="can't be a feature"):
            features(replace(made, gpus=(gpu(0, model=text),)))


@pytest.mark.parametrize("text", HOSTILE[:5])
def test_no_other_word_can_become_two(text: str) -> None:
    one = profile(numa(0, "0-3", 0), cpu=ONE, gpus=(gpu(0),))
    for group in (render.NodeGroup(text, one), render.NodeGroup("n1", one, {"Port": text})):
        with pytest.raises(UsageError, match="can't stand in Slurm's configuration"):
            render.SlurmConf(version=(24, 11), groups=[group]).render()


def test_a_model_in_a_comment_stays_in_its_line() -> None:
    made = profile(
        numa(0, "0-3", 0), cpu=ONE, gpus=(gpu(0, model="x\nName=gpu\u2028y", memory_mib=40960),)
    )
    text = render.gres_conf([render.NodeGroup("n1", made)], SHARDS)
    assert [line for line in text.splitlines() if line.startswith("Name=")] == []
    assert "# Shards of x Name=gpu y: 40960 MiB" in text


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
