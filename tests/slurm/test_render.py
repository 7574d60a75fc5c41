"""What ``crater render`` writes, under real slurmd and slurmctld that count by themselves.

A lab's own configuration overrides what slurmd finds. Here that is taken away, and hwloc shows
each slurmd the machine of its profile, so a wrong line would take the node out of service.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from helpers import PATIENCE

from crater_slurm.cli.main import crater
from crater_slurm.errors import UsageError
from crater_slurm.lab import Lab, inventory, ready, services
from crater_slurm.lab.places import INSIDE
from crater_slurm.model.profile import Cache, NodeProfile, PciDevice, PciKind
from crater_slurm.slurm import conf_check, conf_text, gres
from crater_slurm.slurm.layout import SocketUnit
from crater_slurm.store.codec import profile_to_dict

_REPLACED = ("GresTypes=", "SlurmdParameters=", "NodeName=")


@dataclass
class Rendered:
    """A lab that runs on rendered files; ``conf`` are those files, with devices in /dev."""

    lab: Lab
    profiles: dict[str, NodeProfile]
    file: Path
    conf: Path
    release: str

    def crater(self, *words: str) -> tuple[int, str]:
        """Exit status and output of ``crater render`` for the lab's nodes."""
        done = CliRunner().invoke(
            crater,
            ["render", *words, "--file", str(self.file), "--slurm", self.release, "--shards"],
            env={"CRATER_CONFIG": str(self.file.parent / "crater.yaml")},
        )
        return done.exit_code, done.stdout


def machine(profile: NodeProfile) -> str:
    """The profile's machine as hwloc's synthetic topology."""
    cpu = profile.cpu
    parts = len(profile.numa_nodes) // cpu.sockets
    caches = len(cpu.l3_caches) // cpu.sockets
    levels = [f"pack:{cpu.sockets}", f"numa:{parts}" if parts > 1 else "[numa]"]
    levels += [f"l3:{caches}"] if caches else []
    cores = cpu.cores_per_socket // max(parts, caches, 1)
    return " ".join([*levels, f"core:{cores}", f"pu:{cpu.threads_per_core}"])


def on_rendered_files(lab: Lab, folder: Path) -> Rendered:
    """Restart the lab on what is rendered for its nodes, without any override."""
    profiles = {profile.name: profile for profile in lab.nodes.profiles()}
    file = folder / "profiles.yaml"
    file.write_text(yaml.safe_dump({"nodes": [profile_to_dict(p) for p in profiles.values()]}))
    (folder / "crater.yaml").write_text("")
    release = "{}.{:02}".format(*lab.version)
    done = Rendered(lab, profiles, file, folder / "slurm.conf", release)
    code, gres_conf = done.crater("gres.conf")
    assert code == 0
    (folder / "gres.conf").write_text(gres_conf)
    (folder / "cgroup.conf").write_text(done.crater("cgroup.conf")[1])
    done.conf.write_text(slurm_conf(lab, done.crater("slurm.conf")[1]))
    for name in profiles:
        lab.stop(f"slurmd@{name}")
    lab.stop("slurmctld")
    # The one thing that hwloc does not show: the machine has less memory than its nodes.
    small = re.sub(r"RealMemory=\d+", "RealMemory=1024", done.conf.read_text())
    lab.folders.slurm_conf.write_text(small)
    (lab.folders.etc / "gres.conf").write_text(gres_conf.replace("/dev/", f"{INSIDE}/dev/"))
    lab.start("slurmctld")
    deadline = time.monotonic() + PATIENCE
    ready.controller(lab, deadline)
    for name, profile in profiles.items():
        service = services.slurmd(name)
        lab.supervisor.start(replace(service, environment={"HWLOC_SYNTHETIC": machine(profile)}))
    ready.nodes(lab, list(profiles), deadline)
    return done


def slurm_conf(lab: Lab, text: str) -> str:
    """The lab's slurm.conf with the rendered lines instead of its own."""
    lines = lab.folders.slurm_conf.read_text().splitlines()
    ports = dict(re.findall(r"(?m)^NodeName=(\S+) .*(NodeAddr=.*)$", "\n".join(lines)))
    kept = [line for line in lines if not line.startswith(_REPLACED)]
    rendered = re.sub(r"(?m)^(NodeName=(\S+) .*)$", lambda m: f"{m[1]} {ports[m[2]]}", text)
    return "\n".join([*kept, rendered])


def two_cards() -> NodeProfile:
    """A node with an L4 and an A100, whose counts of shards differ."""
    small = inventory.load("l4").entries[0].profile
    large = inventory.load("a100-pcie").entries[0].profile.gpus[0]
    return replace(small, name="x1", gpus=(small.gpus[0], replace(large, index=1)))


def near_caches() -> NodeProfile:
    """Two packages with two L3 caches of eight cores each, four GPUs, each near one cache."""
    base = inventory.load("slow-nvme").profile_of("s1")
    caches = tuple(Cache(cpus=tuple(range(8 * i, 8 * i + 8))) for i in range(4))
    near = {0: 1, 1: 0, 2: 3, 3: 2}
    devices = tuple(
        PciDevice(address=gpu.pci_bus_id, kind=PciKind.GPU, local_cpus=caches[near[gpu.index]].cpus)
        for gpu in base.gpus
    )
    return replace(base, name="k1", cpu=replace(base.cpu, l3_caches=caches), pci_devices=devices)


def nodes_file(folder: Path, *profiles: NodeProfile) -> str:
    """An inventory of these nodes."""
    nodes = [{"name": p.name, "profile": profile_to_dict(p)} for p in profiles]
    file = folder / "nodes.yaml"
    file.write_text(yaml.safe_dump({"nodes": nodes}))
    return str(file)


@pytest.fixture(scope="module")
def rendered(lab_factory: Any, tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """A node of every make that the lab ships, and one with two kinds of cards."""
    folder = tmp_path_factory.mktemp("rendered")
    makes = {entry.profile.name: entry.profile for entry in inventory.load("demo").entries}
    makes["x1"] = two_cards()
    file = nodes_file(folder, *(replace(p, name=name) for name, p in makes.items()))
    return on_rendered_files(lab_factory(inventory=file, crater=False), folder)


def test_nodes_register_with_what_was_rendered(rendered: Rendered) -> None:
    for name, profile in rendered.profiles.items():
        record = rendered.lab.node(name)
        assert record["State"] == "IDLE"
        # One NUMA node for each socket, whether it is a package or a part of one.
        assert int(record["Sockets"]) == len(profile.numa_nodes)
        assert int(record["Sockets"]) * int(record["CoresPerSocket"]) == profile.cpu.cores
        assert int(record["ThreadsPerCore"]) == profile.cpu.threads_per_core
        counts = gres.totals(record["Gres"])
        assert counts.get("gpu", 0) == len(profile.gpus)
        assert counts["nviops"] == sum(drive.random_read_iops for drive in profile.nvmes)
    assert "(S:1,3,5,7)" in rendered.lab.node("e1")["Gres"]
    # 8 A100 of 31 slices, 8 H100 of 30, an L4 of 30 and an A100 of 31.
    shards = {n: gres.totals(rendered.lab.node(n)["Gres"])["shard"] for n in ("a1", "h1", "x1")}
    assert shards == {"a1": 248, "h1": 240, "x1": 61}


def test_slurmd_finds_the_machine_of_the_profile(rendered: Rendered) -> None:
    own = rendered.lab.version >= (25, 11)  # older ones know no --parameters
    for name in ("a1", "e1", "l1", "c1"):
        profile = rendered.profiles[name]
        numa = name == "e1" and own
        options = ["--parameters=numa_node_as_socket"] if numa else []
        command = ["env", f"HWLOC_SYNTHETIC={machine(profile)}", "slurmd", *options, "-C"]
        line = rendered.lab.node_run(name, command, check=True).stdout.splitlines()[0]
        unit = SocketUnit.NUMA if numa else SocketUnit.PACKAGE
        found = list(conf_check.check_slurmd(conf_text.words(line), unit, profile))
        assert [finding.key for finding in found] == ["RealMemory"]  # the machine's own


def test_each_card_has_its_own_count_of_shards(rendered: Rendered) -> None:
    """31 shards fit the A100 alone; the 30 that come then have the L4 for themselves."""
    lab = rendered.lab
    for count, device in ((31, "1"), (30, "0")):
        script = "#!/bin/sh\necho $CUDA_VISIBLE_DEVICES\nsleep 100\n"
        job = lab.sbatch("-w", "x1", "-n1", f"--gres=shard:{count}", script=script)
        lab.wait_job(job, ["RUNNING"], PATIENCE)
        output = lab.home() / f"slurm-{job}.out"
        deadline = time.monotonic() + PATIENCE
        while not output.exists() or not output.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert output.read_text() == f"{device}\n"


def test_features_find_their_nodes(rendered: Rendered) -> None:
    for constraint, nodes in (
        ("avx512&cc9.0", {"h1"}),
        ("gpu_a100-sxm4-80gb", {"e1"}),
        ("gpu_a100-pcie-40gb&nvme_100us", {"a1", "x1"}),
    ):
        options = ["-n1", "--gres=gpu:1", "-C", constraint, "-p", "gpu"]
        job = rendered.lab.sbatch(*options, wrap="true")
        assert rendered.lab.wait_job(job, timeout=PATIENCE)["NodeList"] in nodes


def test_check_agrees_with_what_was_rendered_and_sees_a_drift(rendered: Rendered) -> None:
    code, text = rendered.crater("--check", "--conf", str(rendered.conf))
    assert (code, text.splitlines()[-1].rpartition(": ")[2]) == (0, "no difference"), text
    changed = rendered.conf.parent / "changed"
    changed.mkdir()
    for file in (rendered.conf, *rendered.conf.parent.glob("*.conf")):
        changed.joinpath(file.name).write_text(file.read_text())
    conf = changed / "slurm.conf"
    conf.write_text(conf.read_text().replace("numa_node_as_socket", "config_overrides"))
    code, text = rendered.crater("--check", "slurm.conf", "--conf", str(conf))
    assert code == 1
    assert text.startswith("e1: slurm.conf: SlurmdParameters is config_overrides")


def test_l3_caches_as_sockets(lab_factory: Any, tmp_path: Path) -> None:
    file = nodes_file(tmp_path, near_caches())
    done = on_rendered_files(lab_factory(inventory=file, crater=False), tmp_path)
    record = done.lab.node("k1")
    assert (record["State"], record["Sockets"], record["CoresPerSocket"]) == ("IDLE", "4", "8")
    options = ["-n1", "-c2", "--gres=gpu:1", "--gres-flags=enforce-binding"]
    cores = []
    for _ in range(4):
        job = done.lab.sbatch(*options, wrap="sleep 100")
        cores.append(done.lab.wait_job(job, ["RUNNING"], PATIENCE)["CPU_IDs"])
    assert sorted(cores) == ["0-1", "16-17", "24-25", "8-9"]


def test_nodes_that_must_count_differently(
    lab_factory: Any, slurm_version: tuple[int, int], tmp_path: Path
) -> None:
    """Since 25.11 each node has a word of its own; before, there is no right configuration."""
    other = inventory.load("epyc-nps4").profile_of("e1")
    file = nodes_file(tmp_path, near_caches(), other)
    if slurm_version < (25, 11):
        with pytest.raises(UsageError, match="until Slurm 25.11"):
            lab_factory(inventory=file, crater=False)
        return
    lab = on_rendered_files(lab_factory(inventory=file, crater=False), tmp_path).lab
    records = {name: lab.node(name) for name in ("k1", "e1")}
    assert {name: (r["State"], r["Sockets"]) for name, r in records.items()} == {
        "k1": ("IDLE", "4"),
        "e1": ("IDLE", "8"),
    }
