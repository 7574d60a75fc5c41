"""Fill-up: tasks arrive until more was asked than there is, none ends, what fits nowhere is lost.

The method of the published comparison: the trace's tasks in an order by the seed, then more drawn
from it until the requested GPU is a given share of the cluster's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from crater_slurm.placement.packing.score import fragmented
from crater_slurm.placement.packing.state import Mix, Need
from crater_slurm.simulate.policies import POLICIES
from crater_slurm.simulate.trace import Nodes, Task


@dataclass(frozen=True, slots=True)
class Fill:
    """What one fill-up came to. ``curve`` is at each per cent arrived: (arrived %, allocated %)."""

    policy: str
    seed: int
    arrived: int
    placed: int
    allocation: float
    fragmented: float
    curve: tuple[tuple[float, float], ...]


def arrivals(tasks: Sequence[Task], total: int, share: float, seed: int) -> list[Need]:
    """Needs in order of arrival, until ``share`` of ``total`` milli-GPU is asked."""
    random = np.random.default_rng(seed)
    ordered = sorted(tasks, key=lambda task: task.name)
    random.shuffle(ordered)
    needs, asked = [], 0
    for task in ordered:
        needs.append(task.need)
        asked += task.need.gpu
        if asked >= share * total:
            return needs
    while asked < share * total:
        need = ordered[int(random.integers(len(ordered)))].need
        needs.append(need)
        asked += need.gpu
    return needs


def fill(
    tasks: Sequence[Task],
    nodes: Nodes,
    policy: str,
    *,
    share: float = 1.3,
    seed: int = 42,
    tick: Callable[[float], None] = lambda _: None,
) -> Fill:
    """One fill-up. Deterministic by ``seed``; ``tick`` hears the share that has arrived."""
    cluster = nodes.cluster()
    mix = Mix.target(Counter(task.need for task in tasks))
    # Chance among equal nodes is another than that of the arrivals.
    chooser = POLICIES[policy].make(cluster, mix, np.random.default_rng([seed, 1]))
    needs = arrivals(tasks, cluster.total, share, seed)
    asked = taken = placed = 0
    curve: list[tuple[float, float]] = []
    for need in needs:
        asked += need.gpu
        chooser.arrived(need)
        choice = chooser.choose(need)
        if choice is not None:
            node, gpu = choice
            cluster.place(need, node, gpu)
            chooser.placed(need, node)
            taken += need.gpu
            placed += 1
        percent = 100 * asked / cluster.total
        if not curve or percent >= len(curve):
            curve.append((percent, 100 * taken / cluster.total))
            tick(percent / 100)
    return Fill(
        policy=policy,
        seed=seed,
        arrived=len(needs),
        placed=placed,
        allocation=100 * taken / cluster.total,
        fragmented=100 * fragmented(cluster, mix),
        curve=tuple(curve),
    )
