"""Which folders a drive's benchmark takes, on trees of /sys written here, and which it refuses."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import Cpu, NodeProfile, Nvme
from crater_slurm.probe.bench import nvme, target
from crater_slurm.probe.bench.target import Target

PROFILE = NodeProfile(
    name="n1",
    cpu=Cpu(sockets=1, cores_per_socket=1),
    numa_nodes=(),
    nvmes=(Nvme(name="nvme0n1"), Nvme(name="nvme1n1")),
)


class Machine:
    """A /sys and /proc with one file system, mounted where the test's folder is."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.folder.mkdir()
        device = folder.stat().st_dev
        self.number = f"{os.major(device)}:{os.minor(device)}"
        (root / "sys/dev/block").mkdir(parents=True)
        (root / "proc/self").mkdir(parents=True)

    def block(self, path: str, **links: str) -> Path:
        """A block device's folder; ``links`` are the devices below it."""
        folder = self.root / "sys/devices" / path
        (folder / "slaves").mkdir(parents=True, exist_ok=True)
        for name, below in links.items():
            (folder / "slaves" / name).symlink_to(self.root / "sys/devices" / below)
        return folder

    def mounted(self, kind: str, source: str, block: Path | None, number: str = "") -> None:
        if block is not None:
            (self.root / "sys/dev/block" / self.number).symlink_to(block)
        line = f"9 1 {number or self.number} / {self.folder} rw - {kind} {source} rw"
        (self.root / "proc/self/mountinfo").write_text(f"1 1 0:1 / / rw - ext4 /dev/x rw\n{line}\n")

    def target(self, **options: bool) -> Target:
        return target.target(self.folder, self.root, **options)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root", tmp_path / "folder")


def test_a_partition_is_on_its_drive(machine: Machine) -> None:
    machine.block("pci/nvme/nvme0/nvme0n1")
    partition = machine.block("pci/nvme/nvme0/nvme0n1/nvme0n1p2")
    (partition / "partition").write_text("2\n")
    machine.mounted("xfs", "/dev/nvme0n1p2", partition)
    found = machine.target()
    assert (found.filesystem, found.drives, found.unfit) == ("xfs", ("nvme0n1",), None)
    assert nvme.place_in_profile(PROFILE, found) == ("nvmes[0]", None)


def test_lvm_on_md_on_partitions_is_on_all_their_drives(machine: Machine) -> None:
    for name in ("nvme0n1", "nvme1n1"):
        machine.block(f"pci/{name}")
        (machine.block(f"pci/{name}/{name}p1") / "partition").write_text("1\n")
    machine.block("virtual/md0", a="pci/nvme0n1/nvme0n1p1", b="pci/nvme1n1/nvme1n1p1")
    machine.mounted("ext4", "/dev/mapper/v", machine.block("virtual/dm-0", md0="virtual/md0"))
    found = machine.target()
    assert found.drives == ("nvme0n1", "nvme1n1")
    place, why = nvme.place_in_profile(PROFILE, found)
    assert place is None
    assert "nvme0n1, nvme1n1 carry the folder together" in (why or "")


def test_a_btrfs_subvolume_is_on_the_drives_of_its_file_system(machine: Machine) -> None:
    machine.block("pci/nvme1n1")
    devices = machine.root / "sys/fs/btrfs/uuid/devices"
    devices.mkdir(parents=True)
    (devices / "nvme1n1").symlink_to(machine.root / "sys/devices/pci/nvme1n1")
    # A subvolume's device number is no mount's.
    machine.mounted("btrfs", "/dev/nvme1n1", None, number="0:33")
    assert machine.target().drives == ("nvme1n1",)


@pytest.mark.parametrize(
    ("kind", "source"), [("tmpfs", "tmpfs"), ("nfs4", "server:/x"), ("overlay", "overlay")]
)
def test_what_is_on_no_local_drive_is_refused_and_never_in_a_profile(
    machine: Machine, kind: str, source: str
) -> None:
    machine.mounted(kind, source, None)
    with pytest.raises(CraterError, match=rf"is on {kind} \({source}\), which is no file system"):
        machine.target()
    allowed = machine.target(allow_any=True)
    assert nvme.place_in_profile(PROFILE, allowed) == (None, allowed.unfit)
    assert kind in (allowed.unfit or "")


def test_a_drive_that_the_profile_does_not_have_is_named() -> None:
    where = Target(folder=Path("/x"), filesystem="ext4", drives=("sda",))
    assert nvme.place_in_profile(PROFILE, where)[1] == "sda is no NVMe drive of the profile"


def test_links_files_devices_and_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    for name, words in (("link", "symbolic link"), ("file", "no folder"), ("none", "No such file")):
        with pytest.raises(CraterError, match=words):
            target.target(tmp_path / name, allow_any=True)


def test_a_device_is_refused_whatever_is_allowed() -> None:
    blocks = [p for p in Path("/dev").iterdir() if p.is_block_device() and not p.is_symlink()]
    if not blocks:
        pytest.skip("no block device in /dev")
    with pytest.raises(CraterError, match="is a device, and measuring one destroys"):
        target.target(blocks[0], allow_any=True)


def test_a_file_needs_its_size_and_five_percent_or_a_gib_beside_it() -> None:
    assert target.too_small(9216, 10_000, 8192) is None  # 1 GiB is more than 500 MiB
    assert target.too_small(9215, 10_000, 8192) is not None
    assert target.too_small(13_192, 100_000, 8192) is None  # 5 % are 5000 MiB
    why = target.too_small(13_191, 100_000, 8192)
    assert "13191 MiB are free, 8192 MiB for the file and 5000 MiB beside it" in (why or "")


def test_a_drive_that_others_use_is_refused_with_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "sys/class/block/nvme0n1/stat"
    stat.parent.mkdir(parents=True)
    stat.write_text("1 2 3 4 5 6 7 8 9 5000 11\n")
    after = ["1 2 3 4 5 6 7 8 9 5100 11\n", "1 2 3 4 5 6 7 8 9 5211 11\n"]
    monkeypatch.setattr(time, "sleep", lambda seconds: stat.write_text(after.pop(0)))
    assert target.busy(["nvme0n1"], tmp_path) is None  # 100 ms of a second
    why = target.busy(["nvme0n1"], tmp_path)  # 111 ms
    assert why is not None
    assert why.startswith("nvme0n1 was busy 11 % of a second")
    with pytest.raises(CraterError, match="how busy sda is"):
        target.io_ticks_ms("sda", tmp_path)
