"""A node's new report put over what is known of it: what the machine said wins, and nothing that
only a measurement or an admin can tell is lost.

A report tells what a node's kernel and driver show. Measured bandwidth, declared values and an
admin's overrides are carried over to the same part, and only to it: a drive that was replaced, or a
NUMA node that lost a module, starts unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from crater_slurm.model.profile import Cpu, Gpu, Method, NodeProfile, NumaNode, Nvme, Provenance
from crater_slurm.store.diff import known

Part = TypeVar("Part", Gpu, NumaNode, Nvme)

#: A kernel keeps a little more or less of the memory for itself at each boot; a module is more.
MEMORY_TOLERANCE = 0.02


def merge(old: NodeProfile | None, new: NodeProfile) -> NodeProfile:
    """``new`` with the values of ``old`` that it doesn't know and that still hold."""
    if old is None:
        return new
    provenance = dict(new.provenance)
    lists: dict[str, Any] = {}
    for name, pairs in (
        ("numa_nodes", _same_numa_nodes(old, new)),
        ("gpus", _same_gpus(old, new)),
        ("nvmes", _same_nvmes(old, new)),
    ):
        parts = list(getattr(new, name))
        for before, now in pairs:
            kept = _kept(
                old,
                getattr(old, name)[before],
                new,
                parts[now],
                f"{name}[{before}]",
                f"{name}[{now}]",
                provenance,
            )
            parts[now] = dataclasses.replace(parts[now], **kept)
        lists[name] = tuple(parts)
    cpu = new.cpu
    if _size(old.cpu) == _size(cpu):
        cpu = dataclasses.replace(cpu, **_kept(old, old.cpu, new, cpu, "cpu", "cpu", provenance))
    whole: dict[str, Any] = {}
    if old.cache_gb is not None and (new.cache_gb is None or _declared(new, "cache_gb")):
        whole["cache_gb"] = old.cache_gb
        provenance["cache_gb"] = old.where_from("cache_gb")
    return dataclasses.replace(new, cpu=cpu, **lists, **whole, provenance=provenance)


def _kept(
    old: NodeProfile,
    before: Any,
    new: NodeProfile,
    now: Any,
    old_path: str,
    new_path: str,
    provenance: dict[str, Provenance],
) -> dict[str, Any]:
    """Fields of ``before`` that stay, with their provenance noted at the new path."""
    kept: dict[str, Any] = {}
    for entry in dataclasses.fields(before):
        value, source = getattr(before, entry.name), old.where_from(f"{old_path}.{entry.name}")
        if not known(value) or entry.name in _TIED:
            continue
        # What a node only says because somebody declared it there is no news.
        weak = value != getattr(now, entry.name) and _declared(new, f"{new_path}.{entry.name}")
        if not known(getattr(now, entry.name)) or weak or source.override:
            kept[entry.name] = value
            provenance[f"{new_path}.{entry.name}"] = source
    return kept


def _declared(profile: NodeProfile, path: str) -> bool:
    return profile.where_from(path).method is Method.DECLARED


#: Fields that hold places of other parts, or what the moment makes of them: a report knows best.
_TIED = {"index", "nvlinks", "mig_instances", "uses", "l3_caches", "distances"}


def _size(cpu: Cpu) -> tuple[int, int, int]:
    return cpu.sockets, cpu.cores_per_socket, cpu.threads_per_core


def _same_numa_nodes(old: NodeProfile, new: NodeProfile) -> Iterator[tuple[int, int]]:
    places = {node.id: i for i, node in enumerate(old.numa_nodes)}
    for i, node in enumerate(new.numa_nodes):
        before = places.get(node.id)
        if before is not None and _same_memory(old.numa_nodes[before], node):
            yield before, i


def _same_memory(before: NumaNode, now: NumaNode) -> bool:
    if before.cpus != now.cpus:
        return False
    if not before.memory_mib or not now.memory_mib:
        return True
    return abs(now.memory_mib / before.memory_mib - 1) <= MEMORY_TOLERANCE


def _same_gpus(old: NodeProfile, new: NodeProfile) -> Iterator[tuple[int, int]]:
    def keys(gpu: Gpu) -> tuple[Hashable, ...]:
        return (gpu.uuid, gpu.pci_bus_id and (gpu.model, gpu.pci_bus_id), (gpu.model, gpu.index))

    return _matched([keys(gpu) for gpu in old.gpus], [keys(gpu) for gpu in new.gpus])


def _same_nvmes(old: NodeProfile, new: NodeProfile) -> Iterator[tuple[int, int]]:
    def keys(drive: Nvme) -> tuple[Hashable, ...]:
        return (drive.stable_id, None if drive.stable_id else drive.name)

    def by_name(drive: Nvme) -> tuple[Hashable, ...]:
        # A declared drive has a name and no serial number yet; then the name is what there is.
        return (drive.stable_id, drive.name)

    declared = any(drive.stable_id is None for drive in (*old.nvmes, *new.nvmes))
    chosen = by_name if declared else keys
    return _matched([chosen(d) for d in old.nvmes], [chosen(d) for d in new.nvmes])


def _matched(
    old: Sequence[tuple[Hashable, ...]], new: Sequence[tuple[Hashable, ...]]
) -> Iterator[tuple[int, int]]:
    """Places of equal parts: the first key that both know decides."""
    for i, keys in enumerate(new):
        for before, others in enumerate(old):
            both = [(a, b) for a, b in zip(keys, others, strict=True) if a and b]
            if both and both[0][0] == both[0][1]:
                yield before, i
                break


def same_parts(old: NodeProfile, new: NodeProfile) -> Mapping[str, Sequence[tuple[int, int]]]:
    """Places of the GPUs and drives that are in both profiles: before, now."""
    return {"gpus": tuple(_same_gpus(old, new)), "nvmes": tuple(_same_nvmes(old, new))}
