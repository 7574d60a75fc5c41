"""Watches the nodes' health: a score for each report, what a node counts as, and who is told.

A thread of its own looks every few seconds at what the nodes reported (or a Prometheus server knows
of them), keeps the board that decisions read, and lets weights and drains follow. A decision reads
the board's newest state and never waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from crater_slurm.config import Settings
from crater_slurm.config.health import Health
from crater_slurm.guard import Guard
from crater_slurm.model.cluster import SlurmCluster, SlurmNode
from crater_slurm.model.health import NodeHealth
from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement.health import score
from crater_slurm.placement.inventory import Inventory
from crater_slurm.placement.standing import Standing, Steps, step
from crater_slurm.placement.terms import Limits
from crater_slurm.scheduler.drain import Drains, Judged, orders
from crater_slurm.scheduler.prometheus import Prometheus
from crater_slurm.scheduler.reports import Reports
from crater_slurm.scheduler.state import State
from crater_slurm.scheduler.weights import Weights, tiered

_log = logging.getLogger("crater.scheduler.health")
_TICK_SECONDS = 2.0
#: Counters are compared with a report between half of this and all of it ago.
_BASELINE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class GradedSets:
    """Degraded nodes as sets of one inventory, and room to keep what was worked out with them."""

    inventory: Inventory
    sets: tuple[int, ...]
    kept: dict[Hashable, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Board:
    """Every node's score and standing at one moment. Replaced as a whole, never changed.

    ``grades`` are the degraded nodes, the worst tier first.
    """

    judged: Mapping[str, Judged] = field(default_factory=dict)
    grades: tuple[tuple[str, ...], ...] = ()
    _sets: list[GradedSets] = field(default_factory=list)

    def worst_first(self, inventory: Inventory) -> GradedSets | None:
        """The grades as node sets of an inventory; None when no node is degraded."""
        if not self.grades:
            return None
        known = self._sets[-1] if self._sets else None
        if known is None or known.inventory is not inventory:
            known = GradedSets(inventory, tuple(map(inventory.name_set, self.grades)))
            self._sets[:] = [known]
        return known


@dataclass(slots=True)
class _Seen:
    """What is remembered of a node between two looks, and reports to count errors from."""

    health: NodeHealth | None
    profile: NodeProfile | None
    gpus: int
    judged: Judged
    base: NodeHealth | None = None
    middle: NodeHealth | None = None

    def remember(self, health: NodeHealth) -> None:
        """Move on, so that ``base`` is a report of half an hour to an hour ago, once there is."""
        if self.middle is None:
            self.base = self.middle = health
        elif health.time - self.middle.time >= _BASELINE_SECONDS / 2:
            self.base, self.middle = self.middle, health


class HealthWatch:
    """Owns the board and the thread that keeps it."""

    def __init__(
        self,
        settings: Settings,
        state: State,
        reports: Reports,
        weights: Weights,
        drains: Drains,
        prometheus: Prometheus | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.board = Board()
        self.weights = weights
        self._settings = settings
        self._limits, self._steps = limits(settings.health), steps(settings.health)
        self._state = state
        self._reports = reports
        self._drains = drains
        self._prometheus = prometheus
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._looked_at = 0.0
        self._acted = 0.0
        self._guard = Guard(_log, "the nodes' health can't be judged")
        #: How often Slurm's weights and drains were compared with what they should be.
        self.rounds = 0
        self._started = clock()
        weights.add(tiered(self._known_tier, settings.health.penalties))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        if self._prometheus:
            self._prometheus.start()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._prometheus:
            self._prometheus.stop()
        self._thread.join(timeout=5)

    def warnings(self) -> list[str]:
        """What keeps health from being known or published; none of it keeps jobs from running."""
        source = self._prometheus.problem if self._prometheus else ""
        found = (self._guard.problem, source, self.weights.problem, self._drains.problem)
        return [text for text in found if text]

    def settled(self) -> bool:
        """Whether every node is known, or this daemon is old enough to know that it won't be.

        Before, a degraded node looks as good as any other.
        """
        if self._clock() - self._started >= self._limits.stale_seconds:
            return True
        judged = self.board.judged
        return bool(judged) and all(j.standing.settled(self._steps) for j in judged.values())

    def newest(self, node: str) -> NodeHealth | None:
        """The health that counts for a node: its own report, or Prometheus's while that is old."""
        own = self._reports.health(node)
        if self._prometheus is None or (own is not None and self._fresh(own)):
            return own
        other = self._prometheus.health(node)
        if own is None or (other is not None and other.time > own.time):
            return other
        return own

    def _run(self) -> None:
        while not self._stop.is_set():
            self._guard.run(self.tick)
            self._stop.wait(_TICK_SECONDS)

    def tick(self) -> None:
        """Judge every node by its newest report; publish when there is a new picture of Slurm."""
        view = self._state.view
        if view is None:
            return
        profiles, now = self._state.profiles, self._clock()
        judged = {
            node.name: self._judge(node, profiles.get(node.name), now)
            for node in view.cluster.nodes
        }
        if judged != self.board.judged:
            self.board = Board(judged, self._grades(judged))
        self._publish(view.cluster, now)

    def _judge(self, node: SlurmNode, profile: NodeProfile | None, now: float) -> Judged:
        health, gpus = self.newest(node.name), node.gres.get("gpu", 0)
        seen = self._seen.get(node.name)
        fresh = health is not None and self._fresh(health)
        unchanged = seen and (seen.health, seen.gpus) == (health, gpus) and seen.profile is profile
        if seen and unchanged and seen.judged.score.fresh == fresh:
            return seen.judged
        told = score(
            *(node.name, profile, health, now, self._limits),
            slurm_gpus=gpus,
            earlier=seen.base if seen else None,
        )
        standing = seen.judged.standing if seen else Standing()
        if seen is None or seen.health != health or not fresh:  # a report counts once
            standing = step(standing, told, self._steps)
        judged = Judged(told, standing)
        now_seen = _Seen(health, profile, gpus, judged)
        if seen:
            now_seen.base, now_seen.middle = seen.base, seen.middle
        if health is not None:
            now_seen.remember(health)
        self._seen[node.name] = now_seen
        return judged

    def _fresh(self, health: NodeHealth) -> bool:
        return self._clock() - health.time <= self._limits.stale_seconds

    def _known_tier(self, node: str) -> int | None:
        """The tier; None while this daemon is too young to tell."""
        found = self.board.judged.get(node)
        standing = found.standing if found else Standing()
        young = self._clock() - self._started < self._limits.stale_seconds
        if young and not standing.settled(self._steps):
            return None
        return standing.tier(self._steps)

    def _grades(self, judged: Mapping[str, Judged]) -> tuple[tuple[str, ...], ...]:
        by_tier: dict[int, list[str]] = {}
        for name, found in judged.items():
            if found.standing.degraded:
                by_tier.setdefault(found.standing.tier(self._steps), []).append(name)
        return tuple(tuple(by_tier[tier]) for tier in sorted(by_tier, reverse=True))

    def _publish(self, cluster: SlurmCluster, now: float) -> None:
        """Once for each picture of Slurm that is younger than what was last changed there."""
        own = self._settings.health
        if cluster.time == self._looked_at or cluster.time <= self._acted:
            return
        if now - self._acted < own.publish_seconds:
            return
        self._looked_at = cluster.time
        enforcing = self._settings.filter.mode == "enforce"
        enforcing = enforcing and not self._settings.off_switch.exists()
        told = self.weights.publish(cluster, changing=enforcing and own.publish_weights)
        wanted = orders(cluster, self.board.judged, own.drain, own.drain_share, self._steps)
        if self._drains.act(wanted, changing=enforcing) or told:
            self._acted = self._clock()
        self.rounds += 1

    def describe(self, node: str) -> dict[str, Any] | None:
        """A node's score, terms and flags as JSON data; None for a node unknown to Slurm."""
        found = self.board.judged.get(node)
        if found is None:
            return None
        told, standing = found.score, found.standing
        return {
            "node": node,
            "score": round(told.value, 4),
            "tier": standing.tier(self._steps),
            "degraded": standing.degraded,
            "faults": sorted(standing.faults()),
            "flags": list(told.flags),
            "terms": [
                {
                    "name": term.name,
                    "value": round(term.value, 4),
                    "seen": term.seen,
                    "threshold": term.threshold,
                    "grave": term.share is None,
                }
                for term in told.terms
            ],
            "own_weight": self.weights.own(node),
        }

    def slurm_weights(self) -> dict[str, int]:
        """The weight of every node as Slurm showed it last."""
        view = self._state.view
        nodes = view.cluster.nodes if view else ()
        return {node.name: node.weight for node in nodes if node.weight is not None}


def limits(settings: Health) -> Limits:
    """The thresholds that a site has set."""
    return Limits(
        stale_seconds=settings.stale_seconds,
        gpu_warm_c=settings.gpu_warm_c,
        gpu_hot_c=settings.gpu_hot_c,
        ecc_corrected_some=settings.ecc_corrected_some,
        ecc_corrected_many=settings.ecc_corrected_many,
        bandwidth_busy_percent=settings.bandwidth_busy_percent,
        wear_percent=settings.wear_percent,
        load_per_cpu=settings.load_per_cpu,
    )


def steps(settings: Health) -> Steps:
    """The bounds that a site has set."""
    return Steps(
        degraded_below=settings.degraded_below,
        tiers=settings.tiers,
        margin=settings.margin,
        reports=settings.reports,
    )
