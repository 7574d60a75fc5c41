"""The readers against hwloc's own expected facts, over its captured and its made-up machines.

One test for each ``*.test`` file below ``hwloc`` in the folder that CRATER_TEST_DATA names. Where
hwloc's view differs on purpose (options, overrides, inferred locality), the rest is compared, and
the reason stands where the choice is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from captured import DATA, unpack
from hwloc_case import Case, read_case
from hwloc_facts import Facts, Pci, bitmap, read_facts

from crater_slurm.model.profile import NumaKind, NumaNode, PciDevice, PciKind
from crater_slurm.probe import cpus
from crater_slurm.probe.profile import Scan, scan

TESTS = sorted((DATA / "hwloc").rglob("*.test"))

#: hwloc keeps GPU memory as NUMA nodes except on POWER, unless it is told.
KEEP_GPU_NODES = "HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES"
OVERLAPPING = "HWLOC_DEBUG_ALLOW_OVERLAPPING_NODE_CPUSETS"
PACKAGES, CORES = ("package_cpus", "core_siblings"), ("core_cpus", "thread_siblings")
#: Options that leave out levels which add no structure: what is left must still be ours.
MERGING = ("--merge", "--ignore", "--filter", "--only", "--restrict", "--no-smt")


@dataclass(frozen=True)
class View:
    """hwloc's facts, our scan, and what of the machine hwloc shows."""

    case: Case
    facts: Facts
    scan: Scan
    layout: cpus.Topology
    root: Path
    allowed: frozenset[int]

    def has(self, *options: str) -> bool:
        return any(option in options for option in self.case.options)

    @property
    def merging(self) -> bool:
        return any(option.startswith(MERGING) for option in self.case.options)

    def shown(self, groups: Iterable[Iterable[int]]) -> set[frozenset[int]]:
        """Groups of CPUs without those that hwloc does not show."""
        return {frozenset(g) & self.allowed for g in groups if frozenset(g) & self.allowed}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """Tarballs that were unpacked already, with their folder."""
    return {}


def machine(source: Path, unpacked: dict[Path, Path], factory: pytest.TempPathFactory) -> Path:
    """The root of the machine in a tarball; those with CPUID dumps have it below fsroot."""
    if source not in unpacked:
        folder = factory.mktemp("machine")
        unpack(source, folder)
        places = (folder, *folder.glob("*/"), *folder.glob("*/fsroot/"))
        unpacked[source] = next((p for p in places if (p / "sys").is_dir()), folder)
    return unpacked[source]


@pytest.mark.skipif(not TESTS, reason=f"no hwloc machines in {DATA} (CRATER_TEST_DATA)")
@pytest.mark.parametrize("path", TESTS or [None], ids=lambda p: p.stem if p else "none")
def test_the_readers_agree_with_hwloc(
    path: Path, unpacked: dict[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = read_case(path)
    if not case.source.is_file():
        pytest.skip(f"{case.source.name} is not there")
    root = machine(case.source, unpacked, tmp_path_factory)
    if not (root / "sys").is_dir():
        pytest.skip("CPUID dumps only: there is no /sys to read")
    view = make_view(case, root)
    cpus_agree(view)
    caches_agree(view)
    nodes_agree(view)
    distances_agree(view)
    firmware_agrees(view)
    devices_agree(view)


def make_view(case: Case, root: Path) -> View:
    found = scan("n1", root)
    layout = cpus.topology(root)
    facts = read_facts(case.target)
    allowed = set(layout.online)
    # hwloc leaves out what the process may not use, unless it is told to keep it.
    if not {"--disallowed", "--whole-system", "--allow"} & set(case.options):
        allowed &= set(found.limits.cpus)
    if "--restrict" in case.options:
        allowed &= bitmap(case.options[case.options.index("--restrict") + 1])
    return View(case, facts, found, layout, root, frozenset(allowed))


# --- CPUs


def cpus_agree(view: View) -> None:
    assert view.facts.pus == view.allowed
    packages = view.shown(view.layout.packages)
    cores = view.shown(view.layout.cores)
    assert view.facts.packages <= packages
    assert view.facts.cores <= cores
    if view.merging:
        return
    if view.facts.packages and nested(view, *PACKAGES):
        assert view.facts.packages == packages
    if view.facts.cores and nested(view, *CORES):
        assert view.facts.cores == cores  # a kernel without core files has no cores for hwloc


def nested(view: View, *names: str) -> bool:
    """Whether the kernel's masks hold together; hwloc drops an object that cuts through others."""
    sets = {frozenset(mask) for mask in masks(view, *names)}
    return not any(a & b and not (a <= b or b <= a) for a in sets for b in sets)


def masks(view: View, *names: str) -> list[frozenset[int]]:
    base = view.root / "sys/devices/system/cpu"
    files = (base / f"cpu{c}/topology" / name for c in view.layout.online for name in names)
    return [
        bitmap(f.read_text().strip("\0\n ")) & set(view.layout.online) for f in files if f.is_file()
    ]


def caches_agree(view: View) -> None:
    expected = view.facts.l3
    if view.has("--no-caches", "--no-useless-caches"):
        return
    ours = {
        frozenset(c.cpus) & view.allowed: c.size_kib
        for c in view.scan.profile.cpu.l3_caches
        if frozenset(c.cpus) & view.allowed
    }
    for group, size_kib in expected.items():
        assert group in ours
        # The text rounds to a whole unit of at least ten.
        assert ours[group] is None or abs((ours[group] or 0) - size_kib) <= size_kib // 10
    if not view.merging and nested_caches(view):
        assert set(expected) == set(ours)


def nested_caches(view: View) -> bool:
    """Whether hwloc could keep every cache: none cuts through a package or through another."""
    base = view.root / "sys/devices/system/cpu"
    texts = (f.read_text() for f in base.glob("cpu[0-9]*/cache/index*/shared_cpu_map"))
    sets = {bitmap(text.strip("\0\n ")) for text in texts}
    sets |= set(map(frozenset, view.layout.packages))
    return nested(view, *PACKAGES) and not any(
        a & b and not (a <= b or b <= a) for a in sets for b in sets
    )


# --- NUMA nodes


def shown_nodes(view: View) -> dict[int, NumaNode]:
    """Our nodes that hwloc shows as well."""
    nodes = {n.id: n for n in view.scan.profile.numa_nodes}
    if not view.has("--disallowed", "--whole-system"):
        nodes = {i: n for i, n in nodes.items() if i in view.scan.limits.memory_nodes}
    keep = view.case.env.get(KEEP_GPU_NODES)
    if (keep == "0") if keep is not None else is_power(view):
        nodes = {i: n for i, n in nodes.items() if n.kind is not NumaKind.GPU_MEMORY}
    return nodes


def is_power(view: View) -> bool:
    return (view.facts.machine or view.scan.profile.cpu.arch or "").startswith(("ppc", "power"))


def nodes_agree(view: View) -> None:
    ours = shown_nodes(view)
    expected = view.facts.nodes
    # hwloc may leave out nodes without memory, and with an override shows nodes that claim the
    # CPUs of others, which can't be on Linux and which we leave out.
    filled = {i for i, n in ours.items() if n.memory_mib != 0}
    assert filled <= set(expected)
    if view.case.env.get(OVERLAPPING, "0") == "0":
        assert set(expected) <= set(ours)
    for node, thing in expected.items():
        if node not in ours:
            continue
        if ours[node].cpus and set(ours[node].cpus) & view.allowed:
            near = frozenset(ours[node].cpus) | initiator_cpus(view, node)
            place_agrees(view, near, thing.cpus, f"devices/system/node/node{node}/cpumap")
        # Without CPUs of its own, the CPUs that hwloc states are the ones it takes as nearest.
        memory_agrees(view, node)


def initiator_cpus(view: View, node: int) -> set[int]:
    """CPUs of other nodes that the firmware calls as near; hwloc adds them to the node's own."""
    base = view.root / f"sys/devices/system/node/node{node}"
    folder = base / "access1/initiators"
    folder = folder if folder.is_dir() else base / "access0/initiators"
    names = [p.name for p in folder.glob("node[0-9]*")]
    owners = {f"node{n.id}": n.cpus for n in view.scan.profile.numa_nodes}
    return {cpu for name in names for cpu in owners.get(name, ())}


def memory_agrees(view: View, node: int) -> None:
    stated = view.facts.memory.get(node)
    ours = shown_nodes(view)[node].memory_mib
    if stated is None or ours is None:
        assert not (stated and stated.size)
        return
    if stated.unit == 1:
        assert stated.size // 2**20 == ours
    else:
        assert abs(ours * 2**20 - stated.size) <= stated.unit // 2 + 2**20


def distances_agree(view: View) -> None:
    nodes = view.scan.profile.numa_nodes
    order = [n.id for n in nodes]
    ours = {n.id: dict(zip(order, n.distances, strict=False)) for n in nodes}
    for row, values in view.facts.distances.items():
        for column, value in values.items():
            if row in ours and column in ours:
                assert ours[row].get(column) == value, f"{row} to {column}"


def firmware_agrees(view: View) -> None:
    if view.case.env.get("HWLOC_USE_NUMA_INITIATORS") == "0":
        return
    nodes = {n.id: n for n in view.scan.profile.numa_nodes}
    for node, mib_s in view.facts.attributes.get("ReadBandwidth", {}).items():
        if nodes[node].kind is not None:
            assert nodes[node].firmware_bandwidth_gb_s == pytest.approx(mib_s * 2**20 / 1e9, 1e-3)
    for node, latency_ns in view.facts.attributes.get("ReadLatency", {}).items():
        assert nodes[node].firmware_latency_ns == latency_ns


# --- PCI devices


def devices_agree(view: View) -> None:
    ours = {d.address: d for d in view.scan.profile.pci_devices}
    for address, expected in view.facts.pci.items():
        if address in ours:
            device_agrees(view, ours[address], expected)
        else:
            assert not wanted(view, address, expected), f"{address} was not found"


def wanted(view: View, address: str, expected: Pci) -> bool:
    """NICs and NVMe drives; GPUs need a vendor, which hwloc does not judge by."""
    virtual = (view.root / "sys/bus/pci/devices" / address / "physfn").is_symlink()
    return not virtual and (expected.class_id >> 8 == 0x02 or expected.class_id == 0x0108)


def device_agrees(view: View, ours: PciDevice, expected: Pci) -> None:
    kinds = {0x02: PciKind.NIC, 0x01: PciKind.NVME, 0x03: PciKind.GPU, 0x12: PciKind.GPU}
    assert ours.kind is kinds[expected.class_id >> 8]
    # hwloc shows a bridge only where the capture has its registers; the order must be ours.
    rest = iter(ours.bridges)
    assert all(bridge in rest for bridge in expected.bridges), ours.address
    if expected.names and ours.names:
        known = set(ours.names)
        assert {n for n in expected.names if not is_other_device(n)} <= known
    if ours.link and expected.link_gb_s:
        assert ours.link.bandwidth_gb_s == pytest.approx(expected.link_gb_s, abs=0.01)
    if ours.root and expected.host and ours.root.split(":")[0] == expected.host.split(":")[0]:
        assert ours.root == expected.host  # Intel VMD's own domain has no host bridge
    locality_agrees(view, ours, expected)


def is_other_device(name: str) -> bool:
    """DMA channels, frame buffers and the like, which carry no data of a job."""
    return re.match(r"(dma\d|card|render|controlD|fb|hfi|nvme\d+$)", name) is not None


def locality_agrees(view: View, ours: PciDevice, expected: Pci) -> None:
    if "HWLOC_PCI_LOCALITY" in view.case.env or any(
        name.startswith("HWLOC_PCI_") and name.endswith("LOCALCPUS") for name in view.case.env
    ):
        return  # an override that the kernel knows nothing of
    together = {
        frozenset(d.local_cpus)
        for d in view.scan.profile.pci_devices
        if d.root is not None and d.root == ours.root
    }
    if len(together) > 1:
        return  # hwloc places a whole host bridge at one place, that of its first device
    near = frozenset(ours.local_cpus) & view.allowed
    whole = view.facts.root.cpus
    if not near:
        assert expected.cpus == whole
    else:
        place_agrees(view, near, expected.cpus, f"bus/pci/devices/{ours.address}/local_cpus")


def place_agrees(
    view: View, ours: frozenset[int], expected: frozenset[int], kernel_file: str
) -> None:
    """Our CPUs are those of hwloc's object, or lie in it where no object can hold just them."""
    near = ours & view.allowed
    if near == expected:
        return
    assert near <= expected, kernel_file
    objects = {t.cpus for t in view.facts.root.below()} | set(masks(view, *PACKAGES, *CORES))
    assert any(near & o and not (near <= o or o <= near) for o in objects), kernel_file
    stated = bitmap((view.root / "sys" / kernel_file).read_text().strip("\0\n "))
    assert near == stated & view.allowed, kernel_file
