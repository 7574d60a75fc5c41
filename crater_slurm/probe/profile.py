"""One node's profile, put together from its readers and the catalogue of GPUs."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

from crater_slurm import catalogue
from crater_slurm.model.profile import Method, NodeProfile, Provenance
from crater_slurm.probe import gpus, system


def scan(name: str, root: Path) -> NodeProfile:
    """Profile of the machine below ``root``. Raises CraterError when it is no machine."""
    found = []
    for gpu in gpus.gpus(root) if root == Path("/") else ():
        known = catalogue.lookup(gpu.model)
        # Users name GPUs by the first word of the id (a100), as most sites' gres types do.
        found.append(
            dataclasses.replace(gpu, model=known.id, gres_type=known.id.split("-")[0])
            if known
            else gpu
        )
    profile = NodeProfile(
        name=name,
        cpu=system.cpu(root),
        numa_nodes=system.numa_nodes(root),
        gpus=tuple(found),
        nvmes=system.nvmes(root),
        memory_mib=system.memory_mib(root),
        source=Provenance(Method.MEASURED, datetime.now(UTC).replace(microsecond=0)),
    )
    return catalogue.complete_profile(profile)
