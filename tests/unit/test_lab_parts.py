"""Parts of the lab that need neither root nor Slurm: what people write, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from crater_slurm.errors import CraterError, LabError
from crater_slurm.lab import apt, cgroups, inventory, roots, view
from crater_slurm.lab.spec import LabSpec, labs_folder

SMALL = {"cpu": {"sockets": 1, "cores_per_socket": 2}, "numa_nodes": [{"id": 0, "cpus": "0-1"}]}


def test_every_shipped_profile_is_used_and_every_inventory_reads() -> None:
    used = set()
    for name, about in inventory.shipped().items():
        assert about.endswith("."), name
        text = (Path(inventory.__file__).parent / "inventories" / f"{name}.yaml").read_text()
        used |= set(re.findall(r"profile: ([\w-]+)", text))
        assert inventory.load(name).entries
    assert used == set(inventory.shipped_profiles())


#: What tells one machine from another of its kind, or only describes it.
_NOT_ASKED = r"uuid|stable_id|firmware|pci_bus_id|wear_percent|software|\.kind$"


def test_shipped_profiles_know_everything_that_placement_asks() -> None:
    for name in inventory.shipped():
        for entry in inventory.load(name).entries:
            made = entry.profile
            assert made.memory_bandwidth_gb_s
            assert sum(len(node.cpus) for node in made.numa_nodes) == (
                made.cpu.cores * made.cpu.threads_per_core
            )
            assert made.memory_mib == sum(node.memory_mib or 0 for node in made.numa_nodes)
            assert made.cache_gb <= sum(drive.size_gb or 0 for drive in made.nvmes)
            unknown = [
                path
                for path, value in made.values()
                if value is None and not re.search(_NOT_ASKED, path)
            ]
            assert unknown == []


def test_an_inventory_takes_profiles_by_name_or_written_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "nodes:\n"
        "  - {name: 'n[01-03]', profile: {cpu: {sockets: 1, cores_per_socket: 2},\n"
        "     numa_nodes: [{id: 0, cpus: 0-1}]}}\n"
        "  - {name: g1, profile: l4-inference}\n"
    )
    made = inventory.load(str(file))
    assert made.names == ["n01", "n02", "n03", "g1"]
    assert made.profile_of("n03").name == "n03"
    assert made.profile_of("g1").gpus[3].gres_type == "l4"
    with pytest.raises(LabError, match="did you mean n03"):
        made.profile_of("n3")


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (None, "must hold a list 'nodes:'"),
        ({"nodes": []}, "must hold a list 'nodes:'"),
        ({"nodes": [{"name": "a"}]}, "nodes\\[0\\] must have exactly 'name' and 'profile'"),
        (
            {"nodes": [{"name": "a", "profile": "a200"}]},
            "no profile is named 'a200'; there are a100",
        ),
        ({"nodes": [{"name": "a", "profile": 3}]}, "the profile must be a mapping"),
        ({"nodes": [{"name": "a", "profile": SMALL}] * 2}, "has the node a twice"),
        ({"nodes": [{"name": "a[2-1]", "profile": SMALL}]}, "backwards"),
        ({"nodes": [{"name": "", "profile": SMALL}]}, "empty name"),
        ({"nodes": [{"name": "a", "profile": SMALL}], "node": 1}, "unknown key 'node'"),
        ({"nodes": [{"name": "a", "profile": SMALL | {"cpus": 1}}]}, "cpus"),
    ],
)
def test_a_wrong_inventory_is_told_by_place(tree: Any, sentence: str) -> None:
    with pytest.raises(CraterError, match=sentence):
        inventory.parse(tree, "mine.yaml")


def test_an_unknown_inventory_lists_the_known_ones() -> None:
    with pytest.raises(LabError, match="no inventory is named 'dmeo'; there are a100-pcie"):
        inventory.load("dmeo")


@pytest.mark.parametrize("name", ["", "Big", "a b", "../x", "-x", "a" * 32, "x;y"])
def test_names_that_can_not_name_a_lab(name: str) -> None:
    with pytest.raises(LabError, match="can't name a lab"):
        LabSpec(name=name)


def test_a_spec_survives_its_file(tmp_path: Path) -> None:
    spec = LabSpec(
        name="x",
        slurm="24.11",
        daemons=("node",),
        controller_only=True,
        cloud=True,
        slurm_conf={"KillWait": "1"},
        crater_conf={"filter": {"mode": "advise"}},
    )
    spec.save(tmp_path / "lab.json")
    assert LabSpec.load(tmp_path / "lab.json") == spec
    (tmp_path / "lab.json").write_text("{}")
    with pytest.raises(LabError, match="does not describe a lab"):
        LabSpec.load(tmp_path / "lab.json")


def test_a_folder_that_mount_can_not_spell_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setenv("CRATER_LAB_DIR", "/x/a,b")
    with pytest.raises(LabError, match="'/x/a,b'"):
        labs_folder()


def test_the_archive_is_the_one_with_the_whole_suite() -> None:
    lines = (
        "nodistro|main|Vendor|http://vendor.example/node|\n"
        "bookworm-security|main|Debian|http://one.example/security|/k.gpg\n"
        "bookworm|contrib|Debian|http://one.example/debian|\n"
        "bookworm|main|Debian|http://two.example/debian/|\n"
    )
    address, _ = apt.archive_of(lines)
    assert address == "http://two.example/debian"
    with pytest.raises(LabError, match="no Debian archive"):
        apt.archive_of("nodistro|main|Vendor|http://vendor.example/node|\n")


def test_the_keyring_is_the_sources_own(tmp_path: Path) -> None:
    ring = tmp_path / "ring.gpg"
    ring.touch()
    assert apt.archive_of(f"sid|main|Debian|http://x.example/d|{ring}")[1] == ring


def test_a_release_that_debian_lacks_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(roots, "machine_version", lambda: (23, 2))
    assert roots.find("23.02") == roots.SlurmRoot(None, (23, 2))
    assert roots.find(None).folder is None
    with pytest.raises(LabError, match=r"no Slurm 23\.11; a lab can have 22\.05, 24\.11, 26\.05"):
        roots.find("23.11")
    monkeypatch.setattr(roots, "machine_version", lambda: None)
    with pytest.raises(LabError, match="no slurmctld, slurmd and munged of its own"):
        roots.find(None)


def test_cgroups_that_a_machine_can_not_give(tmp_path: Path) -> None:
    assert "neither cgroup v2 nor v1's cpuset, devices" in str(cgroups.refusal(tmp_path))
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory\n")
    assert "echo '+cpuset' > " in str(cgroups.refusal(tmp_path))
    (tmp_path / "cgroup.subtree_control").write_text("cpuset cpu memory\n")
    assert cgroups.refusal(tmp_path) is None


def test_users_of_the_machine_give_way_to_those_of_the_lab(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\n"
        "carol:x:61002:100::/home/carol:/bin/sh\n"
    )
    (tmp_path / "group").write_text("root:x:0:\nusers:x:100:alice,bob\n")
    view._write_etc(tmp_path, ["n1"])
    users = dict(line.split(":", 1) for line in (tmp_path / "passwd").read_text().splitlines())
    assert list(users) == ["root", "alice", "bob"]
    assert users["alice"].startswith("x:61001:61001::/crater-lab/home/alice:")
    assert (tmp_path / "group").read_text() == (
        "root:x:0:\nusers:x:100:alice,bob\nalice:x:61001:\nbob:x:61002:\n"
    )
    assert "127.0.0.1 n1" in (tmp_path / "hosts").read_text().splitlines()
