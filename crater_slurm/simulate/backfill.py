"""When the first waiting job can start at the latest, and on which nodes.

The jobs that run are taken to last to their time limits. A later job may start now if it ends
before that time, or leaves room on those nodes; this is EASY backfill, the least that Slurm's
backfill plugin does too (it keeps such a promise for each job that it tests).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crater_slurm.placement.packing.compiled import loop
from crater_slurm.placement.packing.kernels import Floats, Ints
from crater_slurm.placement.packing.state import Cluster, Need, Placed

Bools = npt.NDArray[np.bool_]


@loop
def _room(
    gpus: Ints, rest: Ints, model: int, count: int, milli: int, take: Ints, allowed: int
) -> bool:
    for k in range(rest.shape[0]):
        if rest[k] < take[k]:
            return False
    if count == 0:
        return True
    if not (allowed >> model) & 1:
        return False
    found = 0
    for g in range(gpus.shape[0]):
        if gpus[g] >= milli:
            found += 1
    return found >= count


@loop
def _earliest(
    order: Ints, ends: Floats, node_of: Ints, milli_of: Ints, mask_of: Ints, take_of: Ints,
    gpus: Ints, rest: Ints, models: Ints,
    count: int, milli: int, take: Ints, allowed: int, wanted: int, ready: Ints,
) -> float:  # fmt: skip
    """Give back running pieces in order of their ends until ``wanted`` nodes have room."""
    found = 0
    for n in range(gpus.shape[0]):
        ready[n] = 1 if _room(gpus[n], rest[n], models[n], count, milli, take, allowed) else 0
        found += ready[n]
    time = -1.0
    for i in range(order.shape[0]):
        s = order[i]
        if found >= wanted and ends[s] > time:
            return time
        time = ends[s]
        n = node_of[s]
        for g in range(gpus.shape[1]):
            if (mask_of[s] >> g) & 1:
                gpus[n, g] += milli_of[s]
        for k in range(rest.shape[1]):
            rest[n, k] += take_of[s, k]
        if not ready[n] and _room(gpus[n], rest[n], models[n], count, milli, take, allowed):
            ready[n] = 1
            found += 1
    return time


@loop
def _might(
    may: Bools, gpus: Ints, rest: Ints, model: int, counts: Ints, millis: Ints, takes: Ints,
    allowed: Ints,
) -> None:  # fmt: skip
    """Mark the needs for which a node has room."""
    for m in range(may.shape[0]):
        if not may[m] and _room(gpus, rest, model, counts[m], millis[m], takes[m], allowed[m]):
            may[m] = True


class Needs:
    """The needs of a workload as arrays, and which of them might fit somewhere.

    A need that does not might only do so again on a node that something left, so this is cheap to
    keep, and most waiting jobs are never tried.
    """

    def __init__(self, needs: tuple[Need, ...], kinds: int) -> None:
        self._counts = np.asarray([need.count for need in needs], np.int64)
        self._millis = np.asarray([need.milli for need in needs], np.int64)
        self._takes = np.asarray([need.take for need in needs], np.int64).reshape(-1, kinds)
        self._allowed = np.asarray([need.allowed for need in needs], np.int64)
        self.may: Bools = np.ones(len(needs), np.bool_)

    def left(self, cluster: Cluster, node: int) -> None:
        """Something left a node."""
        own = (self._counts, self._millis, self._takes, self._allowed)
        _might(self.may, cluster.gpus[node], cluster.rest[node], cluster.models[node], *own)


class Running:
    """What runs: for each piece (a job's part on one node) what it takes, and its time limit."""

    def __init__(self, kinds: int) -> None:
        self._free: list[int] = []
        self._size = 0
        self.ends: Floats = np.full(64, np.inf)
        self.node: Ints = np.zeros(64, np.int64)
        self.milli: Ints = np.zeros(64, np.int64)
        self.mask: Ints = np.zeros(64, np.int64)
        self.take: Ints = np.zeros((64, kinds), np.int64)

    def add(self, need: Need, placed: Placed, end: float) -> int:
        """Note a piece that must end by ``end``; its number, for ``remove``."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._size
            self._size += 1
            if slot == len(self.ends):
                self._grow()
        self.ends[slot] = end
        self.node[slot] = placed.node
        self.milli[slot] = need.milli
        self.mask[slot] = sum(1 << gpu for gpu in placed.gpus)
        self.take[slot] = need.take
        return slot

    def remove(self, slot: int) -> None:
        self.ends[slot] = np.inf
        self._free.append(slot)

    def order(self) -> Ints:
        """Pieces in order of their limits."""
        by = np.argsort(self.ends[: self._size], kind="stable")
        return by[: self._size - len(self._free)]

    def _grow(self) -> None:
        self.ends = np.concatenate([self.ends, np.full(len(self.ends), np.inf)])
        self.node = np.concatenate([self.node, np.zeros_like(self.node)])
        self.milli = np.concatenate([self.milli, np.zeros_like(self.milli)])
        self.mask = np.concatenate([self.mask, np.zeros_like(self.mask)])
        self.take = np.concatenate([self.take, np.zeros_like(self.take)])


@dataclass(slots=True)
class Promise:
    """Nodes kept for a waiting job from ``time`` on: what will be left there at that time."""

    need: Need
    time: float
    gpus: dict[int, Ints]
    rest: dict[int, Ints]

    @classmethod
    def of(cls, cluster: Cluster, running: Running, need: Need, nodes: int) -> Promise:
        """The earliest time at which ``nodes`` nodes have room, and the first of those nodes."""
        gpus, rest = cluster.gpus.copy(), cluster.rest.copy()
        ready = np.zeros(cluster.nodes, np.int64)
        time = _earliest(
            running.order(), running.ends, running.node, running.milli, running.mask, running.take,
            gpus, rest, cluster.models,
            need.count, need.milli, np.asarray(need.take, np.int64), need.allowed, nodes, ready,
        )  # fmt: skip
        kept = [int(node) for node in np.flatnonzero(ready)[:nodes]]
        return cls(need, time, {n: gpus[n].copy() for n in kept}, {n: rest[n].copy() for n in kept})

    def breaks(self, need: Need, placed: Placed, end: float) -> bool:
        """Whether a piece that runs until ``end`` would delay the promised start."""
        if end <= self.time or placed.node not in self.gpus:
            return False
        gpus, rest = self._without(need, placed)
        short = bool((rest < np.asarray(self.need.take, np.int64)).any())
        return short or int((gpus >= self.need.milli).sum()) < self.need.count

    def keep(self, need: Need, placed: Placed, end: float) -> None:
        """A piece that breaks nothing was started."""
        if end > self.time and placed.node in self.gpus:
            self.gpus[placed.node], self.rest[placed.node] = self._without(need, placed)

    def _without(self, need: Need, placed: Placed) -> tuple[Ints, Ints]:
        gpus = self.gpus[placed.node].copy()
        gpus[list(placed.gpus)] -= need.milli
        return gpus, self.rest[placed.node] - np.asarray(need.take, np.int64)
