"""Distance classes on PCI trees small enough to read, and what must hold for any two devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from topology_samples import big_node, numa_nodes, pci
from topology_strategies import profiles

from crater_slurm.model.profile import (
    Cpu,
    Gpu,
    NodeProfile,
    NumaKind,
    NumaNode,
    NvLink,
    Nvme,
    PciDevice,
    PciKind,
)
from crater_slurm.topology.devices import Device, Kind, devices, numa_devices, pci_address
from crater_slurm.topology.graph import distance, kernel_distance, matrix, nearest
from crater_slurm.topology.links import link_groups

NIC, NVME = PciKind.NIC, PciKind.NVME


def node(*found: PciDevice, numa: int = 2, **parts: object) -> NodeProfile:
    cpu = Cpu(sockets=2, cores_per_socket=8)
    return NodeProfile(
        name="n1",
        cpu=cpu,
        numa_nodes=numa_nodes(numa, 4),
        pci_devices=found,
        **parts,  # type: ignore[arg-type]
    )


def between(one: PciDevice, two: PciDevice, numa: int = 2) -> str:
    """The class of two devices of a machine that has nothing else."""
    a, b = devices(node(one, two, numa=numa))
    return distance(a, b)


def at(
    address: str, root: str | None = "pci0000:00", *bridges: str, numa: int | None = 0
) -> PciDevice:
    return pci(address, NIC, root, bridges, numa)


SWITCH = ("0000:00:01.0", "0000:01:00.0")  # a root port, and the upstream port of a switch


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        pytest.param(
            at("0000:02:00.0", "pci0000:00", "0000:00:01.0"),
            at("0000:02:00.1", "pci0000:00", "0000:00:01.0"),
            "PIX",
            id="two functions of one card",
        ),
        pytest.param(
            at("0000:03:00.0", "pci0000:00", *SWITCH, "0000:02:00.0"),
            at("0000:04:00.0", "pci0000:00", *SWITCH, "0000:02:01.0"),
            "PIX",
            id="two ports of one switch",
        ),
        pytest.param(
            at("0000:03:00.0", "pci0000:00", *SWITCH, "0000:02:00.0"),
            at("0000:06:00.0", "pci0000:00", *SWITCH, "0000:02:01.0", "0000:04:00.0", "0000:05:0"),
            "PXB",
            id="a switch behind a switch",
        ),
        pytest.param(
            at("0000:02:00.0", "pci0000:00", "0000:00:01.0"),
            at("0000:03:00.0", "pci0000:00", "0000:00:02.0"),
            "PHB",
            id="two root ports of one host bridge",
        ),
        pytest.param(
            at("0000:00:04.0", "pci0000:00"),
            at("0000:00:05.0", "pci0000:00"),
            "PHB",
            id="two devices inside the processor",
        ),
        pytest.param(
            at("0000:02:00.0", "pci0000:00", "0000:00:01.0"),
            at("0000:42:00.0", "pci0000:40", "0000:40:01.0"),
            "NODE",
            id="two host bridges of one NUMA node",
        ),
        pytest.param(
            at("0000:02:00.0", "pci0000:00", "0000:00:01.0"),
            at("0000:82:00.0", "pci0000:80", "0000:80:01.0", numa=1),
            "SYS",
            id="two NUMA nodes",
        ),
        pytest.param(
            at("0000:02:00.0", None), at("0000:82:00.0", None, numa=1), "SYS", id="NUMA nodes alone"
        ),
        pytest.param(
            at("0000:02:00.0", None), at("0000:03:00.0", None), "?", id="one NUMA node, no paths"
        ),
        pytest.param(
            at("0000:02:00.0", "pci0000:00", numa=None),
            at("0000:42:00.0", "pci0000:40"),
            "?",
            id="two host bridges, one on an unknown NUMA node",
        ),
        pytest.param(
            at("0000:02:00.0", "pci0000:00", "0000:00:01.0", numa=None),
            at("0000:03:00.0", "pci0000:00", "0000:00:02.0", numa=None),
            "PHB",
            id="a shared host bridge needs no NUMA node",
        ),
        pytest.param(
            at("10000:01:00.0", "pci0000:80", "0000:80:05.5", "10000:00:02.0"),
            at("10000:02:00.0", "pci0000:80", "0000:80:05.5", "10000:00:03.0"),
            "PHB",
            id="two drives behind Intel VMD, each on a port of the processor",
        ),
    ],
)
def test_the_class_follows_from_the_path(one: PciDevice, two: PciDevice, expected: str) -> None:
    assert between(one, two) == expected
    assert between(two, one) == expected


def test_the_only_numa_node_is_that_of_a_device_that_names_none() -> None:
    """The kernel says -1 on machines without NUMA tables."""
    left = at("0000:02:00.0", "pci0000:00", numa=-1)
    right = at("0000:42:00.0", "pci0000:40", numa=None)
    assert between(left, right, numa=1) == "NODE"
    assert between(left, right, numa=2) == "?"


def test_local_cpus_name_the_numa_node_when_they_are_in_one() -> None:
    inside = replace(at("0000:02:00.0", numa=None), local_cpus=(5, 6))
    across = replace(at("0000:03:00.0", numa=None), local_cpus=(3, 4))
    assert [device.numa_node for device in devices(node(inside, across))] == [1, None]


def test_two_namespaces_of_one_drive_are_pix() -> None:
    drive = pci("0000:00:02.0", NVME, "pci0000:00", (), 0)
    names = tuple(Nvme(name=f"nvme0n{i}", pci_bus_id="0000:00:02.0") for i in (1, 2))
    a, b = devices(node(drive, nvmes=names))
    assert distance(a, b) == "PIX"


def test_a_drive_and_a_gpu_are_found_by_their_address_however_it_is_written() -> None:
    """The driver pads the domain to eight digits and writes capitals."""
    assert pci_address("00000000:C1:00.0") == "0000:c1:00.0"
    assert pci_address("10000:01:00.0") == "10000:01:00.0"
    assert pci_address("c1:00.0") is None
    found = {device.id: device for device in devices(big_node())}
    assert found["GPU7"].pci is not None
    assert found["GPU7"].pci.address == "0000:c4:00.0"
    assert found["NVMe3"].names == ("nvme3n1",)


def test_a_gpu_that_slurm_does_not_know_is_kept_under_its_own_name() -> None:
    profile = node(pci("0000:03:00.0", PciKind.GPU, None, (), 0), gpus=(Gpu(index=0, model="l4"),))
    assert [device.id for device in devices(profile)] == ["GPU0", "PCIGPU0"]


@pytest.mark.parametrize(
    ("capability", "gb_s", "expected"),
    [
        ("8.0", 600, "NV12"),  # A100: twelve of 50 GB/s
        ("9.0", 900, "NV18"),  # H100: eighteen
        ("9.0", 956.2, "NV"),  # 18 at the driver's line rate of 26.562 GB/s look like 19.1
        ("7.0", 100, "NV2"),
        ("6.0", 80, "NV2"),  # NVLink 1 has 40 GB/s
        ("10.0", 1800, "NV18"),  # NVLink 5 has 100 GB/s
        ("8.6", 112.5, "NV4"),  # RTX A6000
        ("8.0", 70, "NV"),  # no number of links gives that
        ("gfx942", 128, "NV"),
        (None, 600, "NV"),
        ("8.0", None, "NV"),
    ],
)
def test_links_are_counted_only_where_the_speed_of_one_is_known(
    capability: str | None, gb_s: float | None, expected: str
) -> None:
    """GPU 1 does not name the link: one side is enough, and the class stays symmetric."""
    gpus = (
        Gpu(index=0, model="m", compute_capability=capability, nvlinks=(NvLink(1, gb_s),)),
        Gpu(index=1, model="m", compute_capability=capability),
    )
    a, b = devices(node(gpus=gpus))
    assert distance(a, b) == distance(b, a) == expected


def test_a_numa_node_is_local_or_not_and_gpu_memory_is_not_known() -> None:
    profile = node(at("0000:02:00.0", numa=1))
    memory = NumaNode(id=2, cpus=(), kind=NumaKind.GPU_MEMORY)
    profile = replace(profile, numa_nodes=(*numa_nodes(2, 4), memory))
    (nic,) = devices(profile)
    nodes = numa_devices(profile)
    assert [distance(nic, n) for n in nodes] == ["SYS", "local", "?"]
    assert [distance(nodes[0], n) for n in nodes] == ["X", "SYS", "SYS"]


def test_the_nearest_come_first_and_the_kernel_decides_among_equals() -> None:
    """GPU 0 on NUMA node 0 of four: drives on nodes 2 (32 away), 1 (12 away), 0, and nowhere."""
    drives = tuple(
        Nvme(name=f"nvme{i}n1", numa_node=numa) for i, numa in enumerate((2, 1, 0, None))
    )
    profile = node(numa=4, gpus=(Gpu(index=0, model="l4", numa_node=0),), nvmes=drives)
    gpu = devices(profile)[0]
    found = nearest(profile, gpu, Kind.NVME)
    assert [(device.names[0], how) for device, how in found] == [
        ("nvme2n1", "?"),
        ("nvme1n1", "SYS"),
        ("nvme0n1", "SYS"),
        ("nvme3n1", "?"),
    ]
    assert [kernel_distance(profile, gpu, device) for device, _ in found] == [10, 12, 32, None]


def test_the_pairs_of_a_big_node_are_on_its_switches() -> None:
    profile = big_node()
    found = {device.id: device for device in devices(profile)}
    pairs = nearest(profile, found["GPU5"], Kind.NIC)[:3]
    assert [(device.id, how) for device, how in pairs] == [
        ("NIC4", "PIX"),
        ("NIC5", "PIX"),
        ("NIC6", "SYS"),
    ]
    assert distance(found["GPU4"], found["GPU5"]) == "NV12"
    assert distance(found["NIC4"], found["NVMe2"]) == "PIX"
    assert distance(found["NIC3"], found["NIC4"]) == "SYS"


def test_links_are_grouped_by_what_they_join() -> None:
    """Two bridged pairs, and a third GPU that only one of the first pair reaches."""
    links = {0: (1, 4), 1: (0,), 2: (3,), 3: (2,), 4: (0,)}
    gpus = tuple(
        Gpu(
            index=i,
            model="a30",
            compute_capability="8.0",
            nvlinks=tuple(NvLink(peer, 200.0) for peer in peers),
        )
        for i, peers in links.items()
    )
    groups = link_groups(devices(node(gpus=gpus)))
    assert [(g.gpus, g.pairs, g.name, g.complete) for g in groups] == [
        ((0, 1, 4), ((0, 1), (0, 4)), "NV4", False),
        ((2, 3), ((2, 3),), "NV4", True),
    ]


@settings(max_examples=60)
@given(profiles())
def test_distances_are_symmetric_for_any_node(profile: NodeProfile) -> None:
    found: tuple[Device, ...] = (*devices(profile), *numa_devices(profile))[:24]
    table = matrix(found)
    for i, row in enumerate(table):
        assert row[i] == "X"
        assert row == [other[i] for other in table]
