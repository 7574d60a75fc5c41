"""Drains nodes with a grave fault and undrains them when it is gone; off unless a site asks for it.

Touches only what is its own: a node whose reason begins with ``crater: ``. A node that people or
other tools took out of service stays as they left it, and never more than a share of a partition
is drained, so that a fault of crater's own can't stop a cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from crater_slurm.errors import SlurmError
from crater_slurm.model.cluster import SlurmCluster, SlurmNode
from crater_slurm.placement.health import HealthScore
from crater_slurm.placement.standing import Standing, Steps
from crater_slurm.slurm.control import REASON_PREFIX, Control

_log = logging.getLogger("crater.scheduler.drain")


@dataclass(frozen=True, slots=True)
class Judged:
    """A node's newest score and what it counts as."""

    score: HealthScore
    standing: Standing


@dataclass(frozen=True, slots=True)
class Orders:
    """Nodes to drain with the reason, nodes to undrain, and those that must wait, with why."""

    drain: dict[str, str] = field(default_factory=dict)
    undrain: tuple[str, ...] = ()
    waiting: dict[str, str] = field(default_factory=dict)


def orders(
    cluster: SlurmCluster,
    judged: Mapping[str, Judged],
    faults: Iterable[str],
    share: float,
    steps: Steps,
) -> Orders:
    """What ought to be done now; pure. Without ``faults`` nothing is."""
    watched = frozenset(faults)
    if not watched:
        return Orders()
    undrain = tuple(
        node.name
        for node in cluster.nodes
        if is_ours(node) and _well(node, judged.get(node.name), watched, steps)
    )
    room = _room(cluster, share)
    drain: dict[str, str] = {}
    waiting: dict[str, str] = {}
    for node in cluster.nodes:
        found = judged.get(node.name)
        if found is None or not node.usable or not (bad := found.standing.faults() & watched):
            continue
        full = sorted(p for p in node.partitions if room.get(p, 0) < 1)
        if full:
            waiting[node.name] = (
                f"{', '.join(sorted(bad))}, but crater may drain no more of partition {full[0]} "
                f"(health.drain_share {share:g})"
            )
            continue
        for partition in node.partitions:
            room[partition] -= 1
        drain[node.name] = reason(bad, found.score)
    return Orders(drain, undrain, waiting)


def reason(faults: Iterable[str], score: HealthScore) -> str:
    """``gpu_lost: 7 of 8 GPUs answer``: the faults, and what was seen of them."""
    names = sorted(faults)
    seen = "; ".join(term.seen for term in score.terms if term.name in names)
    return f"{','.join(names)}: {seen}" if seen else f"{','.join(names)}:"


def is_ours(node: SlurmNode) -> bool:
    """Whether crater drained the node: Slurm's reason is the only memory of it."""
    return "drain" in node.state.lower() and node.reason.startswith(REASON_PREFIX)


def _well(node: SlurmNode, found: Judged | None, watched: frozenset[str], steps: Steps) -> bool:
    """Whether all faults that the reason names are gone, and no other has come."""
    named, colon, _ = node.reason.removeprefix(REASON_PREFIX).partition(":")
    faults = frozenset(named.split(","))
    if found is None or not colon or not found.score.fresh:
        return False
    standing = found.standing
    return all(standing.gone(f, steps) for f in faults) and not standing.faults() & watched


def _room(cluster: SlurmCluster, share: float) -> dict[str, int]:
    """How many more nodes of each partition may be drained."""
    size: dict[str, int] = {}
    ours: dict[str, int] = {}
    for node in cluster.nodes:
        for partition in node.partitions:
            size[partition] = size.get(partition, 0) + 1
            ours[partition] = ours.get(partition, 0) + is_ours(node)
    # A little more than nothing: 0.1 of 10 nodes is one, whatever floats make of it.
    return {p: int(n * share + 1e-9) - ours[p] for p, n in size.items()}


class Drains:
    """Carries out orders. One thread calls ``act``."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._told: Orders = Orders()
        self._failed: frozenset[str] = frozenset()
        self.problem = ""

    def act(self, wanted: Orders, *, changing: bool) -> bool:
        """Drain and undrain, or log what would be done; whether Slurm was told anything."""
        if wanted != self._told:
            self._log(wanted, changing)
            self._told = wanted
        if not changing:
            return False
        failed = [
            *self._each(wanted.drain, lambda n: self._control.drain(n, wanted.drain[n]), "drained"),
            *self._each(dict.fromkeys(wanted.undrain, ""), self._control.undrain, "undrained"),
        ]
        self._failed = frozenset(failed)
        self.problem = failed[-1] if failed else ""
        return bool(wanted.drain or wanted.undrain)

    def _each(
        self, nodes: Mapping[str, str], act: Callable[[str], bool], done: str
    ) -> Iterable[str]:
        for node, why in nodes.items():
            try:
                if act(node):
                    _log.warning("%s is %s%s", node, done, f": {why}" if why else "")
                else:
                    _log.info("%s is not %s: somebody else changed it", node, done)
            except SlurmError as error:
                text = f"{node} can't be {done}: {error}"
                if text not in self._failed:
                    _log.warning("%s", text)
                yield text

    def _log(self, wanted: Orders, changing: bool) -> None:
        for node, why in wanted.waiting.items():
            if self._told.waiting.get(node) != why:
                _log.warning("%s is not drained: %s", node, why)
        if not changing:
            for node, why in wanted.drain.items():
                if node not in self._told.drain:
                    _log.info("%s would be drained: %s", node, why)
            for node in wanted.undrain:
                _log.info("%s would be undrained", node)
