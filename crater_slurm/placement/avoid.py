"""Keeps jobs off degraded nodes, as far as other nodes can take them.

Health alone never makes a job wait for ever: what is left out is never more than leaves enough
nodes that are up, and a node that the user named is never left out.
"""

from __future__ import annotations

from collections.abc import Iterable


def avoid(passed: int, worst_first: Iterable[int], nodes: int, *, usable: int, named: int) -> int:
    """Nodes to leave out of those that ``passed``, for a job of so many ``nodes``.

    All but ``nodes`` are node sets. ``worst_first`` are the degraded nodes, graded: a better grade
    goes only if all worse ones could. ``usable`` nodes are up, ``named`` the user's own choice.
    """
    left = passed
    for grade in worst_first:
        rest = left & ~(grade & ~named)
        if (rest & usable).bit_count() < max(nodes, 1):
            break
        left = rest
    return passed & ~left
