"""Damaged machines: whatever stands in the files, a scan ends with values or with one sentence."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from probe_trees import link, pci, two_sockets, write

from crater_slurm.errors import CraterError
from crater_slurm.probe import files
from crater_slurm.probe.profile import scan

ABSURD = [
    b"",
    b"-1",
    b"0-99999999999",
    b"0-65535",
    b"0-65535," * 40000,
    b"9" * 5000,
    b"\xff\xfe\x00\x80" * 100,
    b"f" * 4000,
    b",".join([b"ffffffff"] * 5000),
    "²³".encode(),
    b"0::/../../..\n\0",
    b"MemTotal: 99999999999999999999 kB",
    b"x" * (2 * files.MAX_BYTES),
]


def machine(root: Path) -> list[Path]:
    """A tree with a file for every reader; returns its files."""
    two_sockets(root)
    pci(
        root,
        "pci0000:00/0000:00:01.0/0000:01:00.0",
        **{"class": "0x030200", "vendor": "0x10de", "device": "0x20b2", "numa_node": "1"},
        local_cpus="cc",
        current_link_speed="16.0 GT/s PCIe",
        current_link_width="16",
    )
    cpu = "sys/devices/system/cpu/cpu0"
    write(
        root,
        {
            f"{cpu}/topology/core_cpus": "11",
            f"{cpu}/cache/index3/level": "3",
            f"{cpu}/cache/index3/size": "1024K",
            f"{cpu}/cache/index3/shared_cpu_map": "33",
            "sys/devices/system/node/online": "0-1",
            "sys/devices/system/node/node0/access0/initiators/read_bandwidth": "1000",
            "proc/self/cgroup": "0::/job",
            "proc/self/mountinfo": "22 1 259:0 / / rw - ext4 /dev/root rw",
            "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0",
            "proc/swaps": "/dev/nvme0n1 partition 1 0 -2",
            "proc/driver/nvidia/gpus/0000:01:00.0/numa_status": "Node: 1",
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: A100",
            "proc/version": "Linux version 6.1",
            "sys/fs/cgroup/job/cpuset.cpus.effective": "0-3",
            "sys/fs/cgroup/cpuset.cpus.effective": "0-7",
            "sys/fs/cgroup/job/memory.max": "1000000000",
        },
    )
    return sorted(p for p in root.rglob("*") if p.is_file())


def damage(path: Path, how: int, junk: bytes) -> None:
    if how == 0:
        path.write_bytes(junk)
    elif how == 1:
        path.write_bytes(path.read_bytes()[:1])
    else:
        path.unlink()
    if how == 3:
        path.mkdir()
    elif how == 4:
        path.symlink_to(path.name)
    elif how == 5:
        os.mkfifo(path)


def scan_ends(root: Path) -> None:
    try:
        found = scan("n1", root)
    except CraterError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
    else:
        assert set(found.limits.cpus) <= set(range(8))


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_damaged_machine_is_read_or_refused_with_one_sentence(data: st.DataObject) -> None:
    root = Path(tempfile.mkdtemp(prefix="crater-damage-"))
    try:
        paths = machine(root)
        for path in data.draw(
            st.lists(st.sampled_from(paths), min_size=1, max_size=6, unique=True)
        ):
            junk = data.draw(st.sampled_from(ABSURD) | st.binary(max_size=200))
            damage(path, data.draw(st.integers(0, 5)), junk)
        scan_ends(root)
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("how", range(6))
def test_every_single_file_may_be_damaged(how: int, tmp_path: Path) -> None:
    for i, path in enumerate(machine(tmp_path / "whole")):
        root = tmp_path / str(i)
        shutil.copytree(tmp_path / "whole", root, symlinks=True)
        damage(root / path.relative_to(tmp_path / "whole"), how, ABSURD[i % len(ABSURD)])
        scan_ends(root)


def test_folders_that_are_links_to_themselves_are_empty(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    for name in ("sys/bus/pci/devices", "sys/class/block", "proc/driver/nvidia/gpus"):
        link(tmp_path, name, name)
    assert scan("n1", tmp_path).profile.pci_devices == ()


def test_no_more_than_a_mebibyte_of_a_file_is_read(tmp_path: Path) -> None:
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(64 * files.MAX_BYTES)
    big.open("r+b").write(b"a" * (2 * files.MAX_BYTES))
    assert len(files.read(big) or "") == files.MAX_BYTES


@given(st.binary(max_size=300))
def test_a_mask_of_any_bytes_is_numbers_or_unknown(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        found = files.cpumask(Path(file.name))
    assert found is None or list(found) == sorted(set(found))


@given(st.sets(st.integers(0, 300)))
def test_a_mask_as_the_kernel_writes_it_gives_its_cpus(cpus: set[int]) -> None:
    words = [sum(1 << (c - 32 * i) for c in cpus if c // 32 == i) for i in range(9, -1, -1)]
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(",".join(f"{word:08x}" for word in words) + "\n")
        file.flush()
        assert files.cpumask(Path(file.name)) == tuple(sorted(cpus))
