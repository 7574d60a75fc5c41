"""Fills what a driver does not tell from the catalogue, and says where a profile contradicts it.

What is already known is never replaced. A model that the catalogue doesn't have keeps what the
driver said, and the rest stays unknown, so that no requirement matches it by a guess.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from crater_slurm.catalogue.models import GpuModel, lookup
from crater_slurm.model.profile import Gpu, Method, NodeProfile, Provenance

#: A bandwidth further from the catalogue than this is another card's, or in other units.
TOLERANCE = 0.05


def _facts(model: GpuModel) -> dict[str, Any]:
    return {
        "sm_count": model.sm_count,
        "tensor_cores": model.tensor_cores,
        "memory_mib": model.driver_memory_mib,
        "memory_bandwidth_gb_s": model.memory_bandwidth_gb_s,
        "precisions": model.precisions,
        "compute_capability": model.compute_capability,
        "mig_capable": model.mig_capable,
    }


def missing(gpu: Gpu) -> dict[str, Any]:
    """The fields of ``gpu`` that are unknown and that the catalogue knows, with their values."""
    model = lookup(gpu.model)
    if model is None:
        return {}
    return {name: value for name, value in _facts(model).items() if getattr(gpu, name) is None}


def complete(gpu: Gpu) -> Gpu:
    """``gpu`` with its model's id as model, and with what was unknown where the table knows it."""
    model = lookup(gpu.model)
    if model is None:
        return gpu
    return dataclasses.replace(gpu, model=model.id, **missing(gpu))


def complete_profile(profile: NodeProfile) -> NodeProfile:
    """``profile`` with all its GPUs completed; what was filled has the method catalogue."""
    provenance = dict(profile.provenance)
    for i, gpu in enumerate(profile.gpus):
        provenance |= {f"gpus[{i}].{name}": Provenance(Method.CATALOGUE) for name in missing(gpu)}
    return dataclasses.replace(
        profile, gpus=tuple(complete(gpu) for gpu in profile.gpus), provenance=provenance
    )


def doubts(
    name: str, *, sm_count: int | None = None, bandwidth_gb_s: float | None = None
) -> list[str]:
    """Sentences for figures that the catalogue contradicts; none for an unknown model.

    An SM count must match; a bandwidth may be 5 % off, which covers rounding and clock variants.
    """
    model = lookup(name)
    if model is None:
        return []
    found = []
    if sm_count is not None and sm_count != model.sm_count:
        found.append(f"{model.id} with {sm_count} SMs, but the catalogue has {model.sm_count}")
    if bandwidth_gb_s is not None:
        off = bandwidth_gb_s / model.memory_bandwidth_gb_s - 1
        if abs(off) > TOLERANCE:
            found.append(
                f"{model.id} with {bandwidth_gb_s:g} GB/s of memory bandwidth is {off:+.0%} off "
                f"the catalogue's {model.memory_bandwidth_gb_s:g} GB/s"
            )
    return found
