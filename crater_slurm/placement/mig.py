"""Cards that are cut into MIG instances: each instance is a GPU of its own, no card is both.

A card in instances can't be given whole, and an instance is given only to who asks for its profile.
Slurm knows instances by the type of their gres, whose end is the profile: ``a100_1g.5gb``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable

from crater_slurm.model.profile import Gpu, NodeProfile

_PROFILE = re.compile(r"(?:^|[_-])([1-9]g\.([0-9]{1,3})gb(?:\+me)?)$", re.IGNORECASE)
#: Of the GB in a profile's name this share is counted on: names are rounded (1g.5gb has 4.75 GiB,
#: 1g.12gb has 10.75), and no reader tells the memory of each instance.
_LEAST_OF_NAME = 0.9


@functools.lru_cache(maxsize=1024)  # asked of each GPU by each rule, and sites have few types
def profile_of_type(gres_type: str | None) -> str | None:
    """The MIG profile at the end of a gres type; None for a whole GPU's."""
    found = _PROFILE.search(gres_type or "")
    return found.group(1).lower() if found else None


def profile_of(gpu: Gpu) -> str | None:
    """The MIG profile of an instance; None for a whole GPU."""
    if gpu.mig_instances:
        return gpu.mig_instances[0]
    return profile_of_type(gpu.gres_type)


def of_kind(profile: NodeProfile, wanted: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a request can get at all: instances for one that names a profile, else none."""
    return tuple(g for g in profile.gpus if (profile_of(g) is None) == (wanted is None))


def apart(profile: NodeProfile, gres_types: Iterable[str] = ()) -> NodeProfile:
    """The profile with one GPU for each instance in place of the card that is cut into them.

    ``gres_types`` are the types of GPUs that Slurm has there; an instance whose type is not among
    them can't be told from its neighbours in a request.
    """
    if not any(gpu.mig_instances for gpu in profile.gpus):
        return profile
    types = {found: name for name in sorted(gres_types) if (found := profile_of_type(name))}
    gpus: list[Gpu] = []
    places: dict[int, int] = {}
    for gpu in profile.gpus:
        if not gpu.mig_instances:
            places[gpu.index] = len(gpus)
            gpus.append(dataclasses.replace(gpu, index=len(gpus)))
        for instance in gpu.mig_instances:
            gpus.append(_instance(gpu, instance.lower(), types, len(gpus)))
    return dataclasses.replace(profile, gpus=tuple(_relinked(gpu, places) for gpu in gpus))


def _instance(card: Gpu, instance: str, types: dict[str, str], index: int) -> Gpu:
    """Computes as its card does; memory is the least that its name promises."""
    found = _PROFILE.search(instance)
    memory = int(int(found.group(2)) * 1e9 * _LEAST_OF_NAME) >> 20 if found else None
    return dataclasses.replace(
        card,
        index=index,
        gres_type=types.get(instance),
        memory_mib=memory,
        memory_bandwidth_gb_s=None,
        sm_count=None,
        nvlinks=(),
        mig_instances=(instance,),
    )


def _relinked(gpu: Gpu, places: dict[int, int]) -> Gpu:
    links = tuple(
        dataclasses.replace(link, peer=places[link.peer])
        for link in gpu.nvlinks
        if link.peer in places
    )
    return dataclasses.replace(gpu, nvlinks=links)
