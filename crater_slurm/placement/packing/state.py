"""The rest of every node as arrays, and the needs that are placed on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from crater_slurm.placement.packing import kernels
from crater_slurm.placement.packing.kernels import WHOLE, Ints

ANY_MODEL = (1 << 62) - 1


@dataclass(frozen=True, slots=True, order=True)
class Need:
    """What a job takes of one node: ``count`` GPUs of ``milli`` each, and of what is counted per
    node (``take``: CPU, memory ... in the cluster's units and order). ``allowed`` are bits of GPU
    models."""

    count: int = 0
    milli: int = 0
    take: tuple[int, ...] = ()
    allowed: int = ANY_MODEL

    @property
    def gpu(self) -> int:
        """Milli-GPU in all."""
        return self.count * self.milli


@dataclass(frozen=True, slots=True)
class Placed:
    """A need on a node, with the GPUs that it has there."""

    node: int
    gpus: tuple[int, ...]


class Cluster:
    """Nodes' rest. ``gpus`` is [node, GPU] in milli, ``rest`` [node, kind]; both only change here.

    ``changed[n]`` counts the changes of node n, so that a score can be told from a stale one.
    """

    def __init__(
        self, gpus: Sequence[int], models: Sequence[int], rest: Sequence[Sequence[int]]
    ) -> None:
        """``gpus`` and ``models`` per node; ``rest`` what each node has of each counted kind."""
        count = len(gpus)
        self.models: Ints = np.asarray(models, np.int64)
        self.sizes: Ints = np.asarray(gpus, np.int64)
        self.gpus: Ints = np.zeros((count, max([1, *gpus])), np.int64)
        for n, size in enumerate(gpus):
            self.gpus[n, :size] = WHOLE
        self.rest: Ints = np.asarray(rest, np.int64).reshape(count, -1)
        self.capacity: Ints = self.rest.copy()
        self.changed: Ints = np.zeros(count, np.int64)

    @property
    def nodes(self) -> int:
        return len(self.sizes)

    @property
    def total(self) -> int:
        """Milli-GPU of all nodes."""
        return int(self.sizes.sum()) * WHOLE

    def ask(self, need: Need) -> kernels.Ask:
        """The need as the loops want it. Raises ValueError when it counts other kinds."""
        if len(need.take) != self.rest.shape[1]:
            raise ValueError(f"nodes count {self.rest.shape[1]} kinds, not as {need}")
        return kernels.Ask(need.count, need.milli, np.array(need.take, np.int64), need.allowed)

    def fitting(self, need: Need) -> npt.NDArray[np.bool_]:
        """Which nodes can take the need now."""
        able = np.zeros(self.nodes, np.bool_)
        kernels.fitting(self.gpus, self.rest, self.models, self.ask(need), able)
        return able

    def place(self, need: Need, node: int, gpu: int | None = None) -> Placed:
        """Take the need from a node: a share from ``gpu`` (the tightest when None).

        Raises ValueError when it does not fit, which leaves everything as it was.
        """
        row = self.gpus[node]
        take = np.asarray(need.take, np.int64)
        if (self.rest[node] < take).any():
            raise ValueError(f"node {node} has no room for {need}")
        if need.count == 1 and need.milli < WHOLE:
            chosen = int(kernels.tightest(row, need.milli)) if gpu is None else gpu
            picked: tuple[int, ...] = (chosen,) if chosen >= 0 and row[chosen] >= need.milli else ()
        else:
            picked = tuple(np.flatnonzero(row >= need.milli)[: need.count].tolist())
        if need.count and len(picked) < need.count:
            raise ValueError(f"node {node} has no GPUs for {need}")
        row[list(picked)] -= need.milli
        self.rest[node] -= take
        self.changed[node] += 1
        return Placed(node, picked if need.count else ())

    def release(self, need: Need, placed: Placed) -> None:
        """Give back what a need took. Raises ValueError when that was more than is there."""
        row, node = self.gpus[placed.node], placed.node
        back = self.rest[node] + np.asarray(need.take, np.int64)
        over = any(row[g] + need.milli > WHOLE or g >= self.sizes[node] for g in placed.gpus)
        if over or (back > self.capacity[node]).any():
            raise ValueError(f"node {node} gets back more than it has: {need}")
        row[list(placed.gpus)] += need.milli
        self.rest[node] = back
        self.changed[node] += 1


@dataclass(frozen=True, slots=True)
class Mix:
    """Needs with their weights, which sum to 1."""

    needs: tuple[Need, ...]
    weights: kernels.Floats

    @classmethod
    def of(cls, weighted: Iterable[tuple[Need, float]]) -> Mix:
        """From needs and positive weights of any scale."""
        pairs = list(weighted)
        weights = np.asarray([weight for _, weight in pairs], np.float64)
        needs = tuple(need for need, _ in pairs)
        return cls(needs, weights / weights.sum() if pairs else weights)

    @classmethod
    def target(cls, seen: Mapping[Need, int], share: float = 0.95, kinds: int | None = 1) -> Mix:
        """The most frequent needs, until they are ``share`` of all that were seen.

        Needs are told apart by their GPUs and the first ``kinds`` of what is counted per node
        (None: by all), which is also what a node's state is then judged by. The published mix
        has CPU only: memory takes so many values that few needs would stay frequent.
        """
        alike: dict[Need, int] = {}
        for need, count in seen.items():
            short = replace(need, take=need.take[:kinds])
            alike[short] = alike.get(short, 0) + count
        total, kept, covered = sum(alike.values()), [], 0
        for need, count in sorted(alike.items(), key=lambda item: (-item[1], item[0])):
            kept.append((need, float(count)))
            covered += count
            if covered >= share * total:
                break
        return cls.of(kept)
