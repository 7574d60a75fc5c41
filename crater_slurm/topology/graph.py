"""How far apart two devices of a node are, in the classes of ``nvidia-smi topo -m``.

The classes come from the PCI tree as the kernel shows it, so they hold for NICs, drives and
GPUs of any make. A class is given only when every fact that it needs is known, and is ``?``
otherwise: a job that is told PIX and gets SYS is worse off than one that is told nothing.
"""

from __future__ import annotations

from crater_slurm.model.profile import Gpu, NodeProfile
from crater_slurm.topology.devices import Device, Kind, devices, of_kind

SELF, PIX, PXB, PHB, NODE, SYS = "X", "PIX", "PXB", "PHB", "NODE", "SYS"
NVLINK, LOCAL, UNKNOWN = "NV", "local", "?"

#: What each class means, nearest first; the order is that of ``nearest``.
CLASSES: dict[str, str] = {
    SELF: "the device itself",
    NVLINK: "NVLink; NV4 is four links",
    PIX: "at most one PCIe bridge (switch) between",
    PXB: "several PCIe bridges, without crossing the host bridge",
    PHB: "across the PCIe host bridge that both hang on",
    NODE: "across host bridges of one NUMA node",
    SYS: "across the interconnect between NUMA nodes",
    UNKNOWN: "not known: the PCI path or the NUMA node of one is missing",
}
#: GB/s of one NVLink, both directions together, by compute capability (NVIDIA's data sheets):
#: NVLink 1 has 40, 2 to 4 have 50, 5 has 100; GA10x boards run four links at half of the lanes.
_LINK_GB_S = {
    "6.0": 40.0,
    "7.0": 50.0,
    "7.5": 50.0,
    "8.0": 50.0,
    "8.6": 28.125,
    "9.0": 50.0,
    "10.0": 100.0,
    "10.3": 100.0,
}
#: Rounding in the profile, in links. Not more: 18 links at the line rate of a driver (26.562 GB/s
#: for 25) would pass for 19, so a bandwidth that includes the line code gives no number.
_LINK_TOLERANCE = 0.05
#: Behind every NUMA distance that the kernel can state (one byte).
_FAR = 256


def distance(a: Device, b: Device) -> str:
    """The class of the way between two devices of one node; symmetric.

    X     a is b.
    NV#   two GPUs joined by # NVLinks. ``NV`` when the number of links does not follow from the
          bandwidth, since the speed of one link of that GPU is not known.
    PIX   both hang on the same bridge or on two ports of one switch: below the last bridge that
          they share, each has one bridge at most.
    PXB   they share a bridge, and a longer way down to one of them.
    PHB   they share no bridge, but the host bridge.
    NODE  two host bridges of one NUMA node.
    SYS   two NUMA nodes, whether or not they are in one package.
    ?     a fact that decides is not known.

    Between a device and a NUMA node: ``local``, SYS or ?; between two NUMA nodes: SYS.
    """
    if a == b:
        return SELF
    if Kind.NUMA in (a.kind, b.kind):
        return _to_numa_node(a, b)
    return nvlink_class(a, b) or _pci_class(a, b)


def matrix(found: tuple[Device, ...]) -> list[list[str]]:
    """Classes of all pairs, in the order of the devices."""
    return [
        [SELF if i == j else distance(a, b) for j, b in enumerate(found)]
        for i, a in enumerate(found)
    ]


def nearest(profile: NodeProfile, gpu: Device, kind: Kind) -> list[tuple[Device, str]]:
    """Devices of a kind with their class, nearest to the GPU first.

    Among equals, the kernel's NUMA distance decides, then the profile's order. A device that is
    known to sit on the GPU's NUMA node, without its PCI path, comes after NODE; one of which
    nothing is known comes last.
    """
    found = [(device, distance(gpu, device)) for device in of_kind(devices(profile), kind)]
    return sorted(
        ((device, how) for device, how in found if how != SELF),
        key=lambda entry: (_rank(gpu, *entry), kernel_distance(profile, gpu, entry[0]) or _FAR),
    )


def same_numa_node(a: Device, b: Device) -> bool:
    """Whether both are known to be on one NUMA node."""
    return a.numa_node is not None and a.numa_node == b.numa_node


def kernel_distance(profile: NodeProfile, a: Device, b: Device) -> int | None:
    """The kernel's distance from a's NUMA node to b's (10 is local); None when unknown."""
    one, two = _position(profile, a), _position(profile, b)
    if one is None or two is None:
        return None
    row = profile.numa_nodes[one].distances
    return row[two] if len(row) == len(profile.numa_nodes) else None


def nvlink_class(a: Device, b: Device) -> str | None:
    """NV# of two GPUs, NV when the number is not known, None without NVLink between them."""
    links = _links(a, b) + _links(b, a)
    if not links:
        return None
    counts = [count for gpu, gb_s in links if (count := _count(gpu, gb_s)) is not None]
    return f"{NVLINK}{max(counts)}" if counts else NVLINK


def nvlink_gb_s(a: Device, b: Device) -> float | None:
    """GB/s of both directions between two GPUs; None when unknown or without NVLink."""
    known = [gb_s for _, gb_s in _links(a, b) + _links(b, a) if gb_s is not None]
    return max(known, default=None)


def _links(a: Device, b: Device) -> list[tuple[Gpu, float | None]]:
    """Links that a's entry names; one of the two may be silent about them."""
    if not isinstance(a.part, Gpu) or not isinstance(b.part, Gpu):
        return []
    return [(a.part, link.bandwidth_gb_s) for link in a.part.nvlinks if link.peer == b.part.index]


def _count(gpu: Gpu, gb_s: float | None) -> int | None:
    one = _LINK_GB_S.get(gpu.compute_capability or "")
    if one is None or gb_s is None:
        return None
    count = round(gb_s / one)
    return count if count and abs(gb_s / one - count) <= _LINK_TOLERANCE else None


def _pci_class(a: Device, b: Device) -> str:
    apart = None not in (a.numa_node, b.numa_node) and a.numa_node != b.numa_node
    if a.pci is None or b.pci is None:
        return SYS if apart else UNKNOWN
    if a.pci.address == b.pci.address:
        return PIX  # two namespaces of one drive
    shared = _shared(a.bridges, b.bridges)
    if shared:
        return PIX if max(len(a.bridges), len(b.bridges)) - shared <= 1 else PXB
    if a.pci.root is not None and a.pci.root == b.pci.root:
        return PHB
    if apart:
        return SYS
    roots_known = None not in (a.pci.root, b.pci.root)
    return NODE if roots_known and same_numa_node(a, b) else UNKNOWN


def _shared(one: tuple[str, ...], two: tuple[str, ...]) -> int:
    """How many bridges both share, from the outermost down."""
    count = 0
    for left, right in zip(one, two, strict=False):
        if left != right:
            break
        count += 1
    return count


def _to_numa_node(a: Device, b: Device) -> str:
    if a.kind is b.kind:
        return SYS
    if None in (a.numa_node, b.numa_node):
        return UNKNOWN
    return LOCAL if a.numa_node == b.numa_node else SYS


def _rank(gpu: Device, other: Device, how: str) -> int:
    order = list(CLASSES)
    if how == UNKNOWN and same_numa_node(gpu, other):
        return order.index(SYS)
    # Make room before SYS for the case above.
    place = order.index(NVLINK if how.startswith(NVLINK) else how)
    return place + (place >= order.index(SYS))


def _position(profile: NodeProfile, device: Device) -> int | None:
    """Place of the device's NUMA node in the profile, where the distances have their column."""
    wanted = device.number if device.kind is Kind.NUMA else device.numa_node
    found = (i for i, node in enumerate(profile.numa_nodes) if node.id == wanted)
    return next(found, None)
