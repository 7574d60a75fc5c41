"""The profile of a machine from its /sys and /proc, on a tree written here and on captured ones."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from crater_slurm.errors import CraterError
from crater_slurm.probe.profile import scan

DATA = Path(os.environ.get("CRATER_TEST_DATA", "../shared/data")) / "hwloc"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def two_sockets(root: Path) -> None:
    """Two packages of two cores with two threads each; CPU 7 is offline."""
    files = {
        "sys/devices/system/cpu/online": "0-6",
        "proc/cpuinfo": "model name\t: Test CPU\nflags\t\t: fpu avx avx2 avx512f",
        "proc/meminfo": "MemTotal:       8388608 kB",
        "sys/devices/system/node/node0/cpulist": "0-1,4-5",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  4194304 kB",
        "sys/devices/system/node/node0/distance": "10 21",
        "sys/devices/system/node/node1/cpulist": "2-3,6-7",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:  4194304 kB",
        "sys/devices/system/node/node1/distance": "21 10",
        "sys/block/nvme0n1/size": "15002931888",
        "sys/block/nvme0n1/wwid": "eui.01000000",
        "sys/block/nvme0n1/device/model": "Test NVMe  ",
        "sys/block/nvme0n1/device/numa_node": "1",
    }
    for number in range(8):
        base = f"sys/devices/system/cpu/cpu{number}/topology"
        files[f"{base}/physical_package_id"] = str(number % 4 // 2)
        files[f"{base}/core_id"] = str(number % 2)
    write(root, files)


def test_packages_cores_threads_and_numa_nodes_are_read(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    profile = scan("n1", tmp_path)
    assert (profile.cpu.sockets, profile.cpu.cores_per_socket) == (2, 2)
    assert profile.cpu.avx == {"avx", "avx2", "avx512f"}
    assert profile.memory_mib == 8192
    first, second = profile.numa_nodes
    assert (first.cpus, first.socket, first.memory_mib) == ((0, 1, 4, 5), 0, 4096)
    assert second.cpus == (2, 3, 6)  # 7 is offline
    assert second.distances == (21, 10)


def test_an_nvme_drive_has_its_size_in_gb_and_its_numa_node(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    (drive,) = scan("n1", tmp_path).nvmes
    assert (drive.name, drive.size_gb, drive.numa_node) == ("nvme0n1", 7681, 1)
    assert drive.model == "Test NVMe"
    assert drive.random_read_iops is None  # only a measurement can tell


def test_an_empty_folder_is_no_machine(tmp_path: Path) -> None:
    with pytest.raises(CraterError, match="no online CPU"):
        scan("n1", tmp_path)


def test_a_damaged_cpulist_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"sys/devices/system/cpu/online": "0-x"})
    with pytest.raises(CraterError, match="cpu/online can't be read"):
        scan("n1", tmp_path)


@pytest.mark.skipif(not DATA.is_dir(), reason="no captured machines (CRATER_TEST_DATA)")
@pytest.mark.parametrize(
    ("archive", "sockets", "cores", "numa"),
    [("16amd64-8n2c.tar.bz2", 8, 16, 8)],
)
def test_captured_machines(
    archive: str, sockets: int, cores: int, numa: int, tmp_path: Path
) -> None:
    if not (DATA / archive).exists():
        pytest.skip(f"{archive} is not among the captured machines")
    with tarfile.open(DATA / archive) as tar:
        # Python 3.11.2, Debian 12's, has no filters yet.
        how = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
        tar.extractall(tmp_path, **how)
    (root,) = tmp_path.iterdir()
    profile = scan("n1", root)
    assert profile.cpu.sockets == sockets
    assert profile.cpu.cores == cores
    assert len(profile.numa_nodes) == numa
