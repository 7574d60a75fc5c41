"""What a job would strand, node group by node group: the rest of the cluster, and what packs on it.

Of the nodes that a job prefers, Slurm takes one by a rule of its own (``order``). So of each group
of nodes that can be preferred together, that node is looked at: how much of the cluster's own mix
of jobs packs on it before and after. A job that takes just what it uses costs its own GPUs; one
that leaves cores without GPUs, or GPUs without cores, costs more, and one that takes such a rest
costs less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crater_slurm.model.cluster import NodeUse
from crater_slurm.model.profile import NodeProfile
from crater_slurm.model.slices import SLICES
from crater_slurm.placement import order
from crater_slurm.placement.largest import largest
from crater_slurm.placement.need import Need
from crater_slurm.placement.packing import batch
from crater_slurm.placement.packing.kernels import WHOLE, Floats, Ints, Measure
from crater_slurm.placement.packing.state import ANY_MODEL, Cluster, Mix
from crater_slurm.placement.packing.state import Need as PackedNeed

_Nodes = npt.NDArray[np.bool_]

#: Bits for GPU models; a cluster with more has the rest in the last.
_MOST_KINDS = 60
#: States that are worth something together; more would only take more memory.
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Kind:
    """A need as the mix counts it, with the GPU models on which it may be.

    ``milli`` is what it takes of each of its GPUs: all, or the part that its slices are.
    """

    gpus: int
    take: tuple[int, ...]
    models: frozenset[str]
    milli: int = WHOLE


def take_of(need: Need) -> tuple[int, ...]:
    """What a job takes of a node beside GPUs: cores, MiB, GB/s, IOPS, GB of cache."""
    return (
        need.cpus or 0,
        need.memory_mib or 0,
        round(need.memory_bandwidth_gb_s or 0),
        need.ssd_iops or 0,
        need.cache_gb or 0,
    )


def model_of(profile: NodeProfile | None) -> str:
    """The GPU model by which a node is told from others; empty without GPU."""
    return profile.gpus[0].model if profile and profile.gpus else ""


@dataclass(frozen=True, slots=True)
class Taken:
    """The node that Slurm takes of a group, and the milli-GPU of the mix that are lost there beyond
    the GPUs that the job takes (negative: it takes what was stranded).

    ``spared``: it is one of the few largest, and the job has room on others and would get one.
    """

    node: int
    lost: float
    spared: bool = False


class Rest:
    """What is left of every node, in the order of the inventory, which is taken for Slurm's."""

    def __init__(
        self,
        profiles: Sequence[NodeProfile | None],
        used: Sequence[NodeUse],
        usable: _Nodes,
        weights: Sequence[int] | None = None,
        release: order.Release = order.OF_ROWS,
    ) -> None:
        """From each node's profile (None: unknown, and has nothing), use, whether it is up, and its
        weight in Slurm (None: all weigh the same), which is of ``release``."""
        models = [model_of(profile) for profile in profiles]
        self._bits = {
            model: min(i, _MOST_KINDS) for i, model in enumerate(sorted(set(models) - {""}))
        }
        self.usable = usable
        self.release = release
        self.weights = np.asarray(weights or [1] * len(profiles), np.int64)
        sizes = [len(profile.gpus) if profile else 0 for profile in profiles]
        rest = [_rest(p, u) for p, u in zip(profiles, used, strict=True)]
        self.cluster = Cluster(sizes, [self._bits.get(m, 0) for m in models], rest)
        self.largest = largest(np.array([_size(profile) for profile in profiles], np.int64))
        for n, use in enumerate(used):
            if use.gres or use.shards:
                self._take(n, use)

    def _take(self, node: int, use: NodeUse) -> None:
        """Jobs have the cards that Slurm says; where it doesn't, the first ones."""
        row, size = self.cluster.gpus[node], int(self.cluster.sizes[node])
        for gpu, (taken, there) in enumerate(use.shards[:size]):
            row[gpu] -= WHOLE * taken // max(1, there)
        whole = [gpu for gpu in use.gpus if gpu < size]
        row[whole or np.flatnonzero(row[:size] == WHOLE)[: use.gres.get("gpu", 0)]] = 0
        if not use.shards:
            _fill(row[:size], use.gres.get("shard", 0))

    def mix(self, seen: Mapping[Kind, int]) -> Mix:
        """The mix of what was asked for, as this cluster counts it."""
        counted: Counter[PackedNeed] = Counter()
        for kind, count in seen.items():
            counted[self.need(kind)] += count
        return Mix.target(counted, kinds=None)

    def need(self, kind: Kind) -> PackedNeed:
        bits = [self._bits[model] for model in kind.models if model in self._bits]
        allowed = sum(1 << bit for bit in set(bits)) if bits else ANY_MODEL
        return PackedNeed(kind.gpus, kind.milli if kind.gpus else 0, kind.take, allowed)

    def look(
        self, asked: Sequence[tuple[Kind, Sequence[_Nodes]]], measure: Measure
    ) -> list[list[Taken | None]]:
        """For each kind of job and each of its groups of nodes, what Slurm takes of the group; None
        where no node has room now."""
        needs = [self.need(kind) for kind, _ in asked]
        able = [self._able(need, groups) for need, (_, groups) in zip(needs, asked, strict=True)]
        takes = [
            [self._taken(room & group, need) for group in groups]
            for need, room, (_, groups) in zip(needs, able, asked, strict=True)
        ]
        lost = iter(self._lost(needs, takes, measure))
        spares = [self._spares(need, room) for need, room in zip(needs, able, strict=True)]
        return [
            [
                Taken(n, next(lost), spared=spare and bool(self.largest[n])) if n >= 0 else None
                for n in nodes
            ]
            for nodes, spare in zip(takes, spares, strict=True)
        ]

    def _spares(self, need: PackedNeed, able: _Nodes) -> bool:
        """Whether the job, if nothing were preferred, would get none of the few largest nodes."""
        own = self._taken(able, need)
        return own >= 0 and not self.largest[own]

    def _lost(
        self, needs: list[PackedNeed], takes: list[list[int]], measure: Measure
    ) -> list[float]:
        """What is lost on each node that is taken, one need after the other; all worked out at
        once."""
        cluster, rows = self.cluster, [n for taken in takes for n in taken if n >= 0]
        whole, place = np.unique(np.array(rows, np.int64), return_inverse=True)
        gpus, left, own = [cluster.gpus[whole]], [cluster.rest[whole]], []
        for need, taken in zip(needs, takes, strict=True):
            nodes = [node for node in taken if node >= 0]
            gpus.append(batch.placed(cluster.gpus[nodes], need))
            left.append(cluster.rest[nodes] - np.asarray(need.take, np.int64))
            own += [need.gpu] * len(nodes)
        models = cluster.models[np.concatenate([whole, np.array(rows, np.int64)])]
        worth = _worth(np.concatenate(gpus), np.concatenate(left), models, measure)
        lost: list[float] = (worth[: whole.size][place] - worth[whole.size :] - own).tolist()
        return lost

    def _able(self, need: PackedNeed, groups: Sequence[_Nodes]) -> _Nodes:
        """Which nodes of the groups have room."""
        members = np.logical_or.reduce([*groups, np.zeros_like(self.usable)])
        found: _Nodes = batch.fitting(self.cluster, need) & self.usable & members
        return found

    def _taken(self, able: _Nodes, need: PackedNeed) -> int:
        """The node that Slurm takes of those with room, -1 where there is none."""
        nodes = np.flatnonzero(able)
        if not nodes.size:
            return -1
        weights, free = self.weights[nodes], self.cluster.rest[nodes, 0]
        return order.taken(nodes, weights, free, need.take[0], need.count, self.release)


def _worth(gpus: Ints, rest: Ints, models: Ints, measure: Measure) -> Floats:
    """What packs on each state; many at a time, but not all, for the sake of memory."""
    parts = [slice(first, first + _AT_ONCE) for first in range(0, len(gpus), _AT_ONCE)]
    found = [batch.packs(gpus[part], rest[part], models[part], measure) for part in parts]
    return np.concatenate([np.zeros(0), *found])


def value(cost: float, gpus: int) -> float:
    """A cost as a part of a score, 0..1: 0.5 where the job takes just what it uses, 0 where it
    strands as many GPUs again, 1 where it takes as many that were stranded."""
    return min(1.0, max(0.0, 0.5 - cost / (2 * WHOLE * max(1, gpus))))


def _fill(row: npt.NDArray[np.int64], shards: int) -> None:
    """Put shards on cards where Slurm (22.05) doesn't say on which: the first ones, filled up."""
    for gpu in np.flatnonzero(row >= WHOLE):
        part = min(shards, SLICES)
        row[gpu] -= WHOLE * part // SLICES
        shards -= part


def _size(profile: NodeProfile | None) -> tuple[int, ...]:
    """GPUs, the memory of the smallest, cores and MiB of a whole node."""
    if profile is None:
        return (0, 0, 0, 0)
    gpu_memory = min((gpu.memory_mib or 0 for gpu in profile.gpus), default=0)
    return len(profile.gpus), gpu_memory, profile.cpu.cores, profile.memory_mib or 0


def _rest(profile: NodeProfile | None, use: NodeUse) -> tuple[int, ...]:
    if profile is None:
        return (0, 0, 0, 0, 0)
    cores = profile.cpu.cores - -(-use.cpus // max(1, profile.cpu.threads_per_core))
    iops = max((drive.random_read_iops or 0 for drive in profile.nvmes), default=0)
    have = (
        cores,
        (profile.memory_mib or 0) - use.memory_mib,
        round(profile.memory_bandwidth_gb_s or 0) - use.gres.get("membw", 0),
        iops - use.gres.get("nviops", 0),
        (profile.cache_gb or 0) - use.gres.get("nvme", 0),
    )
    return tuple(max(0, amount) for amount in have)


def masks(sets: Iterable[int], count: int) -> list[_Nodes]:
    """Node sets as arrays, one place for each of ``count`` nodes."""
    size = -(-count // 8)
    found = []
    for nodes in sets:
        packed = np.frombuffer(nodes.to_bytes(size, "little"), np.uint8)
        found.append(np.unpackbits(packed, bitorder="little")[:count].astype(np.bool_))
    return found
