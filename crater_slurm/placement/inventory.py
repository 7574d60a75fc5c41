"""The cluster as placement sees it: profiles joined with Slurm's nodes, equal nodes decided once.

Nodes of one make have the same parts in the same places; what was measured of them differs a
little from node to node. A need splits a make only where its own thresholds do (``measured``), so
that a rule runs once for a thousand nodes. Sets are integers, one bit per node in name order: union
and difference of 10,000 nodes cost about a microsecond.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from crater_slurm.model.cluster import Partition, Reservation, SlurmCluster, natural
from crater_slurm.model.profile import Gpu, Method, NodeProfile, Nvme, Provenance, Software
from crater_slurm.placement import mig
from crater_slurm.placement.measured import Measured
from crater_slurm.placement.need import Need

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
    """Nodes that one need finds alike: a profile that stands for all, and which nodes they are.

    The profile is that of the node that comes nearest to the need.
    """

    profile: NodeProfile
    nodes: int
    example: str

    @property
    def is_single(self) -> bool:
        """Whether the machine is one NUMA node, in which all is together anyway."""
        return len(self.profile.cpu_domains) == 1


@dataclass(frozen=True, slots=True)
class Inventory:
    """All nodes that Slurm has, by make; nodes without a profile are ``unknown``.

    ``shard_sets`` are the nodes by their number of shards in Slurm, none at all included, and
    ``sizes`` by the cores and MiB that Slurm counts for them, where it says so.
    """

    names: tuple[str, ...]
    makes: int
    measured: Measured
    stands_for: Callable[[int], NodeProfile]
    unknown: int
    partitions: dict[str, int] = field(default_factory=dict)
    usable: int = 0
    feature_sets: tuple[tuple[frozenset[str], int], ...] = ()
    shard_sets: tuple[tuple[int, int], ...] = ()
    sizes: tuple[tuple[tuple[int, int], int], ...] = ()
    default_partition: str | None = None
    index: dict[str, int] = field(default_factory=dict)
    in_maintenance: int = 0
    #: Nodes by the model of their first GPU.
    models: dict[str, int] = field(default_factory=dict)
    limits: dict[str, Partition] = field(default_factory=dict)
    enforce_limits: str = "NO"
    reservations: tuple[tuple[Reservation, int], ...] = ()

    def ruled(self, cluster: SlurmCluster) -> Inventory:
        """The same nodes with the partitions' limits and the reservations of ``cluster``."""
        return dataclasses.replace(
            self,
            limits={partition.name: partition for partition in cluster.partitions},
            enforce_limits=cluster.enforce_limits,
            reservations=tuple((r, self.name_set(r.nodes)) for r in cluster.reservations),
        )

    @property
    def everything(self) -> int:
        return (1 << len(self.names)) - 1

    @property
    def without_shards(self) -> int:
        """Nodes for which Slurm counts no shards."""
        return dict(self.shard_sets).get(0, 0)

    def roomy(self, cores: int, memory_mib: int) -> int:
        """Nodes that surely have so much for jobs by Slurm's own count, which may keep some cores
        and memory of a node for the system without telling."""
        cores += max(2, cores // 8)
        memory_mib += max(4096, memory_mib // 8)
        found = 0
        for (has, mib), nodes in self.sizes:
            found |= nodes if has >= cores and mib >= memory_mib else 0
        return found

    def classes(self, need: Need) -> list[NodeClass]:
        """The nodes with a profile, in as few classes as this need can tell apart."""
        return [
            NodeClass(self.stands_for(nearest), nodes, self.names[nearest])
            for nearest, nodes in self.measured.groups(need)
        ]

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
    ordered = sorted(cluster.nodes, key=lambda node: natural(node.name))
    names = tuple(node.name for node in ordered)
    partitions: dict[str, int] = {}
    features: dict[frozenset[str], int] = {}
    shards: dict[int, int] = {}
    sizes: dict[tuple[int, int], int] = {}
    unknown = usable = in_maintenance = 0
    for i, node in enumerate(ordered):
        bit = 1 << i
        for partition in node.partitions:
            partitions[partition] = partitions.get(partition, 0) | bit
        features[node.features] = features.get(node.features, 0) | bit
        count = node.gres.get("shard", 0)
        shards[count] = shards.get(count, 0) | bit
        if node.cores is not None and node.memory_mib is not None:
            size = (node.cores, node.memory_mib)
            sizes[size] = sizes.get(size, 0) | bit
        if node.usable:
            usable |= bit
        if node.in_maintenance:
            in_maintenance |= bit
        if node.name not in by_name:
            unknown |= bit
    found = [
        profile and mig.apart(profile, node.gpu_types)
        for node in ordered
        for profile in (by_name.get(node.name),)
    ]
    makes: dict[Hashable, int] = {}
    numbers = [-1 if p is None else makes.setdefault(_make(p), len(makes)) for p in found]
    counted = [p and trusted(p, allow_declared) for p in found]
    built = Inventory(
        names=names,
        makes=len(makes),
        measured=Measured.of(numbers, counted),
        stands_for=_Stands(counted),
        unknown=unknown,
        partitions=partitions,
        usable=usable,
        feature_sets=tuple(features.items()),
        shard_sets=tuple(shards.items()),
        sizes=tuple(sizes.items()),
        default_partition=cluster.default_partition,
        index={name: i for i, name in enumerate(names)},
        in_maintenance=in_maintenance,
        models=_models(found),
    )
    return built.ruled(cluster)


def _models(profiles: Sequence[NodeProfile | None]) -> dict[str, int]:
    nodes: dict[str, int] = {}
    for i, profile in enumerate(profiles):
        if profile and profile.gpus:
            model = profile.gpus[0].model
            nodes[model] = nodes.get(model, 0) | 1 << i
    return nodes


class _Stands:
    """Profiles without what tells one machine from another of its make, made when asked for."""

    def __init__(self, profiles: Sequence[NodeProfile | None]) -> None:
        self._profiles = profiles
        self._made: dict[int, NodeProfile] = {}

    def __call__(self, node: int) -> NodeProfile:
        made = self._made.get(node)
        if made is None:
            profile = self._profiles[node]
            assert profile is not None
            made = self._made[node] = anonymous(profile)
        return made


_GPU_KIND = attrgetter(
    *(f.name for f in dataclasses.fields(Gpu) if f.name not in {"uuid", "pci_bus_id"})
)
_NUMA_KIND = attrgetter("id", "cpus", "socket", "distances")


def _make(profile: NodeProfile) -> Hashable:
    """What equal machines have in common, of what a need looks at; cheap, made for every node."""
    return (
        profile.cpu,
        tuple(map(_NUMA_KIND, profile.numa_nodes)),
        tuple(map(_GPU_KIND, profile.gpus)),
        bool(profile.nvmes),
        profile.software.gpu_driver,
        profile.software.cuda,
    )


def trusted(profile: NodeProfile, allow_declared: bool) -> NodeProfile:
    """The profile without values that were declared and would have to be measured."""
    if allow_declared:
        return profile
    untrusted = set(_declared(profile))
    if not untrusted:
        return profile

    def kept(path: str, value: float | None) -> float | None:
        return None if path in untrusted else value

    numa_nodes = tuple(
        dataclasses.replace(
            node,
            memory_bandwidth_gb_s=kept(
                f"numa_nodes[{i}].memory_bandwidth_gb_s", node.memory_bandwidth_gb_s
            ),
        )
        for i, node in enumerate(profile.numa_nodes)
    )

    def drive_values(i: int, drive: Nvme) -> dict[str, Any]:
        names = [name for name in _MEASURABLE if hasattr(drive, name)]
        return {name: kept(f"nvmes[{i}].{name}", getattr(drive, name)) for name in names}

    nvmes = tuple(
        dataclasses.replace(drive, **drive_values(i, drive))
        for i, drive in enumerate(profile.nvmes)
    )
    return dataclasses.replace(profile, numa_nodes=numa_nodes, nvmes=nvmes)


def _declared(profile: NodeProfile) -> Iterator[str]:
    for path, value in profile.values():
        measurable = value is not None and path.rpartition(".")[2] in _MEASURABLE
        if measurable and profile.where_from(path).method is Method.DECLARED:
            yield path


#: What tells one drive from another of its kind.
_DRIVE_OWN: dict[str, Any] = {
    "stable_id": None,
    "firmware": None,
    "pci_bus_id": None,
    "uses": (),
    "wear_percent": None,
}


def anonymous(profile: NodeProfile) -> NodeProfile:
    """The profile without what differs between equal machines: name, serial numbers, times."""
    return NodeProfile(
        name="",
        cpu=profile.cpu,
        numa_nodes=profile.numa_nodes,
        gpus=tuple(dataclasses.replace(g, uuid=None, pci_bus_id=None) for g in profile.gpus),
        nvmes=tuple(_anonymous_drive(drive) for drive in profile.nvmes),
        software=Software(gpu_driver=profile.software.gpu_driver, cuda=profile.software.cuda),
        memory_mib=profile.memory_mib,
        cache_gb=profile.cache_gb,
        source=Provenance(Method.DECLARED),
    )


def _anonymous_drive(drive: Nvme) -> Nvme:
    return dataclasses.replace(drive, **_DRIVE_OWN)
