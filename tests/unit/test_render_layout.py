"""Sockets as Slurm counts them, and the GPUs' cores, on machines worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from render_samples import TWO, gpu, machines, numa, profile

from crater_slurm.model.cpuset import parse_cpulist
from crater_slurm.model.profile import Cache, Cpu, NodeProfile, NumaKind, PciDevice, PciKind
from crater_slurm.slurm.layout import SocketUnit, gpu_cpus, gpu_sockets, layout, settle, wanted


def cores_of(made: NodeProfile, unit: SocketUnit | None = None) -> list[str]:
    """``Cores=`` of each GPU."""
    form = layout(made, unit)
    return [form.cores(gpu_sockets(one, made, form)) for one in made.gpus]


def shape(made: NodeProfile, unit: SocketUnit | None = None) -> tuple[SocketUnit, int, int, int]:
    form = layout(made, unit)
    return form.unit, form.sockets, form.cores_per_socket, form.threads_per_core


def test_packages_are_sockets_when_each_holds_one_numa_node() -> None:
    made = profile(numa(0, "0-3", 0), numa(1, "4-7", 1), cpu=TWO, gpus=(gpu(0, 1), gpu(1, 0)))
    assert shape(made) == (SocketUnit.PACKAGE, 2, 4, 1)
    assert cores_of(made) == ["4-7", "0-3"]


def test_epyc_nps4_has_eight_sockets() -> None:
    """Two packages of 64 cores and 128 threads: CPUs 128-255 are the second threads."""
    nodes = [
        numa(i, f"{16 * i}-{16 * i + 15},{128 + 16 * i}-{143 + 16 * i}", i // 4) for i in range(8)
    ]
    cpu = Cpu(sockets=2, cores_per_socket=64, threads_per_core=2)
    made = profile(*nodes, cpu=cpu, gpus=(gpu(0, 3), gpu(1, 1), gpu(2, 7), gpu(3, 5)))
    assert shape(made) == (SocketUnit.NUMA, 8, 16, 2)
    # NUMA node 3 has CPUs 48-63 and 176-191; as cores those are 48-63 alone.
    assert cores_of(made) == ["48-63", "16-31", "112-127", "80-95"]


def test_two_numa_nodes_in_each_package() -> None:
    nodes = [numa(i, f"{4 * i}-{4 * i + 3}", i // 2) for i in range(4)]
    made = profile(
        *nodes, cpu=Cpu(sockets=2, cores_per_socket=8), gpus=(gpu(0, 3), gpu(1, 3), gpu(2, 1))
    )
    assert shape(made) == (SocketUnit.NUMA, 4, 4, 1)
    assert cores_of(made) == ["12-15", "12-15", "4-7"]


def test_packages_that_take_cpu_numbers_in_turn() -> None:
    """CPUs 0, 2, 4, 6 are the first package's cores 0-3; the kernel's node 0 has the others."""
    odd, even = numa(0, "1,3,5,7", 1), numa(1, "0,2,4,6", 0)
    assert cores_of(profile(odd, even, cpu=TWO, gpus=(gpu(0, 0), gpu(1, 1)))) == ["4-7", "0-3"]


def test_second_threads_numbered_behind_all_first_ones() -> None:
    """Two packages of 32 cores: 0-31 with 64-95, and 32-63 with 96-127."""
    cpu = Cpu(sockets=2, cores_per_socket=32, threads_per_core=2)
    made = profile(
        numa(0, "0-31,64-95", 0), numa(1, "32-63,96-127", 1), cpu=cpu, gpus=(gpu(0, 1), gpu(1, 0))
    )
    assert shape(made) == (SocketUnit.PACKAGE, 2, 32, 2)
    assert cores_of(made) == ["32-63", "0-31"]


def test_power_has_sparse_ids_and_gpu_memory_nodes() -> None:
    """POWER9: nodes 0 and 8, four threads a core, and the memory of a GPU as node 255."""
    nodes = (
        numa(0, "0-15", 0, distances=(10, 40, 80)),
        numa(8, "16-31", 8, distances=(40, 10, 80)),
        numa(255, "", None, distances=(80, 60, 10), kind=NumaKind.GPU_MEMORY),
    )
    cpu = Cpu(sockets=2, cores_per_socket=4, threads_per_core=4)
    made = profile(*nodes, cpu=cpu, gpus=(gpu(0, 0), gpu(1, 8), gpu(2, 255)))
    assert shape(made) == (SocketUnit.PACKAGE, 2, 4, 4)
    assert cores_of(made) == ["0-3", "4-7", "4-7"]


def test_a_gpu_on_a_node_without_cpus_and_distances_is_near_nothing() -> None:
    made = profile(numa(0, "0-3", 0), numa(1, "4-7", 1), numa(2, ""), cpu=TWO, gpus=(gpu(0, 2),))
    assert cores_of(made) == [""]


def test_unequal_numa_nodes_can_not_be_sockets() -> None:
    nodes = (numa(0, "0-1", 0), numa(1, "2-3", 0), numa(2, "4-7", 1))
    made = profile(*nodes, cpu=TWO, gpus=(gpu(0, 1), gpu(1, 2)))
    assert shape(made) == (SocketUnit.PACKAGE, 2, 4, 1)
    assert cores_of(made) == ["0-3", "4-7"]


def test_unequal_packages_have_no_boundary_that_slurm_knows() -> None:
    """With CPU 0 offline Slurm halves seven cores: its sockets are not the packages."""
    made = profile(numa(0, "1-3", 0), numa(1, "4-7", 1), cpu=TWO, gpus=(gpu(0, 0),))
    assert cores_of(made) == [""]


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
    assert cores_of(made) == [""]


# --- L3 caches


def near_a_cache(local: str, caches: tuple[str, ...] = ("0-3", "4-7", "8-11", "12-15")) -> Any:
    """Two packages of one NUMA node and two L3 caches each; the GPU's PCI device is near some."""
    cpu = Cpu(
        sockets=2,
        cores_per_socket=8,
        l3_caches=tuple(Cache(cpus=parse_cpulist(text)) for text in caches),
    )
    device = PciDevice(address="0000:01:00.0", kind=PciKind.GPU, local_cpus=parse_cpulist(local))
    one = gpu(0, 1, pci_bus_id="0000:01:00.0")
    nodes = (numa(0, "0-7", 0), numa(1, "8-15", 1))
    return profile(*nodes, cpu=cpu, gpus=(one,), pci_devices=(device,))


def test_a_gpu_near_one_l3_cache_makes_the_caches_sockets() -> None:
    made = near_a_cache("12-15")
    assert shape(made) == (SocketUnit.L3, 4, 4, 1)
    assert cores_of(made) == ["12-15"]


@pytest.mark.parametrize(
    ("local", "caches"),
    [
        ("8-15", ("0-3", "4-7", "8-11", "12-15")),
        ("12-15", ()),
        ("12-15", ("0-3", "4-7", "8-13", "14-15")),
        ("12-14", ("0-3", "4-7", "8-11", "12-15")),
    ],
    ids=["the whole NUMA node", "no cache known", "unequal caches", "a cut through a cache"],
)
def test_otherwise_packages_stay_sockets(local: str, caches: tuple[str, ...]) -> None:
    made = near_a_cache(local, caches)
    assert wanted(made) is SocketUnit.PACKAGE
    assert cores_of(made) == ["8-15"]


def test_local_cpus_count_where_the_numa_node_is_unknown() -> None:
    made = near_a_cache("8-15")
    made = replace(made, gpus=(replace(made.gpus[0], numa_node=None),))
    assert gpu_cpus(made.gpus[0], made) == frozenset(range(8, 16))
    assert cores_of(made) == ["8-15"]


# --- one setting for the whole cluster


NPS2 = profile(
    *(numa(i, f"{4 * i}-{4 * i + 3}", i // 2) for i in range(4)),
    cpu=Cpu(sockets=2, cores_per_socket=8),
)
PLAIN = profile(numa(0, "0-3", 0), numa(1, "4-7", 1), cpu=TWO)
ONE_NODE = profile(numa(0, "0-7"), cpu=TWO)


def test_a_cluster_takes_the_unit_that_some_of_it_need() -> None:
    assert settle([PLAIN, ONE_NODE]) is SocketUnit.PACKAGE
    assert settle([PLAIN, NPS2]) is SocketUnit.NUMA
    assert shape(PLAIN, SocketUnit.NUMA)[1:] == (2, 4, 1)


def test_one_numa_node_over_two_packages_is_one_socket_then() -> None:
    """slurmd takes the object above the first NUMA node, here the machine itself."""
    assert shape(ONE_NODE) == (SocketUnit.PACKAGE, 2, 4, 1)
    assert shape(ONE_NODE, SocketUnit.NUMA) == (SocketUnit.NUMA, 1, 8, 1)


@pytest.mark.parametrize(
    "other",
    [
        near_a_cache("12-15"),
        profile(numa(0, "0-1", 0), numa(1, "2-3", 0), numa(2, "4-7", 1), cpu=TWO),
    ],
    ids=["L3 caches there", "unequal NUMA nodes there"],
)
def test_needs_that_exclude_each_other_are_told(other: NodeProfile) -> None:
    assert settle([NPS2, other]) is None


# --- any machine


@settings(deadline=None)  # the machine may be busy
@given(machines(), st.sampled_from([None, *SocketUnit]))
def test_cores_are_whole_sockets_of_the_node_that_hold_the_gpus_cpus(
    made: NodeProfile, unit: SocketUnit | None
) -> None:
    form = layout(made, unit)
    assert form.sockets * form.cores_per_socket == made.cpu.cores
    for one in made.gpus:
        chosen = gpu_sockets(one, made, form)
        cores = set(parse_cpulist(form.cores(chosen)))
        assert cores <= set(range(made.cpu.cores))
        assert len(cores) == len(chosen) * form.cores_per_socket
        if chosen:
            near = frozenset().union(*(form.cpus[socket] for socket in chosen))
            assert gpu_cpus(one, made) <= near
