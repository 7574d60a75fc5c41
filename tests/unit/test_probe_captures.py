"""Real machines captured by ghw: values that were looked up in the files by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from captured import DATA, unpack

from crater_slurm.model.profile import NodeProfile, PciKind
from crater_slurm.probe.profile import scan

SNAPSHOTS = DATA / "captures/ghw-snapshots"
Read = Callable[[str], NodeProfile]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    def profile(name: str) -> NodeProfile:
        if not SNAPSHOTS.is_dir():
            pytest.skip(f"no captured machines in {DATA} (CRATER_TEST_DATA)")
        (source,) = SNAPSHOTS.glob(f"linux-{name}*")
        folder: Path = tmp_path_factory.mktemp("machine")
        unpack(source, folder)
        return scan("n1", folder).profile

    return profile


def shape(profile: NodeProfile) -> tuple[int, int, int]:
    cpu = profile.cpu
    return cpu.sockets, cpu.cores_per_socket, cpu.threads_per_core


def test_a_virtual_machine_with_an_nvidia_accelerator(read: Read) -> None:
    profile = read("amd64-accel-nvidia")
    assert shape(profile) == (1, 8, 1)
    found = {d.address: d for d in profile.pci_devices}
    gpu = found["0000:06:00.0"]
    assert (gpu.kind, gpu.bridges, gpu.root) == (PciKind.GPU, ("0000:00:01.5",), "pci0000:00")
    assert (gpu.numa_node, gpu.local_cpus) == (None, tuple(range(8)))
    assert "0000:04:00.0" not in found  # virtio's display
    assert (profile.gpus[0].pci_bus_id, len(profile.gpus)) == ("0000:06:00.0", 1)


def test_processing_accelerators_count_and_a_virtual_display_does_not(read: Read) -> None:
    kinds = {d.address: d.kind for d in read("amd64-accel.").pci_devices}
    assert kinds == {"0000:00:04.0": PciKind.GPU, "0000:01:00.0": PciKind.NIC}


def test_cpus_that_are_offline_are_left_out(read: Read) -> None:
    profile = read("amd64-offlineCPUs")  # 2 and 3 of 0-3 are
    assert shape(profile) == (2, 1, 1)
    assert [n.cpus for n in profile.numa_nodes] == [(0, 1)]
    assert profile.memory_mib == 7881912 // 1024


def test_a_hybrid_processor_and_a_drive_in_use(read: Read) -> None:
    profile = read("amd64-415ee")  # 4 cores with 2 threads, 8 with one
    assert (profile.cpu.cores, profile.cpu.threads_per_core) == (12, 1)
    assert [(c.cpus, c.size_kib) for c in profile.cpu.l3_caches] == [(tuple(range(16)), 18432)]
    (drive,) = profile.nvmes
    assert (drive.pci_bus_id, drive.size_gb) == ("0000:04:00.0", 1024)
    assert drive.uses == ("partitions", "mounted at /boot/efi", "mounted at /boot")


def test_two_sockets_with_cpus_numbered_in_turn(read: Read) -> None:
    profile = read("amd64-8581c")
    assert shape(profile) == (2, 6, 2)
    first, second = profile.numa_nodes
    assert first.cpus == tuple(range(0, 24, 2))
    assert (first.socket, second.socket) == (1, 0)
    assert (first.distances, second.distances) == ((10, 20), (20, 10))
    nodes = {d.address: d.numa_node for d in profile.pci_devices}
    assert (nodes["0000:05:00.0"], nodes["0000:05:00.1"], nodes["0000:01:00.0"]) == (0, 1, None)


def test_arm_with_a_drive(read: Read) -> None:
    profile = read("arm64")
    assert (profile.cpu.arch, profile.cpu.model) == ("aarch64", "ARM implementer 0x41 part 0xd0c")
    assert shape(profile) == (1, 1, 1)
    assert profile.nvmes[0].uses == ("partitions", "mounted at /")
    assert {d.numa_node for d in profile.pci_devices if d.kind is PciKind.NVME} == {0}


def test_s390x_with_two_threads_per_core(read: Read) -> None:
    profile = read("s390x")
    assert (profile.cpu.arch, profile.cpu.model) == ("s390x", "IBM Z machine 3931")
    assert shape(profile) == (1, 4, 2)
    assert (profile.memory_mib, profile.cpu.avx) == (112832212 // 1024, None)
