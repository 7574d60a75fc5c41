"""The cluster as Slurm has it: which nodes exist, in which partitions, in what state."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NUMBERS = re.compile(r"([0-9]+)")


def natural(name: str) -> tuple[str | int, ...]:
    """A key by which nodes' names sort as slurm.conf has them: n2 before n10."""
    return tuple(int(p) if i % 2 else p for i, p in enumerate(_NUMBERS.split(name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """What jobs have of a node. ``gpus`` are the indexes of whole ones in use, ``shards`` are
    (in use, there are) of each GPU; both where told."""

    cpus: int = 0
    memory_mib: int = 0
    gres: dict[str, int] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    shards: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """One node as Slurm lists it. ``gres`` maps names to total counts; of types only those of the
    GPUs are kept.

    ``weight`` is what Slurm goes by now (nodes of a low one first, None if unknown), ``reason`` why
    it is drained or down. ``cores`` and ``memory_mib`` are Slurm's own counts, None if unknown; of
    these it may keep some for the system (CoreSpecCount, MemSpecLimit), which is not read.
    """

    name: str
    partitions: frozenset[str] = frozenset()
    state: str = "unknown"
    features: frozenset[str] = frozenset()
    gres: dict[str, int] = field(default_factory=dict)
    weight: int | None = None
    reason: str = ""
    gpu_types: frozenset[str] = frozenset()
    cores: int | None = None
    memory_mib: int | None = None

    @property
    def usable(self) -> bool:
        """Whether Slurm would start jobs here now or soon."""
        bad = ("down", "drain", "fail", "maint", "future", "unknown", "inval", "no_resp")
        # A node that saves power is woken for a job.
        state = self.state.lower().replace("powered_down", "").replace("powering_down", "")
        return not any(word in state for word in bad)

    @property
    def in_maintenance(self) -> bool:
        """Whether nothing but a reservation for maintenance keeps jobs away now."""
        return self.state.lower().rstrip("*~#!%$@^-") == "maint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition's state and limits for one job; ``None`` is no limit, times are in minutes.

    ``max_cpus_per_node`` counts as Slurm counts CPUs: hardware threads, where cores have several.
    """

    name: str
    state: str = "UP"
    min_nodes: int = 0
    max_nodes: int | None = None
    max_time_minutes: int | None = None
    default_time_minutes: int | None = None
    max_cpus_per_node: int | None = None
    max_memory_per_node_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Nodes set apart from ``start`` to ``end`` (seconds since 1970), for those it is made for.

    ``whole_nodes`` is False where only some cores of its nodes are set apart.
    """

    name: str
    start: float
    end: float
    nodes: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    whole_nodes: bool = True

    @property
    def confines(self) -> bool:
        """Whether a job that names it runs on these nodes and on no others, now and later."""
        changing = {"FLEX", "REPLACE", "REPLACE_DOWN", "ANY_NODES"}
        return bool(self.nodes) and not self.flags & changing

    @property
    def blocks(self) -> bool:
        """Whether jobs that don't name it are kept off its nodes. MAGNETIC draws jobs in."""
        return self.whole_nodes and "MAGNETIC" not in self.flags


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster:
    """A snapshot of the cluster; ``time`` is seconds since the epoch."""

    name: str = ""
    version: tuple[int, int] = (0, 0)
    nodes: tuple[SlurmNode, ...] = ()
    default_partition: str | None = None
    gres_types: frozenset[str] = frozenset()
    partitions: tuple[Partition, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    #: EnforcePartLimits: NO lets a job wait that its partitions don't allow, ANY and ALL refuse it.
    enforce_limits: str = "NO"
    select_parameters: frozenset[str] = frozenset()
    time: float = 0.0
