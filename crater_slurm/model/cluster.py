"""The cluster as Slurm has it: which nodes exist, in which partitions, in what state."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """One node as Slurm lists it. ``gres`` maps names to total counts; types are left out."""

    name: str
    partitions: frozenset[str] = frozenset()
    state: str = "unknown"
    features: frozenset[str] = frozenset()
    gres: dict[str, int] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether Slurm would start jobs here now or soon."""
        bad = ("down", "drain", "fail", "maint", "future", "unknown", "inval", "no_resp")
        # A node that saves power is woken for a job.
        state = self.state.lower().replace("powered_down", "").replace("powering_down", "")
        return not any(word in state for word in bad)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster:
    """A snapshot of the cluster; ``time`` is seconds since the epoch."""

    name: str = ""
    version: tuple[int, int] = (0, 0)
    nodes: tuple[SlurmNode, ...] = ()
    default_partition: str | None = None
    gres_types: frozenset[str] = frozenset()
    select_parameters: frozenset[str] = frozenset()
    time: float = 0.0
