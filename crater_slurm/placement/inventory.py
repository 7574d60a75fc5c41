"""The cluster as placement sees it: profiles joined with Slurm's nodes, equal nodes decided once.

Nodes with the same hardware form a class, so a rule runs once per class and its answer is a set
of nodes. Sets are integers, one bit per node in name order: union and difference of 10,000 nodes
cost about a microsecond.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from crater_slurm.model.cluster import SlurmCluster
from crater_slurm.model.profile import Gpu, Method, NodeProfile, Nvme, Provenance

#: Values that only count when measured, where a site does not allow declared ones.
_MEASURABLE = {
    "memory_bandwidth_gb_s",
    "random_read_iops",
    "random_write_iops",
    "read_latency_us",
    "iops_stability_ratio",
    "sequential_write_mb_s",
}


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Nodes of equal hardware: one profile that stands for all, and which nodes they are.

    Classes with the same ``machine`` number differ in storage only, those with the same
    ``storage`` number have equal NVMe and cache, so that each half is checked once.
    """

    profile: NodeProfile
    nodes: int
    example: str
    machine: int = 0
    storage: int = 0


@dataclass(frozen=True, slots=True)
class Inventory:
    """All nodes that Slurm has, by class; nodes without a profile are ``unknown``."""

    names: tuple[str, ...]
    classes: tuple[NodeClass, ...]
    unknown: int
    partitions: dict[str, int] = field(default_factory=dict)
    usable: int = 0
    feature_sets: tuple[tuple[frozenset[str], int], ...] = ()
    default_partition: str | None = None
    index: dict[str, int] = field(default_factory=dict)

    @property
    def everything(self) -> int:
        return (1 << len(self.names)) - 1

    def name_set(self, names: Iterable[str]) -> int:
        """Set of the names that exist; others are ignored."""
        bits = 0
        for name in names:
            if (i := self.index.get(name)) is not None:
                bits |= 1 << i
        return bits

    def names_of(self, nodes: int, limit: int | None = None) -> list[str]:
        """Names in a set, in order, at most ``limit``."""
        found: list[str] = []
        while nodes and (limit is None or len(found) < limit):
            low = nodes & -nodes
            found.append(self.names[low.bit_length() - 1])
            nodes ^= low
        return found


def build(
    cluster: SlurmCluster, profiles: Sequence[NodeProfile], *, allow_declared: bool = True
) -> Inventory:
    """Inventory of the nodes that Slurm has, with what the store knows of them.

    A profile whose node Slurm does not have is left out: Slurm can't place a job there.
    """
    by_name = {profile.name: profile for profile in profiles}
    ordered = sorted(cluster.nodes, key=attrgetter("name"))
    names = tuple(node.name for node in ordered)
    classes: dict[Hashable, tuple[int, NodeProfile]] = {}
    partitions: dict[str, int] = {}
    features: dict[frozenset[str], int] = {}
    unknown = usable = 0
    for i, node in enumerate(ordered):
        bit = 1 << i
        for partition in node.partitions:
            partitions[partition] = partitions.get(partition, 0) | bit
        features[node.features] = features.get(node.features, 0) | bit
        if node.usable:
            usable |= bit
        profile = by_name.get(node.name)
        if profile is None:
            unknown |= bit
            continue
        key = _kind(profile, allow_declared)
        members, example = classes.get(key, (0, profile))
        classes[key] = (members | bit, example)
    return Inventory(
        names=names,
        classes=_classes(classes.values(), allow_declared),
        unknown=unknown,
        partitions=partitions,
        usable=usable,
        feature_sets=tuple(features.items()),
        default_partition=cluster.default_partition,
        index={name: i for i, name in enumerate(names)},
    )


_GPU_KIND = attrgetter(
    *(f.name for f in dataclasses.fields(Gpu) if f.name not in {"uuid", "pci_bus_id"})
)
#: What tells one drive from another of its kind.
_NVME_OWN: dict[str, Any] = {
    "stable_id": None,
    "firmware": None,
    "pci_bus_id": None,
    "uses": (),
    "wear_percent": None,
}
_NVME_KIND = attrgetter(*(f.name for f in dataclasses.fields(Nvme) if f.name not in _NVME_OWN))


def _kind(profile: NodeProfile, allow_declared: bool) -> Hashable:
    """What two equal machines have in common; cheap, because it is made for every node."""
    return (
        profile.cpu,
        profile.numa_nodes,
        tuple(map(_GPU_KIND, profile.gpus)),
        tuple(map(_NVME_KIND, profile.nvmes)),
        profile.memory_mib,
        profile.cache_gb,
        None if allow_declared else tuple(_untrusted(profile)),
    )


def _untrusted(profile: NodeProfile) -> Iterator[str]:
    """Paths of values that were declared and would have to be measured."""
    for path, value in profile.values():
        measurable = value is not None and path.rpartition(".")[2] in _MEASURABLE
        if measurable and profile.where_from(path).method is Method.DECLARED:
            yield path


def _classes(
    found: Iterable[tuple[int, NodeProfile]], allow_declared: bool
) -> tuple[NodeClass, ...]:
    machines: dict[Hashable, int] = {}
    storages: dict[Hashable, int] = {}
    classes = []
    for members, example in found:
        profile = anonymous(example, allow_declared=allow_declared)
        machine = (profile.cpu, profile.numa_nodes, profile.gpus, profile.memory_mib)
        storage = (profile.nvmes, profile.cache_gb)
        classes.append(
            NodeClass(
                profile,
                members,
                example.name,
                machines.setdefault(machine, len(machines)),
                storages.setdefault(storage, len(storages)),
            )
        )
    return tuple(classes)


def anonymous(profile: NodeProfile, *, allow_declared: bool = True) -> NodeProfile:
    """The profile without what differs between equal machines: name, serial numbers, times."""

    def trusted(path: str, value: float | None) -> float | None:
        if allow_declared or profile.where_from(path).method is not Method.DECLARED:
            return value
        return None

    numa_nodes = tuple(
        dataclasses.replace(
            n,
            memory_bandwidth_gb_s=trusted(
                f"numa_nodes[{i}].memory_bandwidth_gb_s", n.memory_bandwidth_gb_s
            ),
        )
        for i, n in enumerate(profile.numa_nodes)
    )
    nvmes = tuple(_anonymous_nvme(i, n, trusted) for i, n in enumerate(profile.nvmes))
    gpus = tuple(dataclasses.replace(g, uuid=None, pci_bus_id=None) for g in profile.gpus)
    return NodeProfile(
        name="",
        cpu=profile.cpu,
        numa_nodes=numa_nodes,
        gpus=gpus,
        nvmes=nvmes,
        memory_mib=profile.memory_mib,
        cache_gb=profile.cache_gb,
        source=Provenance(Method.DECLARED),
    )


def _anonymous_nvme(index: int, nvme: Nvme, trusted: object) -> Nvme:
    assert callable(trusted)
    changes = {
        name: trusted(f"nvmes[{index}].{name}", getattr(nvme, name))
        for name in _MEASURABLE
        if hasattr(nvme, name)
    }
    return dataclasses.replace(nvme, **_NVME_OWN, **changes)
