"""The live configuration against what profiles render: what is a difference, and what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from render_samples import gpu, machines, numa, profile

from crater_slurm.errors import SlurmError
from crater_slurm.model.profile import Cpu, NodeProfile, NvLink, Nvme
from crater_slurm.slurm import conf_check, conf_text, gres_check, render
from crater_slurm.slurm.conf_check import Finding
from crater_slurm.slurm.layout import SocketUnit
from crater_slurm.slurm.node_gres import Choices

CHOICES = Choices(shard_reserve=1, features=True, memory_margin=True)


def eight_gpus() -> NodeProfile:
    """Two packages of two NUMA nodes, 64 cores in all, eight A100 beside every second node."""
    nodes = [
        numa(
            i,
            f"{16 * i}-{16 * i + 15},{64 + 16 * i}-{79 + 16 * i}",
            i // 2,
            memory_bandwidth_gb_s=70.0,
        )
        for i in range(4)
    ]
    cpu = Cpu(sockets=2, cores_per_socket=32, threads_per_core=2, avx=frozenset({"avx", "avx2"}))
    gpus = tuple(gpu(i, 1 if i < 4 else 3, memory_mib=40960, model="a100") for i in range(8))
    drives = (Nvme(name="nvme0n1", size_gb=1000, random_read_iops=800_000),)
    return profile(*nodes, cpu=cpu, gpus=gpus, nvmes=drives, memory_mib=515072)


MADE = eight_gpus()
NAMES = ("g1", "g2", "g3")
#: As it is rendered: four sockets of 16 cores, NUMA nodes 1 and 3 are cores 16-31 and 48-63.
SLURM = """
GresTypes=gpu,shard,membw,nviops,nvme
SlurmdParameters=numa_node_as_socket
NodeName=g[1-3] Sockets=4 CoresPerSocket=16 ThreadsPerCore=2 RealMemory=512256 \
Gres=gpu:a100:8,shard:248,membw:280,nviops:800000,nvme:1000 Feature=avx,avx2,gpu_a100
"""
GRES = "\n".join(
    [
        "NodeName=g[1-3] Name=gpu Type=a100 File=/dev/nvidia[0-3] Cores=16-31",
        "NodeName=g[1-3] Name=gpu Type=a100 File=/dev/nvidia[4-7] Cores=48-63",
        *(f"NodeName=g[1-3] Name=shard Count=31 File=/dev/nvidia{i}" for i in range(8)),
        "NodeName=g[1-3] Name=membw Count=280 Flags=CountOnly",
        "NodeName=g[1-3] Name=nviops Count=800000 Flags=CountOnly",
        "NodeName=g[1-3] Name=nvme Count=1000 Flags=CountOnly",
    ]
)


def compare(
    slurm: str = SLURM,
    gres: str = GRES,
    made: NodeProfile = MADE,
    choices: Choices = CHOICES,
    version: tuple[int, int] = (24, 11),
) -> list[tuple[str, Finding]]:
    """Differences of all three nodes, gathered."""
    profiles = {name: replace(made, name=name) for name in NAMES}
    groups = render.group(profiles.values(), choices)
    rendered = render.SlurmConf(version=version, groups=groups, choices=choices).render()
    ours, live = conf_text.parse(rendered), conf_text.parse(slurm)
    our_gres = conf_text.parse(render.gres_conf(groups, choices))
    found = [
        *conf_check.check_cluster(live, ours),
        *conf_check.check_nodes(live, ours, profiles),
        *gres_check.check_gres(conf_text.parse(gres), our_gres, profiles),
    ]
    return [(item.nodes, item.finding) for item in conf_check.gather(found)]


def the_one(found: list[tuple[str, Finding]]) -> tuple[str, str, str | None, str | None, str]:
    """Nodes, key, live value, the profile's and the meaning of the only difference."""
    assert len(found) == 1, found
    nodes, finding = found[0]
    return nodes, finding.key, finding.live, finding.profile, finding.meaning


def test_the_samples_are_what_is_rendered() -> None:
    assert compare() == []


@pytest.mark.parametrize(
    ("slurm", "gres"),
    [
        (
            "grestypes=nvme,GPU,membw,nviops,shard,bandwidth\nSLURMDPARAMETERS=Numa_Node_As_Socket\n"
            "NodeName=DEFAULT Boards=1 SocketsPerBoard=4 CoresPerSocket=16 ThreadsPerCore=2\n"
            "nodename=g1,g[2-3] realmemory=512256 Weight=5 Features=own,gpu_a100,avx2,avx "
            "gres=nvme:1000,nviops:800000,membw:280,shard:248,gpu:A100:8,tmp:3\n",
            GRES,
        ),
        (SLURM.replace("Sockets=4 ", "CPUs=128 "), GRES),
        (SLURM.replace("RealMemory=512256", "RealMemory=515072"), GRES),
        (SLURM.replace("RealMemory=512256", "RealMemory=490000"), GRES),
        (SLURM, GRES.replace("nvidia[4-7]", "nvidia4,/dev/nvidia[5-7]").replace("Cores", "CPUs")),
        (SLURM, GRES.replace("NodeName=g[1-3] ", "")),
        (SLURM, GRES.replace("Cores=16-31", "Cores=16-20,21-31 Links=-1,2,2,2,2,2,2,2")),
        (
            SLURM,
            "\n".join(
                [
                    *GRES.splitlines()[:2],
                    "NodeName=g[1-3] Name=shard Count=248",
                    *GRES.splitlines()[-3:],
                ]
            ),
        ),
    ],
    ids=[
        *("order, case, defaults", "sockets inferred", "no margin", "a little for the system"),
        *("files listed", "no names", "ranges and even links", "one line of shards"),
    ],
)
def test_spelling_is_no_difference(slurm: str, gres: str) -> None:
    assert compare(slurm, gres) == []


@pytest.mark.parametrize(
    ("old", "new", "key", "live", "wanted", "meaning"),
    [
        ("gpu:a100:8", "gpu:a100:7", "Gres gpu", "gpu:a100:7", "gpu:a100:8", "1 of 8"),
        ("gpu:a100:8", "gpu:a100:9", "Gres gpu", "gpu:a100:9", "gpu:a100:8", "out of service"),
        ("gpu:a100:8", "gpu:8", "Gres gpu", "gpu:8", "gpu:a100:8", "the profile's type"),
        (",membw:280", "", "Gres membw", None, "membw:280", "are given the same"),
        ("membw:280", "membw:300", "Gres membw", "membw:300", "membw:280", "promised more"),
        ("shard:248", "shard:256", "Gres shard", "shard:256", "shard:248", "out of service"),
        ("512256", "600000", "RealMemory", "600000", "512256", "counts 515072 MiB"),
        ("512256", "100000", "RealMemory", "100000", "512256", "412256 MiB are no job's"),
        (",gpu_a100", "", "Feature", "avx,avx2", "gpu_a100", "--constraint"),
        ("ThreadsPerCore=2", "ThreadsPerCore=1", "ThreadsPerCore", "1", "2", "no job's"),
        ("ThreadsPerCore=2", "ThreadsPerCore=4", "ThreadsPerCore", "4", "2", "out of service"),
        (
            *("numa_node_as_socket", "config_overrides", "SlurmdParameters", "config_overrides"),
            *("numa_node_as_socket", "slurmd takes a package for a socket"),
        ),
        (
            *("gpu,shard,", "gpu,", "GresTypes", "gpu,membw,nviops,nvme"),
            *("gpu,shard,membw,nviops,nvme", "refuses shard"),
        ),
    ],
)
def test_a_difference_in_slurm_conf_is_told_with_what_it_means(
    old: str, new: str, key: str, live: str | None, wanted: str, meaning: str
) -> None:
    found = the_one(compare(SLURM.replace(old, new)))
    assert found[:4] == ("" if key == "GresTypes" else "g[1-3]", key, live, wanted)
    assert meaning in found[4]


@pytest.mark.parametrize(
    ("old", "new", "key", "live", "wanted", "meaning"),
    [
        (
            *("Cores=48-63", "Cores=48-63,112-127", "Cores of /dev/nvidia[4-7]", "48-63,112-127"),
            *("48-63", "CPU numbers of the kernel"),
        ),
        ("Cores=48-63", "Cores=48-60", "Cores of /dev/nvidia[4-7]", "48-60", "48-63", "not whole"),
        ("Cores=48-63", "Cores=0-15", "Cores of /dev/nvidia[4-7]", "0-15", "48-63", "nearest"),
        (" Cores=48-63", "", "Cores of /dev/nvidia[4-7]", None, "48-63", "does not know"),
        ("nvidia[4-7]", "nvidia[4-6]", "gpu File", None, "/dev/nvidia7", "1 of 8 GPUs"),
        ("nvidia[4-7]", "nvidia[4-8]", "gpu File", "/dev/nvidia8", None, "no such GPU"),
        (
            *("Type=a100 File=/dev/nvidia[0-3]", "Type=h100 File=/dev/nvidia[0-3]"),
            *("Type of /dev/nvidia[0-3]", "h100", "a100", "the profile's type"),
        ),
        ("membw Count=280", "membw Count=1K", "membw Count", "1024", "280", "keep both alike"),
        (
            *("Count=31 File=/dev/nvidia7", "Count=32 File=/dev/nvidia7", "shard Count"),
            *("31 on /dev/nvidia[0-6]; 32 on /dev/nvidia7", "31 on /dev/nvidia[0-7]", "its memory"),
        ),
    ],
)
def test_a_difference_in_gres_conf_is_told_with_what_it_means(
    old: str, new: str, key: str, live: str | None, wanted: str | None, meaning: str
) -> None:
    found = the_one(compare(gres=GRES.replace(old, new)))
    assert found[:4] == ("g[1-3]", key, live, wanted)
    assert meaning in found[4]


def test_sockets_of_another_kind_are_named() -> None:
    """Packages where NUMA nodes should be: two keys differ, and the word for slurmd."""
    live = SLURM.replace("Sockets=4 CoresPerSocket=16", "Sockets=2 CoresPerSocket=32")
    found = compare(live)
    assert [(f.key, f.live, f.profile) for _, f in found] == [
        ("Sockets", "2", "4"),
        ("CoresPerSocket", "32", "16"),
    ]
    assert "each package is a socket here, where it should be each NUMA node" in found[0][1].meaning


def test_with_both_words_slurm_takes_l3_caches() -> None:
    nodes = conf_text.parse(SLURM.replace("numa_node", "l3cache_as_socket,numa_node"))
    assert conf_check._unit(nodes, {}) is SocketUnit.L3


def test_a_word_on_the_node_s_own_line_counts_too() -> None:
    live = SLURM.replace("SlurmdParameters=numa_node_as_socket\n", "")
    assert compare(live.replace("RealMemory", "Parameters=numa_node_as_socket RealMemory")) == []


def test_a_node_that_slurm_does_not_know() -> None:
    found = compare(SLURM.replace("g[1-3]", "g[1-2]"))
    assert the_one(found)[:4] == ("g3", "NodeName", None, "g3")


def test_each_node_has_its_own_differences() -> None:
    first, rest = SLURM.replace("g[1-3]", "g1"), SLURM.splitlines()[-1].replace("g[1-3]", "g[2-3]")
    found = compare(first + rest.replace("gpu:a100:8", "gpu:a100:6"))
    assert the_one(found)[:3] == ("g[2-3]", "Gres gpu", "gpu:a100:6")


def test_gpus_that_slurm_finds_itself_are_left_to_it() -> None:
    lines = "\n".join(["NodeName=g[1-3] AutoDetect=nvml", *GRES.splitlines()[2:]])
    assert compare(gres=lines) == []
    assert gres_check.detected(conf_text.parse(lines), list(NAMES)) == list(NAMES)
    assert gres_check.detected(conf_text.parse("AutoDetect=nvml\n" + lines), ["other"]) == ["other"]
    assert gres_check.detected(conf_text.parse(GRES), list(NAMES)) == []


def test_links_that_tell_pairs_apart_are_compared() -> None:
    pair = replace(MADE, gpus=(MADE.gpus[0], MADE.gpus[1], MADE.gpus[2]))
    linked = replace(
        pair,
        gpus=(
            replace(pair.gpus[0], nvlinks=(NvLink(1, 200.0),)),
            replace(pair.gpus[1], nvlinks=(NvLink(0, 200.0),)),
            pair.gpus[2],
        ),
    )
    groups = render.group([replace(linked, name=name) for name in NAMES], CHOICES)
    live = render.gres_conf(groups, CHOICES)
    slurm = SLURM.replace("gpu:a100:8", "gpu:a100:3").replace("shard:248", "shard:93")
    assert compare(slurm, live, linked) == []
    found = compare(slurm, live.replace(" Links=-1,1,0", ""), linked)
    assert the_one(found)[:4] == ("g[1-3]", "Links of /dev/nvidia0", None, "-1,1,0")


@settings(deadline=None)  # the machine may be busy
@given(machines(), st.sampled_from([(22, 5), (24, 11), (26, 5)]), st.booleans())
def test_what_is_rendered_is_no_difference(
    made: NodeProfile, version: tuple[int, int], features: bool
) -> None:
    choices = replace(CHOICES, features=features, shard_reserve=None)
    groups = render.group([replace(made, name=name) for name in NAMES], choices)
    slurm = render.SlurmConf(version=version, groups=groups, choices=choices).render()
    gres = render.gres_conf(groups, choices)
    assert compare(slurm, gres, made, choices, version) == []
    shape = conf_check._shape(conf_text.parse(slurm).nodes["g1"])
    assert shape[0] * shape[1] == made.cpu.cores
    assert shape[2] == made.cpu.threads_per_core
    read = conf_text.parse(gres)
    devices = gres_check._node(read, conf_text.gres_of(read).get("g1", [])).gpus
    assert list(devices) == [f"/dev/nvidia{one.index}" for one in made.gpus]
    assert all(d.cores is None or max(d.cores) < made.cpu.cores for d in devices.values())


# --- cgroup.conf and slurmd -C


def test_cgroup_conf_says_what_is_not_constrained() -> None:
    ours = conf_text.parse(render.cgroup_conf((24, 11)))
    live = conf_text.parse("constraincores=YES\nConstrainDevices=no\nCgroupPlugin=disabled")
    found = conf_check.gather(conf_check.check_cgroup(live, ours))
    assert [(d.finding.key, d.finding.live) for d in found] == [
        ("ConstrainDevices", "no"),
        ("ConstrainRAMSpace", "no"),
        ("CgroupPlugin", "disabled"),
    ]
    assert list(conf_check.check_cgroup(ours, ours)) == []
    assert found[0].sentence().startswith("all nodes: cgroup.conf: ConstrainDevices is no, by the")


def test_slurmd_is_compared_by_what_it_counts() -> None:
    line = (
        "NodeName=g1 CPUs=128 Boards=1 SocketsPerBoard=2 CoresPerSocket=32 ThreadsPerCore=2 "
        "RealMemory=515072"
    )
    found = conf_text.words(line)
    assert list(conf_check.check_slurmd(found, SocketUnit.PACKAGE, MADE)) == []
    less = conf_text.words(line.replace("515072", "512255").replace("Core=2", "Core=1"))
    keys = [f.key for f in conf_check.check_slurmd(less, SocketUnit.PACKAGE, MADE)]
    assert keys == ["ThreadsPerCore", "RealMemory"]
    assert [f.key for f in conf_check.check_slurmd(found, SocketUnit.NUMA, MADE)] == [
        "Sockets",
        "CoresPerSocket",
    ]


# --- reading files


def test_includes_comments_and_continued_lines(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text(
        "# NodeName=no\nClusterName = x # NodeName=neither\nInclude nodes.conf\n"
        f"include {tmp_path}/more.conf\n"
    )
    (tmp_path / "nodes.conf").write_text('NodeName=a1 Sockets=2 \\\n  Gres="gpu:1"\n')
    (tmp_path / "more.conf").write_text("NodeName=DEFAULT CPUs=4\nNodeName=b[1-2] Procs=8\n")
    conf = conf_text.read(tmp_path / "slurm.conf")
    assert conf.settings == {"clustername": "x"}
    assert conf.nodes == {
        "a1": {"sockets": "2", "gres": "gpu:1"},
        "b1": {"cpus": "8"},
        "b2": {"cpus": "8"},
    }


def test_a_file_that_can_not_be_read_is_no_empty_one(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match=r"can't read .*/slurm\.conf: No such file"):
        conf_text.read(tmp_path / "slurm.conf")
    (tmp_path / "slurm.conf").write_text("Include slurm.conf\n")
    with pytest.raises(SlurmError, match="included by itself"):
        conf_text.read(tmp_path / "slurm.conf")


@pytest.mark.parametrize(
    ("slurm", "gres", "sentence"),
    [
        (SLURM.replace("Sockets=4", "Sockets=four"), GRES, "sockets='four', which is no number"),
        (SLURM.replace("gpu:a100:8", "a:b:c:8"), GRES, "the live Gres= can't be read"),
        (SLURM, GRES.replace("Cores=16-31", "Cores=all"), "has Cores='all'"),
        (SLURM, GRES.replace("Count=280", "Count=many"), "has Count='many'"),
    ],
)
def test_values_that_are_none_are_told(slurm: str, gres: str, sentence: str) -> None:
    with pytest.raises(SlurmError, match=sentence):
        compare(slurm, gres)
