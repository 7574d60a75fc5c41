"""What still packs on many states at once, with numpy alone: for daemons that compile nothing.

The same measure as ``kernels.packs``, walked place by place through the streams for all states
together. Slower by state than compiled loops, and free of the seconds that compiling takes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from crater_slurm.placement.packing.kernels import WHOLE, Floats, Ints, Measure
from crater_slurm.placement.packing.state import Cluster, Need


def fitting(cluster: Cluster, need: Need) -> npt.NDArray[np.bool_]:
    """Which nodes can take the need now, as ``Cluster.fitting`` tells."""
    take = np.asarray(need.take, np.int64)
    able: npt.NDArray[np.bool_] = np.asarray((cluster.rest >= take).all(axis=1))
    if need.count:
        able &= (cluster.gpus >= need.milli).sum(axis=1) >= need.count
        able &= (need.allowed >> cluster.models) & 1 == 1
    return able


def placed(gpus: Ints, need: Need) -> Ints:
    """The GPUs of each state with the need on them, as Slurm gives them: [state, GPU]."""
    if not need.count:
        return gpus.copy()
    rows = len(gpus)
    count, milli = np.full(rows, need.count), np.full(rows, need.milli)
    return gpus - _taken(gpus, gpus >= need.milli, count, milli) * need.milli


def packs(gpus: Ints, rest: Ints, models: Ints, mix: Measure) -> Floats:
    """Milli-GPU that streams of the mix would place on each state, mean over streams: [state].

    ``gpus`` is [state, GPU] in milli, ``rest`` [state, kind], ``models`` [state]. Each stream is
    placed in its order: what does not fit is passed over, a share goes to the tightest GPU, whole
    GPUs to the first free ones.
    """
    states, (streams, length) = len(gpus), mix.counts.shape
    if not streams or not states:
        return np.zeros(states)
    kinds = mix.least_take.shape[0]
    # One row for each state and stream.
    free = np.repeat(gpus, streams, axis=0)
    left = np.repeat(rest[:, :kinds], streams, axis=0)
    model = np.repeat(models, streams)
    placed = np.zeros(len(free), np.int64)
    for place in range(length):
        count, milli = (np.tile(part[:, place], states) for part in (mix.counts, mix.millis))
        allowed = np.tile(mix.allowed[:, place], states)
        take = np.tile(mix.takes[:, place], (states, 1))
        enough = free >= milli[:, None]
        able = (enough.sum(axis=1) >= count) & ((allowed >> model) & 1 == 1) & (count > 0)
        able &= (left >= take).all(axis=1)
        rows = np.flatnonzero(able)
        if not rows.size:
            continue
        taken = _taken(free[rows], enough[rows], count[rows], milli[rows])
        free[rows] -= taken * milli[rows, None]
        left[rows] -= take[rows]
        placed[rows] += count[rows] * milli[rows]
    means: Floats = placed.reshape(states, streams).mean(axis=1)
    return means


def _taken(free: Ints, enough: np.ndarray, count: Ints, milli: Ints) -> Ints:
    """Which GPUs each need takes, 0 or 1: [row, GPU]."""
    first = enough & (np.cumsum(enough, axis=1) <= count[:, None])
    tightest = np.where(enough, free, WHOLE + 1).argmin(axis=1)
    share = (count == 1) & (milli < WHOLE)
    one = np.arange(free.shape[1]) == tightest[:, None]
    return np.where(share[:, None], one, first).astype(np.int64)
