"""What a profile's fields may hold: one reader per field, strict, since people write profiles.

An unknown key, a wrong type or an absurd number is refused with its path. The bounds catch a
wrong unit, not a new product.
"""

from __future__ import annotations

import re

from crater_slurm.model.profile import (
    Cache,
    Cpu,
    Dimm,
    Gpu,
    Method,
    NodeProfile,
    NumaKind,
    NumaNode,
    NvLink,
    Nvme,
    PciDevice,
    PciKind,
    PciLink,
    Provenance,
    Software,
)
from crater_slurm.store import strict

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8", "int4")
NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def node_name(value: object, path: str) -> str:
    if not isinstance(value, str) or not NODE_NAME.fullmatch(value):
        raise strict.refuse(path, value, "a node name such as gn01")
    return value


def _part(kind: type) -> strict.Reader:
    """Reader of a part of a profile, by the table below."""

    def read(value: object, path: str) -> object:
        return strict.build(kind, READERS[kind], value, path)

    return read


def _paths(value: object, path: str) -> dict[str, Provenance]:
    return {
        key: _part(Provenance)(entry, f"{path}.{key}")
        for key, entry in strict.mapping(value, path).items()
    }


# The upper bounds are a few times above any hardware: they catch a wrong unit, not a new product.
_NUMA_ID = strict.whole(0, 1023, "(leave it out when it is not known)")
_GPU_INDEX = strict.whole(0, 1023)
_MEMORY_BANDWIDTH = strict.number(0, 20_000, "GB/s", above=True)
_IOPS = strict.whole(0, 10**9, "IOPS")
_PROVENANCE: dict[str, strict.Reader] = {
    "method": strict.choice(Method),
    "time": strict.moment,
    "override": strict.flag,
}
_NVLINK: dict[str, strict.Reader] = {
    "peer": _GPU_INDEX,
    "bandwidth_gb_s": strict.number(0, 100_000, "GB/s"),
}
_GPU: dict[str, strict.Reader] = {
    "index": _GPU_INDEX,
    "model": strict.text,
    "gres_type": strict.text,
    "uuid": strict.text,
    "pci_bus_id": strict.text,
    "numa_node": _NUMA_ID,
    "sm_count": strict.whole(1, 10_000),
    "tensor_cores": strict.flag,
    "memory_mib": strict.whole(1, 2**24, "MiB"),
    "memory_bandwidth_gb_s": strict.number(0, 100_000, "GB/s", above=True),
    "precisions": strict.words(PRECISIONS),
    "compute_capability": strict.text,
    "nvlinks": strict.sequence(_part(NvLink)),
    "mig_capable": strict.flag,
    "mig_instances": strict.sequence(strict.text),
}
_NUMA_NODE: dict[str, strict.Reader] = {
    "id": strict.whole(0, 1023),
    "cpus": strict.cpulist,
    "socket": strict.whole(0, 1023),
    "memory_mib": strict.whole(0, 2**31, "MiB"),
    "memory_bandwidth_gb_s": _MEMORY_BANDWIDTH,
    "distances": strict.sequence(strict.whole(0, 255)),
    "kind": strict.choice(NumaKind),
    "remote_bandwidth_gb_s": strict.sequence(_MEMORY_BANDWIDTH),
    "firmware_bandwidth_gb_s": _MEMORY_BANDWIDTH,
    "firmware_latency_ns": strict.whole(0, 10**6, "ns"),
}
_CPU: dict[str, strict.Reader] = {
    "model": strict.text,
    "arch": strict.text,
    "sockets": strict.whole(1, 1024),
    "cores_per_socket": strict.whole(1, 8192),
    "threads_per_core": strict.whole(1, 16),
    "avx": strict.words(),
    "l3_caches": strict.sequence(_part(Cache)),
}
_CACHE: dict[str, strict.Reader] = {
    "cpus": strict.cpulist,
    "size_kib": strict.whole(1, 2**24, "KiB"),
}
_NVME: dict[str, strict.Reader] = {
    "name": strict.text,
    "stable_id": strict.text,
    "model": strict.text,
    "size_gb": strict.whole(0, 10**6, "GB"),
    "numa_node": _NUMA_ID,
    "random_read_iops": _IOPS,
    "random_write_iops": _IOPS,
    "read_latency_us": strict.number(0, 10**7, "µs", above=True),
    "iops_stability_ratio": strict.number(0, 1),
    "sequential_write_mb_s": strict.number(0, 10**6, "MB/s"),
    "firmware": strict.text,
    "pci_bus_id": strict.text,
    "uses": strict.sequence(strict.text),
    "wear_percent": strict.whole(0, 255, "%"),
}
_PCI_LINK: dict[str, strict.Reader] = {
    "speed_gt_s": strict.number(0, 1000, "GT/s", above=True),
    "width": strict.whole(1, 64, "lanes"),
}
_PCI_DEVICE: dict[str, strict.Reader] = {
    "address": strict.text,
    "kind": strict.choice(PciKind),
    "names": strict.sequence(strict.text),
    "model": strict.text,
    "numa_node": _NUMA_ID,
    "local_cpus": strict.cpulist,
    "root": strict.text,
    "bridges": strict.sequence(strict.text),
    "link": _part(PciLink),
    "max_link": _part(PciLink),
}
_DIMM: dict[str, strict.Reader] = {
    "slot": strict.text,
    "size_mib": strict.whole(1, 2**31, "MiB"),
    "kind": strict.text,
    "speed_mt_s": strict.whole(1, 100_000, "MT/s"),
    "channel": strict.text,
}
_SOFTWARE: dict[str, strict.Reader] = dict.fromkeys(("kernel", "gpu_driver", "cuda"), strict.text)
_PROFILE: dict[str, strict.Reader] = {
    "name": node_name,
    "cpu": _part(Cpu),
    "numa_nodes": strict.sequence(_part(NumaNode)),
    "gpus": strict.sequence(_part(Gpu)),
    "nvmes": strict.sequence(_part(Nvme)),
    "pci_devices": strict.sequence(_part(PciDevice)),
    "dimms": strict.sequence(_part(Dimm)),
    "software": _part(Software),
    "memory_mib": strict.whole(1, 2**31, "MiB"),
    "cache_gb": strict.whole(0, 10**7, "GB"),
    "source": _part(Provenance),
    "provenance": _paths,
}
#: The readers of each class: one entry per field.
READERS: dict[type, dict[str, strict.Reader]] = {
    Provenance: _PROVENANCE,
    NvLink: _NVLINK,
    Gpu: _GPU,
    NumaNode: _NUMA_NODE,
    Cpu: _CPU,
    Cache: _CACHE,
    Nvme: _NVME,
    PciLink: _PCI_LINK,
    PciDevice: _PCI_DEVICE,
    Dimm: _DIMM,
    Software: _SOFTWARE,
    NodeProfile: _PROFILE,
}
