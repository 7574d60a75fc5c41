"""Node profiles from the topology XML of NCCL and RCCL, as their libraries dump it.

NCCL names a switch by its upstream port alone and leaves root and downstream ports out. They are
put in with names of their own, one for each way down, as /sys shows them. Host bridges are not
in the XML, so they stay unknown.
"""

from __future__ import annotations

import xml.etree.ElementTree as Xml
from pathlib import Path

from crater_slurm.model.profile import Cpu, Gpu, NodeProfile, NumaNode, PciDevice, PciKind

_BRIDGE = "0x060400"
_NIC_GROUP = "0x02"


def read(path: Path) -> NodeProfile:
    """The profile of a file; GPUs are numbered as they come."""
    found: list[PciDevice] = []
    nodes: list[NumaNode] = []
    for cpu in Xml.fromstring(path.read_text()).iter("cpu"):
        node = int(cpu.get("numaid", ""))
        nodes.append(NumaNode(id=node, cpus=_cpus(cpu.get("affinity", ""))))
        for child in cpu.findall("pci"):
            found += _devices(child, (f"root port of {child.get('busid')}",), node)
    gpus = tuple(
        Gpu(index=i, model="gpu", pci_bus_id=device.address, numa_node=device.numa_node)
        for i, device in enumerate(d for d in found if d.kind is PciKind.GPU)
    )
    return NodeProfile(
        name=path.stem,
        cpu=Cpu(sockets=1, cores_per_socket=256),
        numa_nodes=tuple(sorted(nodes, key=lambda n: n.id)),
        gpus=gpus,
        pci_devices=tuple(found),
    )


def _devices(element: Xml.Element, above: tuple[str, ...], node: int) -> list[PciDevice]:
    address = element.get("busid", "")
    kind = element.get("class", "")
    if kind == _BRIDGE and (below := element.findall("pci")):
        return [
            device
            for child in below
            for device in _devices(child, (*above, address, f"port to {child.get('busid')}"), node)
        ]
    # A NIC that is a bridge to NCCL (a NIC with a switch inside) has its card below it.
    nic = kind.startswith(_NIC_GROUP) or element.find("nic") is not None
    names = tuple(net.get("name", "") for net in element.iter("net"))
    return [
        PciDevice(
            address=address,
            kind=PciKind.NIC if nic else PciKind.GPU,
            names=names,
            numa_node=node,
            bridges=above,
        )
    ]


def _cpus(affinity: str) -> tuple[int, ...]:
    bits = int(affinity.replace(",", "") or "0", 16)
    return tuple(i for i in range(bits.bit_length()) if bits >> i & 1)
