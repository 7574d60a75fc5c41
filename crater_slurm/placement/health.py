"""Stage 2: how healthy a node is, as one score from what its newest report shows.

The score is 1 for a node that is as it should be and 0 for one that must get no work. Grave terms
multiply it, for each alone can make a node useless; mild terms take a share of it at most, so that
a node that is only busy or worn never looks broken::

    score = product of the grave terms x (1 - sum of share x (1 - term) over the mild terms)

A term of which nothing is known is left out, which is the same as a good one: nobody is punished
for what nobody measured. A report that is old, or none, gives a neutral score of 1 and a flag.
"""

from __future__ import annotations

from dataclasses import dataclass

from crater_slurm.model.health import NodeHealth
from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement import terms as rules
from crater_slurm.placement.terms import Limits, Term


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthScore:
    """A node's score in [0, 1] at ``time`` of the report, with what it is made of.

    ``flags``: ``no_report``, ``stale`` (both neutral), ``gpus_silent`` (no GPU tells anything).
    """

    node: str
    value: float
    time: float | None = None
    terms: tuple[Term, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def fresh(self) -> bool:
        """Whether it says anything: not neutral."""
        return not {"no_report", "stale"} & set(self.flags)

    def worst(self, limit: int = 3) -> tuple[Term, ...]:
        """Terms that take something, the worst first."""
        taking = sorted((t for t in self.terms if t.value < 1), key=lambda t: -t.lost)
        return tuple(taking[:limit])


def score(
    node: str,
    profile: NodeProfile | None,
    health: NodeHealth | None,
    now: float,
    limits: Limits,
    *,
    slurm_gpus: int = 0,
    earlier: NodeHealth | None = None,
) -> HealthScore:
    """Score of a node by its newest report.

    ``slurm_gpus`` is the number of GPUs that Slurm believes in: a profile forgets a lost GPU at the
    next scan. ``earlier`` is a report of up to an hour before, by which counters become rates.
    """
    if health is None:
        return HealthScore(node=node, value=1.0, flags=("no_report",))
    if now - health.time > limits.stale_seconds:
        return HealthScore(node=node, value=1.0, time=health.time, flags=("stale",))
    terms = (
        *rules.gpus_there(profile, health, slurm_gpus),
        *rules.gpus(health, limits),
        *rules.ecc_corrected(health, earlier, limits),
        *rules.drives_well(profile, health, limits),
        *rules.busy(profile, health, limits),
    )
    silent = bool(health.gpus) and not any(gpu.answers for gpu in health.gpus)
    return HealthScore(
        node=node,
        value=combine(terms),
        time=health.time,
        terms=terms,
        flags=("gpus_silent",) if silent else (),
    )


def combine(terms: tuple[Term, ...]) -> float:
    """The score that terms make together; 1 when there are none."""
    value = 1.0
    for term in terms:
        if term.share is None:
            value *= term.value
    return value * (1 - sum(t.lost for t in terms if t.share is not None))
