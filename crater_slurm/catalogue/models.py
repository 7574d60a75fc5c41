"""The table of GPU models, and how a driver's name for a card finds its row.

A name finds a row only by being one of the row's names, whatever its case and punctuation. There
is no nearest match: an A10G is no A10, a laptop's 4090 is no 4090, and a MIG instance is not the
card that it was cut from.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """One row: what a card of this model has, as its driver counts devices.

    ``memory_mib`` is the nominal size and ``driver_memory_mib`` what the driver shows of it.
    ``precisions`` are the number formats that the hardware multiplies itself.
    ``nvlink_bandwidth_gb_s`` is the total of all links, both directions. ``pci_ids`` are the
    devices that are this model and no other (https://pci-ids.ucw.cz), as ``10de:20b0``.
    """

    id: str
    vendor: str
    architecture: str
    sm_count: int
    tensor_cores: bool
    memory_mib: int
    driver_memory_mib: int
    memory_bandwidth_gb_s: float
    precisions: frozenset[str]
    compute_capability: str
    nvlink_bandwidth_gb_s: float
    pcie_generation: int
    mig_capable: bool
    mig_instances: int
    confidence: str
    driver_names: tuple[str, ...]
    pci_ids: tuple[str, ...]
    note: str


#: Words that a driver's name may carry or not without naming another card.
_NOISE = {"nvidia", "amd", "tesla", "geforce", "instinct", "generation", "corporation"}
_MARKS = re.compile(r"\((?:r|tm)\)|[®™]", re.IGNORECASE)


@cache
def gpu_models() -> Mapping[str, GpuModel]:
    """All models by id, in the order of the table."""
    source = resources.files(__package__).joinpath("gpus.csv").read_text(encoding="utf-8")
    return MappingProxyType(
        {row["model"]: _model(row) for row in csv.DictReader(source.split("\n"))}
    )


def lookup(name: str) -> GpuModel | None:
    """The model of a driver's name (``NVIDIA A100-PCIE-40GB``) or id; None when it is unknown."""
    found = _by_slug().get(_slug(name))
    return gpu_models()[found] if found else None


def by_pci_id(pci_id: str) -> GpuModel | None:
    """The model of a PCI vendor and device (``10de:20b0``); None when it is unknown.

    Some ids are shared by models that differ (MI250 and MI250X); those are no model's here.
    """
    return next((m for m in gpu_models().values() if pci_id.lower() in m.pci_ids), None)


def model_id(name: str) -> str:
    """The id that profiles use for a driver's name; a name not in the table becomes its own id.

    ``NVIDIA H100 80GB HBM3`` is ``h100-sxm5-80gb``, ``NVIDIA A10G`` is ``a10g``.
    """
    found = lookup(name)
    return found.id if found else _slug(name) or "unknown"


@cache
def _by_slug() -> Mapping[str, str]:
    slugs: dict[str, str] = {}
    for model in gpu_models().values():
        for name in (model.id, *model.driver_names):
            slugs[_slug(name)] = model.id
    return slugs


def _slug(name: str) -> str:
    words = re.split(r"[^a-z0-9.]+", _MARKS.sub(" ", name).lower())
    return "-".join(word for word in words if word and word not in _NOISE)


def _model(row: Mapping[str, str]) -> GpuModel:
    return GpuModel(
        id=row["model"],
        vendor=row["vendor"],
        architecture=row["architecture"],
        sm_count=int(row["sm_count"]),
        tensor_cores=row["tensor_cores"] == "yes",
        memory_mib=int(row["memory_mib"]),
        driver_memory_mib=int(row["driver_memory_mib"]),
        memory_bandwidth_gb_s=float(row["memory_bandwidth_gb_s"]),
        precisions=frozenset(row["precisions"].split()),
        compute_capability=row["compute_capability"],
        nvlink_bandwidth_gb_s=float(row["nvlink_bandwidth_gb_s"]),
        pcie_generation=int(row["pcie_generation"]),
        mig_capable=row["mig_capable"] == "yes",
        mig_instances=int(row["mig_instances"]),
        confidence=row["confidence"],
        driver_names=tuple(row["driver_names"].split(";")),
        pci_ids=tuple(row["pci_ids"].split()),
        note=row["note"],
    )
