"""Who keeps whose copies: the nodes of a job as a ring, in Slurm's order."""

from __future__ import annotations

from collections.abc import Iterable


def partner_of(nodes: Iterable[str], node: str) -> str:
    """The node that keeps this one's copies: the next in Slurm's order, the first after the last;
    "" for a job on one node."""
    ring = list(nodes)
    if node not in ring or len(ring) < 2:
        return ""
    return ring[(ring.index(node) + 1) % len(ring)]
