"""The inner loops of packing: what fits a node, what its rest is worth, scores of all nodes.

A state is the rest of a node: ``gpus`` the milli-GPU left on each of its GPUs (1000 is a free one,
0 also stands for a GPU that the node does not have), and ``rest`` what is left of everything that
is counted per node (CPU, memory, bandwidth, NVMe).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crater_slurm.placement.packing.compiled import loop

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

WHOLE = 1000
#: Score of a node that can't take the need.
NOT_THERE = -1e18

FRAGMENTS, PACKS = 0, 1


class Ask(NamedTuple):
    """``gpus`` of ``milli`` each (below 1000 a share of one GPU), and ``take`` of the rest;
    ``allowed`` are bits of GPU models."""

    gpus: int
    milli: int
    take: Ints
    allowed: int


class Measure(NamedTuple):
    """What a state is judged by: streams of needs, [stream, place]. FRAGMENTS has one, the mix.

    ``takes`` has one more axis, the kind. It may have fewer kinds than the nodes: the first ones.
    ``weights`` are of the mix.
    """

    kind: int
    counts: Ints
    millis: Ints
    takes: Ints
    allowed: Ints
    weights: Floats
    least_milli: int
    least_take: Ints


class View(NamedTuple):
    """The cluster's arrays, and per node the value and fullness at change ``noted``."""

    gpus: Ints
    rest: Ints
    capacity: Ints
    sizes: Ints
    models: Ints
    changed: Ints
    values: Floats
    full: Floats
    noted: Ints


class Memo(NamedTuple):
    """Values by state. A slot keeps the last state that fell on it; ``made`` counts evaluations."""

    keys: Ints
    values: Floats
    made: Ints


class Row(NamedTuple):
    """Scores of all nodes for one need, the GPU for a share, and the change they are of."""

    scores: Floats
    choice: Ints
    seen: Ints


@loop
def fits(gpus: Ints, rest: Ints, model: int, need: Ask) -> bool:
    """Whether a need can be met by a node in this state."""
    for k in range(rest.shape[0]):
        if rest[k] < need.take[k]:
            return False
    if need.gpus == 0:
        return True
    if not (need.allowed >> model) & 1:
        return False
    found = 0
    for g in range(gpus.shape[0]):
        if gpus[g] >= need.milli:
            found += 1
    return found >= need.gpus


@loop
def fitting(gpus: Ints, rest: Ints, models: Ints, need: Ask, able: npt.NDArray[np.bool_]) -> None:
    """Which nodes can take a need now, into ``able``."""
    for n in range(models.shape[0]):
        able[n] = fits(gpus[n], rest[n], models[n], need)


@loop
def tightest(gpus: Ints, milli: int) -> int:
    """The GPU with the least left on which ``milli`` fits, the first of equals; -1 for none."""
    best, left = -1, WHOLE + 1
    for g in range(gpus.shape[0]):
        if milli <= gpus[g] < left:
            best, left = g, gpus[g]
    return best


@loop
def take_gpus(gpus: Ints, count: int, milli: int, gpu: int) -> None:
    """Take GPUs that are known to fit: a share from ``gpu``, whole ones in their order."""
    if count == 1 and milli < WHOLE:
        gpus[gpu] -= milli
        return
    for g in range(gpus.shape[0]):
        if count and gpus[g] >= milli:
            gpus[g] -= milli
            count -= 1


@loop
def fragments(gpus: Ints, rest: Ints, model: int, mix: Measure) -> float:
    """Milli-GPU of the rest that a task of the mix can't use, on average over the mix.

    For a task that doesn't fit, or asks for no GPU, all of the rest is a fragment; for one that
    fits, what is left on GPUs that are too small for it (Weng et al., "Beware of Fragmentation",
    USENIX ATC 2023, section 4).
    """
    idle = 0
    for g in range(gpus.shape[0]):
        idle += gpus[g]
    total = 0.0
    for m in range(mix.counts.shape[1]):
        count, milli = mix.counts[0, m], mix.millis[0, m]
        lost, found = 0, 0
        for g in range(gpus.shape[0]):
            if gpus[g] >= milli:
                found += 1
            else:
                lost += gpus[g]
        usable = 0 < count <= found and (mix.allowed[0, m] >> model) & 1 == 1
        for k in range(mix.least_take.shape[0]):
            usable = usable and rest[k] >= mix.takes[0, m, k]
        total += mix.weights[m] * (lost if usable else idle)
    return total


@loop
def all_fragments(gpus: Ints, rest: Ints, models: Ints, mix: Measure) -> float:
    """Fragments of all nodes together."""
    total = 0.0
    for n in range(models.shape[0]):
        total += fragments(gpus[n], rest[n], models[n], mix)
    return total


@loop
def packs(gpus: Ints, rest: Ints, model: int, mix: Measure) -> float:
    """Milli-GPU that streams of the mix would still place on this node alone, mean over streams.

    Each stream is placed in its order: what does not fit is passed over, a share goes to the
    tightest GPU, whole GPUs to the first free ones.
    """
    placed, size, kinds = 0, gpus.shape[0], mix.least_take.shape[0]
    gpu_now, rest_now = np.empty(size, np.int64), np.empty(kinds, np.int64)
    for s in range(mix.counts.shape[0]):
        gpu_now[:] = gpus
        most, room = 0, True
        for g in range(size):
            most = max(most, gpu_now[g])
        for k in range(kinds):
            rest_now[k] = rest[k]
            room = room and rest_now[k] >= mix.least_take[k]
        for i in range(mix.counts.shape[1]):
            if not room or most < mix.least_milli:
                break
            count, milli = mix.counts[s, i], mix.millis[s, i]
            if milli > most or not (mix.allowed[s, i] >> model) & 1:
                continue
            able = True
            for k in range(kinds):
                able = able and rest_now[k] >= mix.takes[s, i, k]
            if not able:
                continue
            if count > 1:
                found = 0
                for g in range(size):
                    if gpu_now[g] >= milli:
                        found += 1
                if found < count:
                    continue
            take_gpus(gpu_now, count, milli, tightest(gpu_now, milli))
            placed += count * milli
            most = 0
            for g in range(size):
                most = max(most, gpu_now[g])
            for k in range(kinds):
                rest_now[k] -= mix.takes[s, i, k]
                room = room and rest_now[k] >= mix.least_take[k]
    return float(placed / max(1, mix.counts.shape[0]))


@loop
def value(gpus: Ints, rest: Ints, model: int, mix: Measure, memo: Memo) -> float:
    """What a state is worth: minus its fragments, or what still packs. Sorts ``gpus``.

    Equal states share one evaluation; which of its GPUs are full makes no difference to a node.
    """
    for a in range(1, gpus.shape[0]):
        moved, b = gpus[a], a - 1
        while b >= 0 and gpus[b] < moved:
            gpus[b + 1] = gpus[b]
            b -= 1
        gpus[b + 1] = moved
    # Two residues below 2^31 make a key of 62 bits; no product leaves 64 bits.
    one, two = model + 1, model + 7
    for g in range(gpus.shape[0]):
        one = (one * 1103515245 + gpus[g] + 1) % 2147483647
        two = (two * 69621 + gpus[g] + 1) % 2147483629
    for k in range(mix.least_take.shape[0]):
        one = (one * 1103515245 + rest[k] % 2147483647 + 1) % 2147483647
        two = (two * 69621 + rest[k] % 2147483629 + 1) % 2147483629
    key = (one << 31) | two
    slot = (one ^ (two >> 7)) % memo.keys.shape[0]
    if memo.keys[slot] != key:
        memo.made[0] += 1
        memo.keys[slot] = key
        if mix.kind == FRAGMENTS:
            memo.values[slot] = -fragments(gpus, rest, model, mix)
        else:
            memo.values[slot] = packs(gpus, rest, model, mix)
    return float(memo.values[slot])


@loop
def score(view: View, n: int, need: Ask, row: Row, mix: Measure, memo: Memo) -> None:
    """Score one node for a need that fits it: the value after placing it, less the value before.

    A share tries every filling among the GPUs and keeps the best, the first of equals. FGD's score
    is a whole number from 0 to 100, as published.
    """
    size, kinds = view.gpus.shape[1], view.rest.shape[1]
    gpus, rest = np.empty(size, np.int64), np.empty(kinds, np.int64)
    if view.noted[n] != view.changed[n]:
        gpus[:] = view.gpus[n]
        view.values[n] = value(gpus, view.rest[n], view.models[n], mix, memo)
        free = view.gpus[n].sum() / max(1, view.sizes[n] * WHOLE)
        for k in range(kinds):
            free += view.rest[n, k] / max(1, view.capacity[n, k])
        view.full[n] = 1 - free / (kinds + 1)
        view.noted[n] = view.changed[n]
    share = need.gpus == 1 and need.milli < WHOLE
    for k in range(kinds):
        rest[k] = view.rest[n, k] - need.take[k]
    row.scores[n] = NOT_THERE
    for g in range(size if share else 1):
        again = share and view.gpus[n, g] < need.milli
        for other in range(g):
            again = again or view.gpus[n, other] == view.gpus[n, g]
        if again:
            continue
        gpus[:] = view.gpus[n]
        take_gpus(gpus, need.gpus, need.milli, g)
        gain = value(gpus, rest, view.models[n], mix, memo) - view.values[n]
        if mix.kind == FRAGMENTS:
            gain = math.floor(100 / (1 + math.exp(-gain / WHOLE)))
        if gain > row.scores[n]:
            row.scores[n], row.choice[n] = gain, g if share else -1
    row.seen[n] = view.changed[n]


@loop
def refresh(view: View, need: Ask, row: Row, mix: Measure, memo: Memo, most: int) -> None:
    """Bring a need's scores up to date, with at most ``most`` evaluations (and a few begun ones).

    Beyond that, a node keeps the score it had; one that never had any waits for its turn, unless
    no other node is left. Whether a node fits is always found anew.
    """
    enough, found = memo.made[0] + most, False
    for n in range(view.models.shape[0]):
        if row.seen[n] == view.changed[n]:
            found = found or row.scores[n] > NOT_THERE
            continue
        if not fits(view.gpus[n], view.rest[n], view.models[n], need):
            row.scores[n], row.choice[n] = NOT_THERE, -1
            row.seen[n] = view.changed[n]
        elif memo.made[0] < enough or not found:
            score(view, n, need, row, mix, memo)
            found = True
        elif row.choice[n] >= 0 and view.gpus[n, row.choice[n]] < need.milli:
            row.choice[n] = tightest(view.gpus[n], need.milli)
