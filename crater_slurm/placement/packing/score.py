"""Scores of nodes for a need: how much less is stranded there. Highest is best.

Both measures are of one node's state, so a score stays right until its node changes; scores are
kept by need and node, and only what changed is computed again.
"""

from __future__ import annotations

import numpy as np

from crater_slurm.placement.packing import kernels
from crater_slurm.placement.packing.kernels import Ask, Floats, Ints, Measure, Memo, Row, View
from crater_slurm.placement.packing.state import Cluster, Mix, Need

#: Streams of the mix, and how many tasks each has: what was measured best (bench/RESULTS.md).
STREAMS, LENGTH = 32, 128
#: States evaluated per decision, which bounds its time; the rest wait for their turn.
EVALUATIONS = 64
UNBOUNDED = 1 << 40

_SLOTS = 1 << 18
_ROWS = 1024


class Scorer:
    """Scores by one measure for one cluster, with at most ``most`` evaluations per call."""

    def __init__(self, cluster: Cluster, measure: Measure, most: int = UNBOUNDED) -> None:
        self._cluster, self._most = cluster, most
        self._memo = Memo(np.full(_SLOTS, -1, np.int64), np.zeros(_SLOTS), np.zeros(1, np.int64))
        self._view = View(
            gpus=cluster.gpus,
            rest=cluster.rest,
            capacity=cluster.capacity,
            sizes=cluster.sizes,
            models=cluster.models,
            changed=cluster.changed,
            values=np.zeros(cluster.nodes),
            full=np.zeros(cluster.nodes),
            noted=np.full(cluster.nodes, -1, np.int64),
        )
        self._rows: dict[Need, tuple[Ask, Row]] = {}
        self.judge_by(measure)

    def scores(self, need: Need) -> tuple[Floats, Ints]:
        """Score of each node (NOT_THERE where the need doesn't fit), and the GPU for a share."""
        ask, row = self._row(need)
        kernels.refresh(self._view, ask, row, self._measure, self._memo, self._most)
        return row.scores, row.choice

    @property
    def full(self) -> Floats:
        """Fullness of each node that was scored, 0..1: the mean of the shares in use."""
        return self._view.full

    def judge_by(self, measure: Measure) -> None:
        """Take another measure. Scores by the old one stand until their turn comes."""
        if measure.least_take.size > self._cluster.rest.shape[1]:
            raise ValueError("the mix counts more kinds than the nodes")
        self._measure = measure
        self._memo.keys[:] = -1
        self._view.noted[:] = -1
        for _, row in self._rows.values():
            row.seen[:] = -1

    def _row(self, need: Need) -> tuple[Ask, Row]:
        found = self._rows.pop(need, None)
        if found is None:
            nodes = self._view.models.size
            never = np.full(nodes, -1, np.int64)
            row = Row(np.full(nodes, kernels.NOT_THERE), never.copy(), never)
            found = self._cluster.ask(need), row
            if len(self._rows) >= _ROWS:  # the one that was asked for longest ago
                del self._rows[next(iter(self._rows))]
        self._rows[need] = found
        return found


def fragments_of(mix: Mix) -> Measure:
    """FGD's measure: what a task of the mix can't use."""
    return _measure(kernels.FRAGMENTS, mix, np.arange(len(mix.needs)).reshape(1, -1))


def packs_of(mix: Mix, streams: int = STREAMS, length: int = LENGTH, seed: int = 0) -> Measure:
    """Pack-ahead: how much of streams of the mix still packs.

    Streams are drawn by frequency x GPUs, as a systematic sample (each need as often as its share
    says, to within one), shuffled once: all nodes are scored on the same streams, so that luck
    does not tell them apart.
    """
    drawn = np.array([need.count for need in mix.needs]) * mix.weights
    if drawn.sum() == 0:
        return _measure(kernels.PACKS, mix, np.zeros((0, length), np.int64))
    edges = np.cumsum(drawn / drawn.sum())
    points = (np.arange(streams * length) + 0.5) / (streams * length)
    picks = np.minimum(np.searchsorted(edges, points), len(mix.needs) - 1)
    np.random.default_rng(seed).shuffle(picks)
    return _measure(kernels.PACKS, mix, picks.reshape(streams, length))


def _measure(kind: int, mix: Mix, picks: Ints) -> Measure:
    needs = mix.needs
    kinds = len(needs[0].take) if needs else 0
    takes = np.array([need.take for need in needs], np.int64).reshape(len(needs), kinds)[picks]
    millis = np.array([need.milli for need in needs], np.int64)[picks]
    return Measure(
        kind=kind,
        counts=np.array([need.count for need in needs], np.int64)[picks],
        millis=millis,
        takes=takes,
        allowed=np.array([need.allowed for need in needs], np.int64)[picks],
        weights=mix.weights,
        least_milli=int(millis.min()) if millis.size else kernels.WHOLE,
        least_take=takes.min(axis=(0, 1), initial=1 << 60),
    )


def fragmented(cluster: Cluster, mix: Mix) -> float:
    """Share of the idle GPU that is fragmented, 0..1; 0 when none is idle."""
    idle = int(cluster.gpus.sum())
    nodes = (cluster.gpus, cluster.rest, cluster.models)
    return float(kernels.all_fragments(*nodes, fragments_of(mix)) / idle) if idle else 0.0
