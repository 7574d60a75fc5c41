"""GPU memory in slices, which Slurm counts as the gres ``shard``.

A slice is a share of a card's memory as Slurm counts it. Nothing on the card enforces it: a job may
use more than its slices, so this is for jobs that are known to keep to theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: How the 32nd part of a card's memory becomes the size of a slice, see ``slicing``.
Rounding = Literal["ceil", "floor", "nominal"]

#: A card is cut into about this many slices, none smaller than the least useful one.
SLICES = 32
_SMALLEST_MIB = 512
#: Drivers show a little less than a whole number of these.
_NOMINAL_MIB = 1024
DEFAULT_RESERVE = 1
#: Names of cards begin with letters that are spelt out.
_SOUND_LIKE_VOWELS = frozenset("AEFHILMNORSX8")


@dataclass(frozen=True, slots=True)
class Slicing:
    """How a card is cut; ``reserve`` whole slices are kept for the driver's and jobs' contexts."""

    memory_mib: int
    slice_mib: int
    reserve: int

    @property
    def slices(self) -> int:
        """Whole slices of the card, those included that no job gets."""
        return self.memory_mib // self.slice_mib

    @property
    def usable(self) -> int:
        """Slices that jobs can have: the card's count of shards."""
        return max(0, self.slices - self.reserve)

    @property
    def waste_mib(self) -> int:
        """What the last, incomplete slice would have been."""
        return self.memory_mib - self.slices * self.slice_mib

    @property
    def reserve_mib(self) -> int:
        """What the slices that are kept back hold."""
        return (self.slices - self.usable) * self.slice_mib

    def sentence(self) -> str:
        """The arithmetic in words, with all that no job can have."""
        return (
            f"{self.memory_mib} MiB = {self.slices} slices of {self.slice_mib} MiB, "
            f"{self.slices - self.usable} kept back ({self._share(self.reserve_mib)}), "
            f"{self.usable} usable; {self._share(self.waste_mib)} lost to rounding"
        )

    def _share(self, mib: int) -> str:
        return f"{mib} MiB, {100 * mib / self.memory_mib:.1f} %"


def slicing(
    memory_mib: int, reserve: int = DEFAULT_RESERVE, rounding: Rounding = "ceil"
) -> Slicing:
    """The slices of a card with this memory, as its driver shows it.

    ``ceil`` takes slices of ``max(512, ceil(memory / 32))`` MiB, which loses nearly a whole one
    where memory is no multiple of 32. ``floor`` rounds down and loses at most 31 MiB. ``nominal``
    takes the 32nd part of the memory rounded up to whole GiB, so that the 80 GB cards of two makes
    have slices of one size; what a driver holds back then counts as one of the ``reserve``.
    """
    if rounding == "nominal":
        nominal_mib = -(-memory_mib // _NOMINAL_MIB) * _NOMINAL_MIB
        cut = Slicing(memory_mib, max(_SMALLEST_MIB, nominal_mib // SLICES), reserve)
        missing = nominal_mib // cut.slice_mib - cut.slices
        return Slicing(memory_mib, cut.slice_mib, max(0, reserve - missing))
    part = memory_mib // SLICES if rounding == "floor" else -(-memory_mib // SLICES)
    return Slicing(memory_mib, max(_SMALLEST_MIB, part), reserve)


def share_text(shards: int, slices: int, memory_mib: int, card: str | None) -> str:
    """``3 of 31 slices of an L4 (2,160 MiB), shared, not isolated``; without a card, of any one."""
    if not card:
        many = "s" * (shards > 1)
        return f"{shards} slice{many} of a GPU (at least {memory_mib:,} MiB), shared, not isolated"
    name = card.upper()
    article = "an" if name[0] in _SOUND_LIKE_VOWELS else "a"
    return (
        f"{shards} of {slices} slices of {article} {name} ({memory_mib:,} MiB), "
        "shared, not isolated"
    )
