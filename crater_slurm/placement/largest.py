"""The few largest nodes, which jobs with room elsewhere are not sent to.

What packs on a node says nothing of the rare jobs that only a few nodes can take, such as eight
GPUs with 120 cores where most nodes have 96: the mix has hardly any. But once small jobs are sent
to those nodes, such a job waits for hours, until the last of them has ended.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from crater_slurm.placement.packing.kernels import Ints

#: So many of all nodes are few, and so much less is as large: sizes differ a little by firmware.
#: Shares of 0.05 to 0.2 give the same results on the published inventory (bench/RESULTS.md).
FEW, AS_LARGE = 0.1, 0.9


def largest(sizes: Ints) -> npt.NDArray[np.bool_]:
    """The nodes of which few are as large, in every one of the amounts: ``sizes`` [node, amount].

    None on a cluster of less than ten nodes, or where all are alike.
    """
    # To two digits, or each of thousands of nodes would have a memory of its own.
    step = 10.0 ** np.maximum(0, np.floor(np.log10(np.maximum(sizes, 1))) - 1)
    rounded = np.round(sizes / step) * step
    kinds, kind, count = np.unique(rounded, axis=0, return_inverse=True, return_counts=True)
    as_large = [int(count[(kinds >= AS_LARGE * own).all(axis=1)].sum()) for own in kinds]
    few: npt.NDArray[np.bool_] = np.asarray(as_large) <= FEW * len(sizes)
    return few[kind.ravel()]
