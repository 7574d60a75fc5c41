"""Parts of a profile as rows, and back: which field is which column, and how lists are written.

A large cluster has thousands of nodes of few makes, so equal values (a CPU list, a set of
precisions) are decoded once and shared; they are immutable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any

from crater_slurm.model.cpuset import format_cpulist, parse_cpulist
from crater_slurm.model.profile import (
    Cache,
    Cpu,
    Dimm,
    Gpu,
    NodeProfile,
    NumaKind,
    NumaNode,
    NvLink,
    Nvme,
    PciDevice,
    PciKind,
    PciLink,
    Software,
)
from crater_slurm.store.tables import (
    Base,
    DimmRow,
    GpuRow,
    NumaNodeRow,
    NvLinkRow,
    NvmeRow,
    PciDeviceRow,
)


@dataclass(frozen=True, slots=True)
class Code:
    """How a field that is no plain column is written as text, and read back."""

    write: Callable[[Any], object]
    read: Callable[[Any], Any]


def _shared(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lru_cache(maxsize=4096)(read)


_CPUS = Code(format_cpulist, _shared(parse_cpulist))
_WHOLE_NUMBERS = Code(
    lambda numbers: ",".join(map(str, numbers)),
    _shared(lambda text: tuple(int(part) for part in text.split(",") if part)),
)
_NUMBERS = Code(
    lambda numbers: ",".join(map(repr, numbers)) or None,
    _shared(lambda text: tuple(float(part) for part in (text or "").split(",") if part)),
)
_WORDS = Code(
    lambda words: None if words is None else ",".join(sorted(words)),
    _shared(lambda t: None if t is None else frozenset(word for word in t.split(",") if word)),
)
_LIST = Code(json.dumps, _shared(lambda text: tuple(json.loads(text)) if text else ()))
_CACHES = Code(
    lambda found: json.dumps([[format_cpulist(c.cpus), c.size_kib] for c in found] or None),
    _shared(
        lambda text: tuple(
            Cache(cpus=parse_cpulist(cpus), size_kib=size)
            for cpus, size in (json.loads(text or "null") or ())
        )
    ),
)


def _enum(kind: Callable[[str], Any]) -> Code:
    return Code(
        lambda value: None if value is None else value.value,
        _shared(lambda text: None if text is None else kind(text)),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """A kind of part with its table: ``plain`` fields are columns, ``coded`` ones are texts."""

    kind: Callable[..., Any]
    table: type[Base]
    plain: tuple[str, ...]
    coded: Mapping[str, Code] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.plain, *self.coded)

    def write(self, item: object) -> dict[str, Any]:
        """The columns of an item."""
        row = {name: getattr(item, name) for name in self.plain}
        return row | {name: code.write(getattr(item, name)) for name, code in self.coded.items()}

    def read(self, row: Sequence[Any], **more: Any) -> Any:
        """The item of a row, whose values are in the order of ``columns``."""
        values = dict(zip(self.plain, row, strict=False))
        for (name, code), text in zip(self.coded.items(), row[len(self.plain) :], strict=True):
            values[name] = code.read(text)
        return self.kind(**values, **more)


CPU = Part(
    Cpu,
    Base,
    ("model", "arch", "sockets", "cores_per_socket", "threads_per_core"),
    {"avx": _WORDS, "l3_caches": _CACHES},
)
SOFTWARE = Part(Software, Base, ("kernel", "gpu_driver", "cuda"))
NUMA_NODE = Part(
    NumaNode,
    NumaNodeRow,
    (
        "id",
        "socket",
        "memory_mib",
        "memory_bandwidth_gb_s",
        "firmware_bandwidth_gb_s",
        "firmware_latency_ns",
    ),
    {
        "cpus": _CPUS,
        "distances": _WHOLE_NUMBERS,
        "kind": _enum(NumaKind),
        "remote_bandwidth_gb_s": _NUMBERS,
    },
)
GPU = Part(
    Gpu,
    GpuRow,
    (
        "index",
        "model",
        "gres_type",
        "uuid",
        "pci_bus_id",
        "numa_node",
        "sm_count",
        "tensor_cores",
        "memory_mib",
        "memory_bandwidth_gb_s",
        "compute_capability",
        "mig_capable",
    ),
    {"precisions": _WORDS, "mig_instances": _LIST},
)
NVME = Part(
    Nvme,
    NvmeRow,
    (
        "name",
        "stable_id",
        "model",
        "size_gb",
        "numa_node",
        "random_read_iops",
        "random_write_iops",
        "read_latency_us",
        "iops_stability_ratio",
        "sequential_write_mb_s",
        "firmware",
        "pci_bus_id",
        "wear_percent",
    ),
    {"uses": _LIST},
)
DIMM = Part(Dimm, DimmRow, ("slot", "size_mib", "kind", "speed_mt_s", "channel"))


def _device(**values: Any) -> PciDevice:
    links = [
        PciLink(speed_gt_s=speed, width=width) if speed is not None else None
        for speed, width in (
            (values.pop(f"{name}_speed_gt_s"), values.pop(f"{name}_width"))
            for name in ("link", "max_link")
        )
    ]
    return PciDevice(**values, link=links[0], max_link=links[1])


PCI_DEVICE = Part(
    _device,
    PciDeviceRow,
    (
        "address",
        "model",
        "numa_node",
        "root",
        "link_speed_gt_s",
        "link_width",
        "max_link_speed_gt_s",
        "max_link_width",
    ),
    {"kind": _enum(PciKind), "names": _LIST, "local_cpus": _CPUS, "bridges": _LIST},
)


class _FlatDevice:
    """A device whose links are fields of its own, as their columns are."""

    def __init__(self, device: PciDevice) -> None:
        self._device = device

    def __getattr__(self, name: str) -> object:
        for link in ("max_link", "link"):
            if name in (f"{link}_speed_gt_s", f"{link}_width"):
                found = getattr(self._device, link)
                return found and getattr(found, name.removeprefix(f"{link}_"))
        return getattr(self._device, name)


def part_rows(profile: NodeProfile) -> Iterator[tuple[type[Base], dict[str, Any]]]:
    """Table and columns of every part, in the profile's order."""
    for part, items in (
        (NUMA_NODE, profile.numa_nodes),
        (GPU, profile.gpus),
        (NVME, profile.nvmes),
        (PCI_DEVICE, map(_FlatDevice, profile.pci_devices)),
        (DIMM, profile.dimms),
    ):
        for i, item in enumerate(items):
            yield part.table, {"position": i, **part.write(item)}
    for i, gpu in enumerate(profile.gpus):
        groups = groupby(gpu.nvlinks, key=lambda link: link.bandwidth_gb_s)
        for k, (bandwidth, links) in enumerate(groups):
            peers = ",".join(str(link.peer) for link in links)
            row = {"gpu": i, "position": k, "peers": peers, "bandwidth_gb_s": bandwidth}
            yield NvLinkRow, row


@lru_cache(maxsize=1024)
def nvlinks(peers: str, bandwidth: float | None) -> tuple[NvLink, ...]:
    """Links of equal bandwidth to comma-separated peers."""
    return tuple(NvLink(int(peer), bandwidth) for peer in peers.split(","))
