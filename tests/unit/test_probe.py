"""The profile of a machine from its /sys and /proc, on trees written here."""

from __future__ import annotations

from pathlib import Path

import pytest
from probe_trees import pci, two_sockets, write

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import Method
from crater_slurm.probe.profile import scan


def test_packages_cores_threads_and_numa_nodes_are_read(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    profile = scan("n1", tmp_path).profile
    assert (profile.cpu.sockets, profile.cpu.cores_per_socket) == (2, 2)
    assert profile.cpu.avx == {"avx", "avx2", "avx512f"}
    assert profile.memory_mib == 8192
    first, second = profile.numa_nodes
    assert (first.cpus, first.socket, first.memory_mib) == ((0, 1, 4, 5), 0, 4096)
    assert second.cpus == (2, 3, 6)  # 7 is offline
    assert second.distances == (21, 10)


def test_an_nvme_drive_has_its_size_in_gb_and_its_numa_node(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    (drive,) = scan("n1", tmp_path).profile.nvmes
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


def test_avx_levels_are_those_that_every_core_of_a_hybrid_processor_has(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    write(tmp_path, {"proc/cpuinfo": "flags : lm avx avx2 avx512f\n\nflags : lm avx avx2"})
    assert scan("n1", tmp_path).profile.cpu.avx == {"avx", "avx2"}


@pytest.mark.parametrize(
    ("cpuinfo", "model", "arch"),
    [
        ("flags : lm sse\nmodel name : AMD   EPYC 7763", "AMD EPYC 7763", "x86_64"),
        ("flags : sse\nmodel name : Pentium", "Pentium", "i686"),
        ("cpu\t\t: POWER9, altivec supported", "POWER9, altivec supported", "ppc64le"),
        (
            "CPU implementer\t: 0x48\nCPU architecture: 8\nCPU part\t: 0xd01",
            "ARM implementer 0x48 part 0xd01",
            "aarch64",
        ),
        (
            "vendor_id       : IBM/S390\nprocessor 0: version = 00,  machine = 3931",
            "IBM Z machine 3931",
            "s390x",
        ),
        ("", None, None),
    ],
)
def test_model_and_architecture_are_told_by_cpuinfo(
    cpuinfo: str, model: str | None, arch: str | None, tmp_path: Path
) -> None:
    two_sockets(tmp_path)
    write(tmp_path, {"proc/cpuinfo": cpuinfo})
    cpu = scan("n1", tmp_path).profile.cpu
    assert (cpu.model, cpu.arch) == (model, arch)


def test_thread_siblings_decide_where_core_ids_repeat(tmp_path: Path) -> None:
    files = {"sys/devices/system/cpu/online": "0-3"}
    for number, siblings in enumerate(("3", "3", "c", "c")):
        base = f"sys/devices/system/cpu/cpu{number}/topology"
        files |= {f"{base}/core_id": "0", f"{base}/core_cpus": siblings}
    write(tmp_path, files)
    cpu = scan("n1", tmp_path).profile.cpu
    assert (cpu.sockets, cpu.cores_per_socket, cpu.threads_per_core) == (1, 2, 2)


def test_ids_decide_where_masks_contradict_each_other(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    write(tmp_path, {"sys/devices/system/cpu/cpu0/topology/core_siblings": "0000000f"})
    assert scan("n1", tmp_path).profile.cpu.sockets == 2


def test_packages_of_unequal_size_are_told(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    write(tmp_path, {"sys/devices/system/cpu/online": "0-2,4-6"})
    found = scan("n1", tmp_path)
    assert found.profile.cpu.cores_per_socket == 1
    assert any("have 1 to 2 cores online" in note for note in found.notes)


def test_an_l3_cache_has_its_size_and_the_cpus_that_are_online(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    for number, index, level, cpus in ((0, 2, 2, "0"), (2, 3, 3, "2-3,6-7"), (6, 3, 3, "2-3,6-7")):
        base = f"sys/devices/system/cpu/cpu{number}/cache/index{index}"
        write(
            tmp_path,
            {
                f"{base}/level": str(level),
                f"{base}/type": "Unified",
                f"{base}/size": "32768K",
                f"{base}/shared_cpu_list": cpus,
            },
        )
    (cache,) = scan("n1", tmp_path).profile.cpu.l3_caches
    assert (cache.cpus, cache.size_kib) == ((2, 3, 6), 32768)


def test_the_catalogue_fills_what_the_kernel_does_not_tell_and_says_so(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    pci(
        tmp_path,
        "pci0000:00/0000:01:00.0",
        **{"class": "0x030200", "vendor": "0x10de", "device": "0x20b2", "numa_node": "1"},
    )
    write(
        tmp_path,
        {
            "proc/driver/nvidia/gpus/0000:01:00.0/information": (
                "Model: \t NVIDIA A100-SXM4-80GB\nDevice Minor: \t 0"
            )
        },
    )
    profile = scan("n1", tmp_path).profile
    (gpu,) = profile.gpus
    assert (gpu.model, gpu.numa_node, gpu.sm_count) == ("a100-sxm4-80gb", 1, 108)
    assert profile.where_from("gpus[0].sm_count").method is Method.CATALOGUE
    assert profile.where_from("gpus[0].numa_node").method is Method.MEASURED
