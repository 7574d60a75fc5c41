"""What a node counts as, from a row of scores: nothing changes for one odd report.

A switch turns when so many reports in a row say so, and a score must get better by a margin before
it counts as better, so that a node at a threshold does not come and go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from crater_slurm.placement.health import HealthScore

DEGRADED = "degraded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Bounds of the score. ``tiers`` fall: a score below the first is tier 1, and so on."""

    degraded_below: float = 0.5
    tiers: tuple[float, ...] = (0.75, 0.5, 0.25)
    margin: float = 0.05
    reports: int = 3


@dataclass(frozen=True, slots=True)
class Switch:
    """On or off, and how many reports in a row said yes (above 0) or no (below 0)."""

    on: bool = False
    streak: int = 0

    def see(self, yes: bool, needed: int) -> Switch:
        """The switch after one more report; the streak is counted no further than needed."""
        if self.streak == (needed if yes else -needed):
            return self
        streak = max(self.streak, 0) + 1 if yes else min(self.streak, 0) - 1
        if abs(streak) >= needed:
            return Switch(yes, needed if yes else -needed)
        return Switch(self.on, streak)


_OFF = Switch()


@dataclass(frozen=True, slots=True)
class Standing:
    """A node's switches by name: ``degraded``, ``tier 1`` ..., and each fault ever looked for."""

    switches: Mapping[str, Switch] = field(default_factory=dict)

    def on(self, name: str) -> bool:
        return self.switches.get(name, _OFF).on

    @property
    def degraded(self) -> bool:
        return self.on(DEGRADED)

    def tier(self, steps: Steps) -> int:
        """0 for a healthy node, up to the number of bounds."""
        return sum(self.on(_tier(i)) for i in range(len(steps.tiers)))

    def settled(self, steps: Steps) -> bool:
        """Whether enough reports agreed for the tier to be more than a first guess."""
        return abs(self.switches.get(DEGRADED, _OFF).streak) >= steps.reports

    def faults(self) -> frozenset[str]:
        """Faults that so many reports in a row have shown."""
        own = (DEGRADED, "tier ")
        return frozenset(n for n, s in self.switches.items() if s.on and not n.startswith(own))

    def gone(self, fault: str, steps: Steps) -> bool:
        """Whether so many reports in a row looked for a fault and found none."""
        return self.switches.get(fault, _OFF).streak <= -steps.reports


def step(standing: Standing, score: HealthScore, steps: Steps) -> Standing:
    """The standing after one more score; a neutral score makes everything unknown again.

    A fault of which this report says nothing stays as it is: silence is no recovery.
    """
    if not score.fresh:
        return Standing()
    switches = dict(standing.switches)
    for name, bound in _bounds(steps):
        switch = switches.get(name, _OFF)
        below = score.value < (min(bound + steps.margin, 1.0) if switch.on else bound)
        switches[name] = switch.see(below, steps.reports)
    for term in score.terms:
        if term.share is None:
            switches[term.name] = switches.get(term.name, _OFF).see(term.fault, steps.reports)
    # Most reports change nothing; then nothing new is made for the thousands of nodes.
    return standing if switches == standing.switches else Standing(switches)


def _bounds(steps: Steps) -> Iterator[tuple[str, float]]:
    yield DEGRADED, steps.degraded_below
    for i, bound in enumerate(steps.tiers):
        yield _tier(i), bound


def _tier(index: int) -> str:
    return f"tier {index + 1}"
