"""Policies that choose a node: those of the published comparison, Slurm's own order, and crater's.

Each is a small class with one method. The published policies' scores are whole numbers, so many
nodes tie. The published runs then took the first by name, after every node's name had got a random
number in front: an order by chance that stays for a run. With the order of the file, packing and
clustering come out 0.7 points lower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from crater_slurm.placement import order, stranding
from crater_slurm.placement.largest import largest
from crater_slurm.placement.packing import score
from crater_slurm.placement.packing.kernels import NOT_THERE, WHOLE, Floats, Ints
from crater_slurm.placement.packing.state import Cluster, Mix, Need
from crater_slurm.placement.score import match

Choice = tuple[int, int | None] | None
Random = np.random.Generator


class Policy:
    """Chooses among the nodes that fit. It hears of arrivals, and of needs placed and released."""

    def __init__(self, cluster: Cluster, mix: Mix, random: Random) -> None:
        self.cluster, self.mix, self.random = cluster, mix, random
        self._turn = random.permutation(cluster.nodes)

    def choose(self, need: Need) -> Choice:
        """Node and GPU (None: the tightest), or None when it fits nowhere."""
        fitting = np.flatnonzero(self.cluster.fitting(need))
        if not fitting.size:
            return None
        node = self.pick(need, fitting)
        return node, self.gpu(need, node)

    def pick(self, need: Need, fitting: Ints) -> int:
        """One of the nodes that fit."""
        raise NotImplementedError

    def gpu(self, need: Need, node: int) -> int | None:
        """The GPU for a share on the node that was picked (None: the tightest)."""
        return None

    @property
    def most_gpu(self) -> int:
        """Milli-GPU of the largest node; of one GPU where there is none."""
        return max(1, int(self.cluster.sizes.max(initial=0))) * WHOLE

    @property
    def most_cpu(self) -> int:
        """CPU of the largest node."""
        return max(1, int(self.cluster.capacity[:, 0].max(initial=0)))

    def arrived(self, need: Need) -> None:
        """A need was asked for, once per job, before it is first chosen for."""

    def placed(self, need: Need, node: int) -> None:
        """A need was placed on a node."""

    def released(self, need: Need, node: int) -> None:
        """A need left a node."""

    def highest(self, scores: Floats | Ints, fitting: Ints) -> int:
        """The node of highest score; of several, the first in this run's order of chance."""
        best = fitting[scores == scores.max()]
        return int(best[np.argmin(self._turn[best])])


class RandomFit(Policy):
    """Any node, any GPU."""

    def pick(self, need: Need, fitting: Ints) -> int:
        return int(fitting[self.random.integers(fitting.size)])

    def gpu(self, need: Need, node: int) -> int | None:
        if need.count != 1 or need.milli == WHOLE:
            return None
        able = np.flatnonzero(self.cluster.gpus[node] >= need.milli)
        return int(able[self.random.integers(able.size)])


class FirstFit(Policy):
    """The first node in order, as Slurm 26.05 takes of nodes that all weigh the same."""

    def pick(self, need: Need, fitting: Ints) -> int:
        return int(fitting[0])


class Slurm(Policy):
    """The order of Slurm up to 24.11, of nodes that all weigh the same."""

    weighted = False

    def __init__(self, cluster: Cluster, mix: Mix, random: Random) -> None:
        super().__init__(cluster, mix, random)
        self._weights: Ints = cluster.sizes if self.weighted else np.zeros_like(cluster.sizes)

    def pick(self, need: Need, fitting: Ints) -> int:
        weights, free = self._weights[fitting], self.cluster.rest[fitting, 0]
        return order.taken(fitting, weights, free, need.take[0], need.count)


class SlurmWeighted(Slurm):
    """The same with the weights that crater renders: fewest GPUs first."""

    weighted = True


class BestFit(Policy):
    """The node with the least left after it: the mean over CPU and GPU, by the largest node."""

    def pick(self, need: Need, fitting: Ints) -> int:
        left = (self.cluster.rest[fitting, 0] - need.take[0]) / self.most_cpu
        gpus = self.cluster.gpus[fitting].sum(axis=1) - need.gpu
        left = (left + gpus / self.most_gpu) / 2
        raw = np.floor(100 * (1 - left))
        low, high = raw.min(), raw.max()
        scaled = np.floor((raw - low) * 100 / (high - low)) if high > low else raw * 0
        return self.highest(scaled, fitting)


class GpuPacking(Policy):
    """GPUs in use before free ones, nodes in use before idle ones; jobs without GPU anywhere."""

    def pick(self, need: Need, fitting: Ints) -> int:
        if not need.count:
            return self.highest(np.zeros(fitting.size), fitting)
        gpus, sizes = self.cluster.gpus[fitting], self.cluster.sizes[fitting]
        idle = (gpus == WHOLE).sum(axis=1) == sizes
        scores = np.where(idle, np.maximum(33 - sizes, sizes), 50 - need.count)
        if need.count == 1 and need.milli < WHOLE:
            shared = np.where((gpus < WHOLE) & (gpus >= need.milli), gpus, 10 * WHOLE)
            tight = shared.min(axis=1)
            on_shared = np.maximum(50, 100 - tight // 100)
            scores = np.where(tight < 10 * WHOLE, on_shared, scores)
        return self.highest(scores, fitting)


class GpuClustering(Policy):
    """Like requests together: a node's kinds are what runs there (a share, 1, 2, 4, 8 GPUs)."""

    def __init__(self, cluster: Cluster, mix: Mix, random: Random) -> None:
        super().__init__(cluster, mix, random)
        self._kinds = np.zeros((cluster.nodes, 6), np.int64)

    def pick(self, need: Need, fitting: Ints) -> int:
        if not need.count:
            return self.highest(np.zeros(fitting.size), fitting)
        kinds = self._kinds[fitting] > 0
        own, several = kinds[:, _kind(need)], kinds.sum(axis=1) > 1
        band = np.select([own & ~several, own, ~kinds.any(axis=1)], [75, 50, 25], 0)
        most = self.most_gpu
        fuller = 25 * (most - self.cluster.gpus[fitting].sum(axis=1)) // most
        return self.highest(band + fuller, fitting)

    def placed(self, need: Need, node: int) -> None:
        if need.count:
            self._kinds[node, _kind(need)] += 1

    def released(self, need: Need, node: int) -> None:
        if need.count:
            self._kinds[node, _kind(need)] -= 1


def _kind(need: Need) -> int:
    if need.count == 1:
        return 0 if need.milli < WHOLE else 1
    return min(5, 1 + (need.count - 1).bit_length())


class DotProduct(Policy):
    """The smallest product of what is free and what is asked, both by the largest node."""

    def pick(self, need: Need, fitting: Ints) -> int:
        most = self.most_cpu
        cpu = self.cluster.rest[fitting, 0] / most * (need.take[0] / most)
        gpus = self.most_gpu
        gpu = self.cluster.gpus[fitting].sum(axis=1) / gpus * (need.gpu / gpus)
        return self.highest(np.floor(100 * (1 - (cpu + gpu) / 2)), fitting)


class Fgd(Policy):
    """Fragmentation gradient descent: the node whose fragments grow least."""

    def __init__(self, cluster: Cluster, mix: Mix, random: Random) -> None:
        super().__init__(cluster, mix, random)
        self._scorer = score.Scorer(cluster, score.fragments_of(mix))

    def choose(self, need: Need) -> Choice:
        scores, choice = self._scorer.scores(need)
        fitting = np.flatnonzero(scores > NOT_THERE)
        if not fitting.size:
            return None
        node = self.highest(scores[fitting], fitting)
        return node, _gpu(choice[node])


class PackAhead(Policy):
    """crater's: the node after which most of the mix still packs; best fit among equals."""

    def __init__(self, cluster: Cluster, mix: Mix, random: Random) -> None:
        super().__init__(cluster, mix, random)
        self._scorer = score.Scorer(cluster, score.packs_of(mix), score.EVALUATIONS)

    def choose(self, need: Need) -> Choice:
        scores, choice = self._scorer.scores(need)
        node = int(np.argmax(scores + _BEST_FIT_MILLI * self._scorer.full))
        return None if scores[node] <= NOT_THERE else (node, _gpu(choice[node]))


class Preferred(PackAhead, SlurmWeighted):
    """crater's as Slurm can be told it: GPU models to prefer, of which Slurm takes a node by its
    own order, with the weights that crater renders.

    Which models suit a need is worked out once per picture of the cluster, by the scheduler's score
    in the two amounts that a trace has: what the job would strand, and its share of the cores.
    Where none of the models has room Slurm takes any other.
    """

    def __init__(self, cluster: Cluster, mix: Mix, random: Random) -> None:
        super().__init__(cluster, mix, random)
        self._preferred: dict[Need, list[int]] = {}
        self._choices = 0
        self._largest = largest(np.column_stack([cluster.sizes, cluster.capacity]))

    def choose(self, need: Need) -> Choice:
        self._choices += 1
        if self._choices % _PICTURE_EVERY == 0:
            self._preferred.clear()
        fitting = np.flatnonzero(self.cluster.fitting(need))
        if not fitting.size:
            return None
        if need not in self._preferred:
            self._preferred[need] = self._suiting(need, fitting)
        able = fitting[np.isin(self.cluster.models[fitting], self._preferred[need])]
        return self.pick(need, able if able.size else fitting), None

    def _suiting(self, need: Need, fitting: Ints) -> list[int]:
        """GPU models of which the node that Slurm takes is within the tolerance of the best; the
        few largest nodes are left alone, unless Slurm's own choice is one of them."""
        scores, _ = self._scorer.scores(need)
        models = self.cluster.models[fitting]
        taken = {int(m): self.pick(need, fitting[models == m]) for m in np.unique(models)}
        if not self._largest[self.pick(need, fitting)]:
            taken = {model: node for model, node in taken.items() if not self._largest[node]}
        parts = {model: self._score(need, node, scores[node]) for model, node in taken.items()}
        if not parts:
            return []
        least = max(parts.values()) - TOLERANCE
        return [model for model, part in parts.items() if part >= least]

    def _score(self, need: Need, node: int, worth: float) -> float:
        size, cores = int(self.cluster.sizes[node]), int(self.cluster.capacity[node, 0])
        own = cores * need.gpu / (WHOLE * size) if need.count else cores
        stranded = stranding.value(-worth - need.gpu, need.count)
        return SCORE_SHARE * stranded + (1 - SCORE_SHARE) * match(need.take[0], own)


class PreferredUnweighted(Preferred):
    """The same on nodes that all weigh the same."""

    weighted = False


class Learning(PackAhead):
    """crater's with the mix of what has arrived so far, as in production: no look at the future."""

    def __init__(self, cluster: Cluster, mix: Mix, random: Random) -> None:
        super().__init__(cluster, Mix.of(()), random)
        self._seen: Counter[Need] = Counter()
        self._next = _FIRST_MIX

    def arrived(self, need: Need) -> None:
        self._seen[need] += 1
        if self._seen.total() == self._next:
            self._scorer.judge_by(score.packs_of(Mix.target(self._seen)))
            self._next = min(2 * self._next, self._next + _NEXT_MIX)


#: What settings have by default: fragmentation's part of a score, and how near is as good.
SCORE_SHARE, TOLERANCE = 0.9, 0.01
#: Placements between two pictures of the cluster, where the scheduler has one each half minute.
_PICTURE_EVERY = 50
#: A full node's advantage over an empty one, in milli-GPU that still pack.
_BEST_FIT_MILLI = 0.1
#: Arrivals before the first mix; the next one after twice as many, or after so many more.
_FIRST_MIX, _NEXT_MIX = 32, 2000


def _gpu(choice: int) -> int | None:
    return int(choice) if choice >= 0 else None


@dataclass(frozen=True, slots=True)
class Known:
    """A policy by name, with the name under which it was published (None: it was not)."""

    make: Callable[[Cluster, Mix, Random], Policy]
    about: str
    published: str | None = None


POLICIES: dict[str, Known] = {
    "random": Known(RandomFit, "any node that fits", "01-Random"),
    "firstfit": Known(FirstFit, "the first node in order, as Slurm 26.05"),
    "slurm": Known(Slurm, "order of Slurm up to 24.11, all nodes of one weight"),
    "slurm-weights": Known(SlurmWeighted, "the same, fewest GPUs first by weight"),
    "dotprod": Known(DotProduct, "smallest product of free and asked", "02-DotProd"),
    "clustering": Known(GpuClustering, "like requests together", "03-GpuClustering"),
    "packing": Known(GpuPacking, "GPUs and nodes in use first", "04-GpuPacking"),
    "bestfit": Known(BestFit, "least left over", "05-BestFit"),
    "fgd": Known(Fgd, "fragmentation gradient descent", "06-FGD"),
    "crater": Known(PackAhead, "most of the mix still packs"),
    "crater-prefer": Known(Preferred, "GPU models by the same, then slurm-weights"),
    "crater-prefer-unweighted": Known(PreferredUnweighted, "GPU models by the same, then slurm"),
    "crater-learning": Known(Learning, "the same, by the mix that arrived so far"),
}
