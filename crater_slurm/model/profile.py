"""A node as crater knows it: GPUs, NUMA nodes, CPU, NVMe, each value with method and time.

Units are in the field names. ``None`` means unknown, and a requirement never matches unknown.
Where a value comes from is kept beside the values, by path (``gpus[0].memory_mib``), so that
the values stay plain numbers for the code that compares them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


class Method(StrEnum):
    """How a value came to be known; the order is the order of trust."""

    MEASURED = "measured"
    DERIVED = "derived"
    CATALOGUE = "catalogue"
    DECLARED = "declared"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where one value comes from: its method, and when it was taken (UTC, None if unknown).

    ``override``: an admin put this value over a more trusted one, and it stays there.
    """

    method: Method
    time: datetime | None = None
    override: bool = False


class NumaKind(StrEnum):
    """What a NUMA node is made of. Only one with CPUs can hold a job."""

    CPU = "cpu"
    MEMORY = "memory"
    GPU_MEMORY = "gpu_memory"


class PciKind(StrEnum):
    """The PCI devices that a job's data passes through."""

    GPU = "gpu"
    NIC = "nic"
    NVME = "nvme"


@dataclass(frozen=True, slots=True)
class NvLink:
    """A link to another GPU of the same node; bandwidth is the total of both directions."""

    peer: int
    bandwidth_gb_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. ``index`` is its place in Slurm's GPU list of the node (File= order)."""

    index: int
    model: str
    gres_type: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    numa_node: int | None = None
    sm_count: int | None = None
    tensor_cores: bool | None = None
    memory_mib: int | None = None
    memory_bandwidth_gb_s: float | None = None
    precisions: frozenset[str] | None = None
    compute_capability: str | None = None
    nvlinks: tuple[NvLink, ...] = ()
    mig_capable: bool | None = None
    mig_instances: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node: its CPUs as the kernel numbers them (one entry per hardware thread).

    ``distances`` are the kernel's, ``remote_bandwidth_gb_s`` is what this node's CPUs reach in the
    memory of each node; both have one entry per NUMA node of the profile, in its order. What the
    firmware states (HMAT, for the nearest CPUs) is never used where a measurement is.
    """

    id: int
    cpus: tuple[int, ...]
    kind: NumaKind | None = None
    socket: int | None = None
    memory_mib: int | None = None
    memory_bandwidth_gb_s: float | None = None
    distances: tuple[int, ...] = ()
    remote_bandwidth_gb_s: tuple[float, ...] = ()
    firmware_bandwidth_gb_s: float | None = None
    firmware_latency_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A last-level cache and the CPUs that share it."""

    cpus: tuple[int, ...]
    size_kib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The processors of a node; ``avx`` holds the flags avx, avx2, avx512f ... that it has."""

    model: str | None = None
    arch: str | None = None
    sockets: int
    cores_per_socket: int
    threads_per_core: int = 1
    avx: frozenset[str] | None = None
    l3_caches: tuple[Cache, ...] = ()

    @property
    def cores(self) -> int:
        return self.sockets * self.cores_per_socket


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimm:
    """A memory module; ``speed_mt_s`` is what it runs at, ``channel`` the one it sits on."""

    slot: str
    size_mib: int
    kind: str | None = None
    speed_mt_s: int | None = None
    channel: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PciLink:
    """A PCI Express link: GT/s of one lane, and how many lanes."""

    speed_gt_s: float
    width: int

    @property
    def bandwidth_gb_s(self) -> float:
        """One direction, after the line code (8b/10b below 8 GT/s, else 128b/130b or PAM4 FEC)."""
        return self.speed_gt_s * self.width / 8 * (0.8 if self.speed_gt_s < 8 else 128 / 130)


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A GPU, NIC or NVMe drive in the PCI tree.

    ``bridges`` are the addresses above it, the root port first; ``root`` is the host bridge
    (``pci0000:80``). ``names`` are what the system calls it: eth0, mlx5_0, nvme0n1.
    """

    address: str
    kind: PciKind
    names: tuple[str, ...] = ()
    model: str | None = None
    numa_node: int | None = None
    local_cpus: tuple[int, ...] = ()
    root: str | None = None
    bridges: tuple[str, ...] = ()
    link: PciLink | None = None
    max_link: PciLink | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions that a job may depend on."""

    kernel: str | None = None
    gpu_driver: str | None = None
    cuda: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvme:
    """A local NVMe drive or namespace. IOPS are 4 KiB random, latency is read at depth 1.

    ``uses`` says what already lives on it (``mounted at /``, ``partitions``), ``wear_percent`` is
    the share of its rated endurance that is used.
    """

    name: str
    stable_id: str | None = None
    model: str | None = None
    firmware: str | None = None
    pci_bus_id: str | None = None
    uses: tuple[str, ...] = ()
    wear_percent: int | None = None
    size_gb: int | None = None
    numa_node: int | None = None
    random_read_iops: int | None = None
    random_write_iops: int | None = None
    read_latency_us: float | None = None
    iops_stability_ratio: float | None = None
    sequential_write_mb_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProfile:
    """Everything placement needs to know of one node."""

    name: str
    cpu: Cpu
    numa_nodes: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...] = ()
    nvmes: tuple[Nvme, ...] = ()
    pci_devices: tuple[PciDevice, ...] = ()
    dimms: tuple[Dimm, ...] = ()
    software: Software = field(default=Software())
    memory_mib: int | None = None
    cache_gb: int | None = None
    source: Provenance = field(default=Provenance(Method.DECLARED))
    provenance: Mapping[str, Provenance] = field(default_factory=dict)

    def where_from(self, path: str) -> Provenance:
        """Provenance of a value by path; values without their own have the profile's."""
        return self.provenance.get(path, self.source)

    @property
    def cpu_domains(self) -> tuple[NumaNode, ...]:
        """NUMA nodes that have CPUs; memory-only and GPU-memory nodes can't hold a job."""
        return tuple(n for n in self.numa_nodes if n.cpus)

    @property
    def memory_bandwidth_gb_s(self) -> float | None:
        """Sum over the NUMA nodes with CPUs; None when one of them is unknown."""
        total = 0.0
        for node in self.cpu_domains:
            if node.memory_bandwidth_gb_s is None:
                return None
            total += node.memory_bandwidth_gb_s
        return total if self.cpu_domains else None

    def values(self) -> Iterator[tuple[str, object]]:
        """Every value with its path, depth first; unknown values are included as None."""
        yield from _walk("", self)


_META = {"name", "source", "provenance"}


def _walk(path: str, item: object) -> Iterator[tuple[str, object]]:
    if isinstance(item, tuple) and item and dataclasses.is_dataclass(item[0]):
        for i, element in enumerate(item):
            yield from _walk(f"{path}[{i}]", element)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for entry in dataclasses.fields(item):
            if isinstance(item, NodeProfile) and entry.name in _META:
                continue
            yield from _walk(f"{path}.{entry.name}".lstrip("."), getattr(item, entry.name))
    else:
        yield path, item
