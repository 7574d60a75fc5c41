"""Which node Slurm takes for a job on one node, of those that have room.

It takes nodes of the lowest weight. Of those Slurm 26.05 takes the first. Releases up to 24.11 do
not: they take the shortest row of neighbours that all have room, by the CPUs that the job could
have there, and within that row the node with the fewest (``_eval_nodes_consec`` of their select
plugin). So they fill a cluster of one weight hole by hole, wherever the holes are. Releases between
were not looked at, and are taken for the older ones.
"""

from __future__ import annotations

import numpy as np

from crater_slurm.placement.packing.kernels import Ints

Release = tuple[int, int]
#: The one that rows and counts of CPUs are of where no other is told.
OF_ROWS: Release = (24, 11)
_OF_FIRST: Release = (26, 5)


def taken(
    able: Ints, weights: Ints, free: Ints, asked: int, gpus: int, release: Release = OF_ROWS
) -> int:
    """The node that Slurm takes of ``able``: numbers of nodes in Slurm's order, at least one.

    ``weights`` and ``free`` CPUs are of these nodes; the job asks for ``asked`` CPUs and ``gpus``
    GPUs, or shards of one.
    """
    lightest = weights == weights.min()
    nodes = able[lightest]
    if release >= _OF_FIRST:
        return int(nodes[0])
    cpus = _counted(free[lightest], max(1, asked), gpus, release)
    starts = np.flatnonzero(np.diff(nodes, prepend=nodes[0] - 2) > 1)
    row = int(np.argmin(np.add.reduceat(cpus, starts)))
    last = starts[row + 1] if row + 1 < starts.size else nodes.size
    in_row = slice(starts[row], last)
    return int(nodes[in_row][np.argmin(cpus[in_row])])


def _counted(free: Ints, asked: int, gpus: int, release: Release) -> Ints:
    """The CPUs that Slurm counts of each node. Beside GPUs it is what the job asks for; without, as
    many tasks as fit, or all that are free in releases before 24.11."""
    if gpus:
        return np.full_like(free, asked)
    return free // asked * asked if release >= OF_ROWS else free
