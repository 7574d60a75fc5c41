"""One condition on one machine: what a rule answers with, whatever it looks at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement.need import Need


@dataclass(frozen=True, slots=True)
class Check:
    """One rule on one machine. ``measure`` orders machines, more is better."""

    name: str
    need: str
    have: str
    ok: bool
    reason: str = ""
    measure: float = 0.0


Rule = Callable[[NodeProfile, Need], Check | None]
