"""GPU memory in slices, which Slurm counts as the gres ``shard``.

A slice is a share of a card's memory as Slurm counts it. Nothing on the card enforces it: a job may
use more than its slices, so this is for jobs that are known to keep to theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

#: A card is cut into about this many slices, none smaller than the least useful one.
_SLICES = 32
_SMALLEST_MIB = 512
DEFAULT_RESERVE = 1


@dataclass(frozen=True, slots=True)
class Slicing:
    """How a card is cut; ``reserve`` slices are kept for the driver's and each job's context."""

    memory_mib: int
    slice_mib: int
    reserve: int

    @property
    def slices(self) -> int:
        return self.memory_mib // self.slice_mib

    @property
    def usable(self) -> int:
        """Slices that jobs can have: the card's count of shards."""
        return max(0, self.slices - self.reserve)

    @property
    def waste_mib(self) -> int:
        """What the last, incomplete slice would have been."""
        return self.memory_mib - self.slices * self.slice_mib

    def sentence(self) -> str:
        """The arithmetic in words."""
        share = 100 * self.waste_mib / self.memory_mib
        return (
            f"{self.memory_mib} MiB = {self.slices} slices of {self.slice_mib} MiB, "
            f"{self.reserve} kept back, {self.usable} usable; "
            f"{self.waste_mib} MiB ({share:.1f} %) lost to rounding"
        )


def slicing(memory_mib: int, reserve: int = DEFAULT_RESERVE) -> Slicing:
    """Slices of ``max(512, ceil(memory / 32))`` MiB, of the memory that the driver shows."""
    return Slicing(memory_mib, max(_SMALLEST_MIB, -(-memory_mib // _SLICES)), reserve)
