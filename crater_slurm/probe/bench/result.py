"""What a benchmark hands back, and the rules by which repeats become one figure or none."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

#: Repeats that differ by more than this share of their median are no measurement.
MAX_SPREAD = 0.10
#: CPUs or a drive that others use for more than this share of a second are not measured.
MAX_BUSY = 0.10

#: Called before each step with its name and the seconds that it will take.
Announce = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One figure with its unit and how it came to be.

    ``path`` is the value of the profile that it fills; None for a figure that none holds.
    ``refused`` says why there is no figure, ``unfit`` why it is shown and yet kept out of
    profiles.
    """

    what: str
    value: float | None = None
    unit: str = ""
    method: str = ""
    seconds: float = 0.0
    time: datetime
    path: str | None = None
    warnings: tuple[str, ...] = ()
    refused: str | None = None
    unfit: str | None = None

    @property
    def for_profile(self) -> bool:
        return self.path is not None and self.value is not None and not (self.refused or self.unfit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a benchmark would do: for how long, with how much memory and space."""

    what: str
    seconds: float
    memory_mib: int = 0
    space_mib: int = 0
    details: str = ""


@dataclass(frozen=True, slots=True)
class Repeats:
    """The same quantity measured several times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """(max - min) / median."""
        return (max(self.values) - min(self.values)) / self.median


def now() -> datetime:
    """The time of a measurement, in whole seconds."""
    return datetime.now(UTC).replace(microsecond=0)


def noise(repeats: Repeats, unit: str, load: float) -> str | None:
    """Why the repeats are no measurement, or None when they agree."""
    if repeats.spread <= MAX_SPREAD:
        return None
    return (
        f"measured {repeats.median:.1f} {unit}, spread {repeats.spread * 100:.0f} %: the machine "
        f"is busy (load {load:.1f}); run it again when idle"
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile with linear interpolation between the two nearest values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
