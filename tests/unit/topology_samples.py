"""Node profiles with a PCI tree, made up in the manner of real eight-GPU servers."""

from __future__ import annotations

from crater_slurm.model.profile import (
    Cache,
    Cpu,
    Gpu,
    Method,
    NodeProfile,
    NumaNode,
    NvLink,
    Nvme,
    PciDevice,
    PciKind,
    PciLink,
    Provenance,
)

GEN4_X16 = PciLink(speed_gt_s=16, width=16)
GEN4_X8 = PciLink(speed_gt_s=16, width=8)
GEN4_X4 = PciLink(speed_gt_s=16, width=4)


def pci(
    address: str,
    kind: PciKind,
    root: str | None = None,
    bridges: tuple[str, ...] = (),
    numa_node: int | None = None,
    names: tuple[str, ...] = (),
    link: PciLink | None = None,
    max_link: PciLink | None = None,
) -> PciDevice:
    return PciDevice(
        address=address,
        kind=kind,
        names=names,
        numa_node=numa_node,
        root=root,
        bridges=bridges,
        link=link,
        max_link=max_link,
    )


def numa_nodes(count: int, cores: int) -> tuple[NumaNode, ...]:
    """NUMA nodes of two packages, with distances 10, 12 within a package and 32 across."""
    half = max(count // 2, 1)
    return tuple(
        NumaNode(
            id=i,
            cpus=tuple(range(i * cores, (i + 1) * cores)),
            socket=i // half,
            memory_mib=257536,
            memory_bandwidth_gb_s=88.5 + i,
            distances=tuple(
                10 if i == j else 12 if i // half == j // half else 32 for j in range(count)
            ),
        )
        for i in range(count)
    )


def big_node() -> NodeProfile:
    """Four NUMA nodes, each with a switch that joins two GPUs, two NICs and a drive.

    GPU 5 runs at half of its lanes. Every GPU has twelve NVLinks to a switch of NVLink.
    """
    devices: list[PciDevice] = []
    gpus: list[Gpu] = []
    nvmes: list[Nvme] = []
    for i in range(4):
        root, bus = f"pci0000:{i * 4:x}0", f"{i * 4:x}"
        above = (f"0000:{bus}0:01.1", f"0000:{bus}1:00.0")
        for j in range(2):
            n = 2 * i + j
            port = (*above, f"0000:{bus}2:0{j}.0")
            link = GEN4_X8 if n == 5 else GEN4_X16
            address = f"0000:{bus}{3 + j}:00.0"
            devices.append(pci(address, PciKind.GPU, root, port, i, (), link, GEN4_X16))
            gpus.append(_gpu(n, address, i))
            port = (*above, f"0000:{bus}2:0{4 + j}.0")
            name = (f"mlx5_{n}", f"ib{n}")
            address = f"0000:{bus}{5 + j}:00.0"
            devices.append(pci(address, PciKind.NIC, root, port, i, name, GEN4_X16, GEN4_X16))
        address = f"0000:{bus}7:00.0"
        port = (*above, f"0000:{bus}2:08.0")
        name = (f"nvme{i}n1",)
        devices.append(pci(address, PciKind.NVME, root, port, i, name, GEN4_X4, GEN4_X4))
        nvmes.append(
            Nvme(name=f"nvme{i}n1", pci_bus_id=address, size_gb=3840, random_read_iops=1_000_000)
        )
    return NodeProfile(
        name="gn01",
        cpu=Cpu(
            model="AMD EPYC 7763 64-Core Processor",
            sockets=2,
            cores_per_socket=64,
            l3_caches=tuple(
                Cache(cpus=tuple(range(8 * i, 8 * i + 8)), size_kib=32768) for i in range(16)
            ),
        ),
        numa_nodes=numa_nodes(4, 32),
        gpus=tuple(gpus),
        nvmes=tuple(nvmes),
        pci_devices=tuple(devices),
        memory_mib=4 * 257536,
        source=Provenance(Method.MEASURED),
    )


def _gpu(index: int, address: str, numa_node: int) -> Gpu:
    return Gpu(
        index=index,
        model="a100-sxm4-80gb",
        pci_bus_id=f"0000{address.upper()}",
        numa_node=numa_node,
        compute_capability="8.0",
        nvlinks=tuple(NvLink(p, 600.0) for p in range(8) if p != index),
    )
