"""Distance classes of real machines, against what a person reads in their captured PCI trees.

The captures are in the folder that CRATER_TEST_DATA names. Expected classes were worked out by
hand from the XML or from hwloc's drawing of the machine, not from what the code says.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from captured import DATA, unpack
from topology_xml import read

from crater_slurm.probe.profile import scan
from crater_slurm.topology import text
from crater_slurm.topology.devices import Device, Kind, devices, of_kind
from crater_slurm.topology.graph import CLASSES, distance, matrix, nearest

CAPTURES = DATA / "captures"
TOPO_M = sorted((CAPTURES / "nvidia_gpu_exporter/topo-m").glob("*.txt"))
XML = sorted(CAPTURES.glob("*topo/*topo*.xml"))

pytestmark = pytest.mark.skipif(
    not CAPTURES.is_dir(), reason=f"no captures in {DATA} (CRATER_TEST_DATA)"
)


def machine(name: str) -> tuple[Device, ...]:
    (path,) = [path for path in XML if path.stem == name]
    return devices(read(path))


def pairs(found: tuple[Device, ...]) -> dict[tuple[str, str], str]:
    """Classes by the short bus ids that the XML has."""
    ids = [device.pci.address.removeprefix("0000:") for device in found if device.pci]
    table = matrix(found)
    return {(a, b): table[i][j] for i, a in enumerate(ids) for j, b in enumerate(ids)}


@pytest.mark.parametrize(
    ("name", "one", "two", "expected"),
    [
        # Azure ND A100 v4: two GPUs and two NICs below one (virtual) switch of a NUMA node.
        ("ndv4-topo", "0003:00:00.0", "0103:00:00.0", "PIX"),
        ("ndv4-topo", "0003:00:00.0", "0004:00:00.0", "PIX"),
        ("ndv4-topo", "0003:00:00.0", "0001:00:00.0", "SYS"),
        # ND H100 v5: a switch for each GPU and its NIC; what joins switches is not in the XML.
        ("ndv5-topo", "0001:00:00.0", "0101:00:00.0", "PIX"),
        ("ndv5-topo", "0001:00:00.0", "0002:00:00.0", "?"),
        ("ndv5-topo", "0001:00:00.0", "0009:00:00.0", "SYS"),
        # NDv2: no switch at all.
        ("ndv2-topo", "0001:00:00.0", "0101:00:00.0", "?"),
        ("ndv2-topo", "0005:00:00.0", "0101:00:00.0", "SYS"),
        # NC A100 v4: each GPU on a NUMA node of its own.
        ("ncv4-topo", "0001:00:00.0", "0002:00:00.0", "SYS"),
        # MI100, four NUMA nodes: 43 > 46 > 48 > GPU 4a, 43 > 4c > 4e > GPU 50, 43 > NIC 45.
        ("topo_8p_rome_4nics", "4a:00.0", "50:00.0", "PXB"),
        ("topo_8p_rome_4nics", "4a:00.0", "45:00.0", "PXB"),
        ("topo_8p_rome_4nics", "4a:00.0", "0a:00.0", "SYS"),
        # MI200, 41 > 49 > {4c > GPU 4e, 4f > GPU 51, NIC 4b}, 41 > 52 > {..., NIC 5a}.
        ("topo_16p1h", "4e:00.0", "51:00.0", "PXB"),
        ("topo_16p1h", "4e:00.0", "4b:00.0", "PXB"),
        ("topo_16p1h", "4b:00.0", "5a:00.0", "PXB"),
        ("topo_16p1h", "4e:00.0", "0e:00.0", "SYS"),
        # 19 > 25 > {27 > GPU 29, 2a > GPU 2c, ...}, 19 > 1b > {NIC 1d, NIC 1e}.
        ("topo_8p1h", "1d:00.0", "1e:00.0", "PIX"),
        ("topo_8p1h", "29:00.0", "2c:00.0", "PXB"),
        ("topo_8p1h", "29:00.0", "1d:00.0", "PXB"),
        # One package: 18 > {1b > GPU 1d, 1e > GPU 20, NIC 1a}, 3b > {3d > GPU 3f, NIC 4c}.
        ("topo_8p_pcie_2nic", "1d:00.0", "20:00.0", "PXB"),
        ("topo_8p_pcie_2nic", "1d:00.0", "1a:00.0", "PXB"),
        ("topo_8p_pcie_2nic", "3f:00.0", "4c:00.0", "PXB"),
        ("topo_8p_pcie_2nic", "1d:00.0", "4c:00.0", "?"),
        # MI300X: 05 > 08 > 0a > GPU 0c, 05 > NIC 07; 0e > 11 > 13 > GPU 15.
        ("topo_8p_940", "0c:00.0", "07:00.0", "PXB"),
        ("topo_8p_940", "0c:00.0", "15:00.0", "?"),
        ("topo_8p_940", "0c:00.0", "9f:00.0", "SYS"),
        # 61 > GPU 63, 22 > GPU 24, NIC 1a by itself; e1 > GPU e3 on the other NUMA node.
        ("topo_8p6l_6nic", "63:00.0", "24:00.0", "?"),
        ("topo_8p6l_6nic", "63:00.0", "1a:00.0", "?"),
        ("topo_8p6l_6nic", "63:00.0", "e3:00.0", "SYS"),
    ],
)
def test_classes_of_real_pci_trees(name: str, one: str, two: str, expected: str) -> None:
    table = pairs(machine(name))
    assert table[one, two] == table[two, one] == expected


@pytest.mark.parametrize(
    ("name", "count", "within"),
    [
        ("ndv4-topo", 16, "PIX"),  # all four devices of a NUMA node are on its switch
        ("topo_8p_rome_4nics", 12, "PXB"),
        ("topo_16p1h", 24, "PXB"),
        ("topo_8p6l_6nic", 14, "?"),
    ],
)
def test_whole_matrices_where_a_numa_node_has_one_class(name: str, count: int, within: str) -> None:
    found = machine(name)
    assert len(found) == count
    for a in found:
        for b in found:
            inside = "X" if a is b else within
            assert distance(a, b) == (inside if a.numa_node == b.numa_node else "SYS")


@pytest.mark.parametrize(
    ("name", "how", "pairs_by_hand"),
    [
        (
            "ndv5-topo",
            "PIX",
            {
                "0001:00:00.0": "0101:00:00.0",
                "0002:00:00.0": "0102:00:00.0",
                "0003:00:00.0": "0103:00:00.0",
                "0008:00:00.0": "0104:00:00.0",
            },
        ),
        (
            "topo_8p_940",
            "PXB",
            {
                "0000:0c:00.0": "0000:07:00.0",
                "0000:15:00.0": "0000:10:00.0",
                "0000:1e:00.0": "0000:19:00.0",
                "0000:69:00.0": "0000:64:00.0",
            },
        ),
    ],
)
def test_each_gpu_is_paired_with_the_nic_of_its_switch(
    name: str, how: str, pairs_by_hand: dict[str, str]
) -> None:
    (path,) = [path for path in XML if path.stem == name]
    profile = read(path)
    found = {}
    for gpu in of_kind(devices(profile), Kind.GPU)[:4]:
        (first, first_how), (_, next_how) = nearest(profile, gpu, Kind.NIC)[:2]
        assert (first_how, next_how) == (how, "?")
        assert gpu.pci and first.pci
        found[gpu.pci.address] = first.pci.address
    assert found == pairs_by_hand


@pytest.mark.parametrize("path", XML, ids=lambda p: p.stem)
def test_every_real_machine_draws_within_its_width(path: Path) -> None:
    profile = read(path)
    drawing = text.draw(profile)
    assert max(map(len, drawing.splitlines())) <= 100
    for gpu in of_kind(devices(profile), Kind.GPU):
        assert re.search(rf"\bGPU{gpu.number}\b", drawing)


@pytest.mark.parametrize("path", TOPO_M, ids=lambda p: p.stem)
def test_the_names_and_their_order_are_those_of_nvidia_smi(path: Path) -> None:
    legend = re.findall(r"^  (\S+) += Connection", path.read_text(), re.MULTILINE)
    ours = [name + "#" if name == "NV" else name for name in CLASSES if name not in ("X", "?")]
    assert sorted(legend) == sorted(ours)
    # nvidia-smi goes from the farthest to the nearest, with NVLink apart.
    assert [n for n in reversed(legend) if n != "NV#"] == [n for n in ours if n != "NV#"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # eth0 and eth1 are functions of one card; the drive hangs on their host bridge; ib0 is
        # on the other package.
        (
            "32em64t-2n8c+dax+nvme+mic+dimms",
            {
                ("eth0", "eth1"): "PIX",
                ("eth0", "nvme0n1"): "PHB",
                ("eth0", "ib0"): "SYS",
                ("ib0", "nvme0n1"): "SYS",
            },
        ),
        # Two cards with two ports each, on two root ports of one host bridge.
        (
            "fakepcilocalities",
            {("eth0", "eth1"): "PIX", ("eth2", "eth3"): "PIX", ("eth1", "eth2"): "PHB"},
        ),
    ],
)
def test_classes_of_scanned_machines(
    name: str, expected: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    source = DATA / "hwloc" / f"{name}.tar.bz2"
    if not source.is_file():
        pytest.skip(f"{source} is not there")
    unpack(source, tmp_path)
    (root,) = [folder for folder in tmp_path.iterdir() if folder.is_dir()]
    found = {device.names[0]: device for device in devices(scan("n1", root).profile)}
    assert {pair: distance(found[pair[0]], found[pair[1]]) for pair in expected} == expected
