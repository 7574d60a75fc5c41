"""Small clusters, needs and mixes for the tests of packing, and what hypothesis draws of them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from crater_slurm.placement.packing.kernels import FRAGMENTS, PACKS, Measure
from crater_slurm.placement.packing.state import Cluster, Need

#: Few sizes, so that fits and ties are common.
MILLIS = (190, 300, 500, 810, 1000)


def share(milli: int, cpu: int = 1, **more: int) -> Need:
    return Need(1, milli, (cpu,), **more)


def whole(gpus: int = 1, cpu: int = 1, **more: int) -> Need:
    return Need(gpus, 1000, (cpu,), **more)


def plain(cpu: int) -> Need:
    return Need(0, 0, (cpu,))


def cluster(*nodes: tuple[int, int], models: tuple[int, ...] = ()) -> Cluster:
    """Nodes as (GPUs, CPU)."""
    return Cluster([n[0] for n in nodes], models or [0] * len(nodes), [[n[1]] for n in nodes])


def measure(kind: int, *streams: list[Need], weights: tuple[float, ...] = ()) -> Measure:
    """Streams of needs as they stand here; FRAGMENTS takes one, its mix."""
    needs = [need for stream in streams for need in stream]

    def each(values: list[object]) -> np.ndarray:
        array = np.array(values, np.int64)
        return array.reshape(len(streams), len(streams[0]), *array.shape[1:])

    takes = each([need.take for need in needs])
    return Measure(
        kind=kind,
        counts=each([need.count for need in needs]),
        millis=each([need.milli for need in needs]),
        takes=takes,
        allowed=each([need.allowed for need in needs]),
        weights=np.array(weights),
        least_milli=min(need.milli for need in needs),
        least_take=takes.min(axis=(0, 1)),
    )


def fragments_measure(mix: list[Need], *weights: float) -> Measure:
    return measure(FRAGMENTS, mix, weights=weights)


def packs_measure(*streams: list[Need]) -> Measure:
    return measure(PACKS, *streams)


@st.composite
def needs(draw: st.DrawFn, kinds: int = 2) -> Need:
    count = draw(st.integers(0, 3))
    milli = draw(st.sampled_from(MILLIS)) if count == 1 else 1000 * (count > 0)
    take = tuple(draw(st.integers(0, 6)) for _ in range(kinds))
    return Need(count, milli, take, draw(st.sampled_from((1, 2, 3))))


@st.composite
def clusters(draw: st.DrawFn, kinds: int = 2) -> Cluster:
    count = draw(st.integers(1, 4))
    sizes = [draw(st.integers(0, 4)) for _ in range(count)]
    models = [draw(st.integers(0, 1)) for _ in range(count)]
    rest = [[draw(st.integers(0, 12)) for _ in range(kinds)] for _ in range(count)]
    return Cluster(sizes, models, rest)
