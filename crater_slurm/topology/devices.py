"""The devices of a node with everything that says where they sit, put together once.

A GPU is known to Slurm (``gpus``), to the driver and to the PCI tree (``pci_devices``); a drive
likewise. They are matched by PCI address. A device that only the PCI tree knows is kept, under
a name of its own, since an admin looks for exactly that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from crater_slurm.model.profile import (
    Gpu,
    NodeProfile,
    NumaKind,
    NumaNode,
    Nvme,
    PciDevice,
    PciKind,
)

_ADDRESS = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")
#: Intel VMD numbers the buses behind it in domains of its own, from 10000 up.
_VMD_DIGITS = 5


class Kind(StrEnum):
    """What a device is; the order is that of rows in a matrix."""

    GPU = "gpu"
    NIC = "nic"
    NVME = "nvme"
    NUMA = "numa"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device and its place. ``id`` is its name in matrices, as nvidia-smi writes it: GPU0.

    ``number`` is the one in ``id``; ``names`` are what the system calls it. ``numa_node`` is None
    when it is not known; ``part`` is the device's own entry in the profile, if it has one.
    """

    id: str
    kind: Kind
    number: int
    names: tuple[str, ...] = ()
    model: str | None = None
    numa_node: int | None = None
    pci: PciDevice | None = None
    part: Gpu | Nvme | NumaNode | None = None

    @property
    def bridges(self) -> tuple[str, ...]:
        """Bridges above, outermost first, below the host bridge that the device hangs on.

        Behind Intel VMD the ports of the CPU are in a domain of their own, and VMD is the host
        bridge, so what is above it does not count.
        """
        if self.pci is None:
            return ()
        domain = self.pci.address.partition(":")[0]
        if len(domain) < _VMD_DIGITS:
            return self.pci.bridges
        return tuple(b for b in self.pci.bridges if b.partition(":")[0] == domain)


def devices(profile: NodeProfile) -> tuple[Device, ...]:
    """GPUs, NICs and NVMe drives of the node, in this order, each kind in the profile's order."""
    pci = {pci_address(d.address): d for d in profile.pci_devices}
    gpus = [_gpu(profile, gpu, pci) for gpu in profile.gpus]
    drives = [_drive(profile, i, drive, pci) for i, drive in enumerate(profile.nvmes)]
    taken = {device.pci.address for device in (*gpus, *drives) if device.pci}
    left = [device for device in profile.pci_devices if device.address not in taken]
    nics = [d for d in profile.pci_devices if d.kind is PciKind.NIC]
    others = [d for d in left if d.kind is PciKind.GPU]
    controllers = [d for d in left if d.kind is PciKind.NVME]
    return (
        *gpus,
        *(_bare(profile, "PCIGPU", Kind.GPU, i, d) for i, d in enumerate(others)),
        *(_bare(profile, "NIC", Kind.NIC, i, d) for i, d in enumerate(nics)),
        *drives,
        *(_bare(profile, "NVMe", Kind.NVME, len(drives) + i, d) for i, d in enumerate(controllers)),
    )


def numa_devices(profile: NodeProfile) -> tuple[Device, ...]:
    """The NUMA nodes as devices. GPU memory belongs to a GPU that the profile does not name."""
    return tuple(
        Device(
            id=f"NUMA{node.id}",
            kind=Kind.NUMA,
            number=node.id,
            numa_node=None if node.kind is NumaKind.GPU_MEMORY else node.id,
            part=node,
        )
        for node in profile.numa_nodes
    )


def of_kind(found: Iterable[Device], kind: Kind) -> list[Device]:
    return [device for device in found if device.kind is kind]


def pci_address(text: str | None) -> str | None:
    """An address in the kernel's form; the driver writes ``00000000:17:00.0`` in capitals."""
    match = _ADDRESS.fullmatch((text or "").strip().lower())
    return f"{int(match[1], 16):04x}:{match[2]}" if match else None


def _gpu(profile: NodeProfile, gpu: Gpu, pci: dict[str | None, PciDevice]) -> Device:
    address = pci_address(gpu.pci_bus_id)
    place = pci.get(address) if address else None
    return Device(
        id=f"GPU{gpu.index}",
        kind=Kind.GPU,
        number=gpu.index,
        names=place.names if place else (),
        model=gpu.model,
        numa_node=_numa(profile, gpu.numa_node, place),
        pci=place,
        part=gpu,
    )


def _drive(
    profile: NodeProfile, number: int, drive: Nvme, pci: dict[str | None, PciDevice]
) -> Device:
    address = pci_address(drive.pci_bus_id)
    place = pci.get(address) if address else None
    return Device(
        id=f"NVMe{number}",
        kind=Kind.NVME,
        number=number,
        names=(drive.name,),
        model=drive.model,
        numa_node=_numa(profile, drive.numa_node, place),
        pci=place,
        part=drive,
    )


def _bare(profile: NodeProfile, word: str, kind: Kind, number: int, place: PciDevice) -> Device:
    return Device(
        id=f"{word}{number}",
        kind=kind,
        number=number,
        names=place.names,
        model=place.model,
        numa_node=_numa(profile, None, place),
        pci=place,
    )


def _numa(profile: NodeProfile, stated: int | None, place: PciDevice | None) -> int | None:
    """The stated NUMA node, else PCI's, else the only one that all local CPUs are in.

    The kernel says -1 for unknown. With one NUMA node that has CPUs there is nothing to choose:
    host bridges hang on processors.
    """
    for node in (stated, place.numa_node if place else None):
        if node is not None and node >= 0:
            return node
    domains = profile.cpu_domains
    if len(domains) == 1:
        return domains[0].id
    local = set(place.local_cpus) if place else set()
    around = [node.id for node in domains if local & set(node.cpus)]
    return around[0] if len(around) == 1 else None
