"""What crater decided for a job, with the reasons: the one record that every tool reads.

A Decision is complete in itself: ``crater explain`` shows it months later without the profiles
that led to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Mode(StrEnum):
    """How far crater goes: nothing, log only, tell the user, or change the job."""

    OFF = "off"
    OBSERVE = "observe"
    ADVISE = "advise"
    ENFORCE = "enforce"

    @property
    def rank(self) -> int:
        return list(Mode).index(self)


class Verdict(StrEnum):
    """The outcome of planning, whatever the mode then makes of it."""

    PLANNED = "planned"
    UNTOUCHED = "untouched"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One need against what the cluster has: how many nodes meet it, and an example that does not.

    ``need`` and ``have`` are texts with units; ``have`` describes the best node there is.
    """

    name: str
    need: str
    have: str
    passed_nodes: int
    failed_nodes: int
    failed_examples: tuple[str, ...] = ()
    reason: str = ""

    @property
    def met(self) -> bool:
        return self.passed_nodes > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTerm:
    """One amount's part in a score: its weight (all sum to 1), its value in [0, 1], and why."""

    name: str
    weight: float
    value: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeScore:
    """How well ``count`` nodes such as ``example`` suit the job, in [0, 1]."""

    example: str
    count: int
    value: float
    preferred: bool = False
    terms: tuple[ScoreTerm, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the job is to get on each of its nodes. ``domains`` counts NUMA nodes; 0 is no limit.

    With ``shards`` the job has a part of one GPU: so many of the ``slices`` of a ``card``, in all
    at least ``gpu_memory_mib``.
    """

    id: str
    gpus: int = 0
    gpu_type: str | None = None
    cpus: int | None = None
    memory_mib: int | None = None
    memory_bandwidth_gb_s: float | None = None
    ssd_iops: int | None = None
    cache_gb: int | None = None
    numa: str = "best_effort"
    domains: int = 0
    precision: str | None = None
    checkpoint: str | None = None
    shards: int = 0
    slices: int = 0
    gpu_memory_mib: int | None = None
    card: str | None = None
    checkpoint_keep: int = 0
    checkpoint_keep_every: int = 0
    checkpoint_credentials: str | None = None
    stage: str | None = None
    ring_gb: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Everything about one decision. ``fields`` and ``environment`` are what Slurm is given.

    ``health`` names the degraded nodes among those that can run the job, and which were left out.
    """

    id: str
    verdict: Verdict
    mode: Mode
    time: float
    user_id: int
    user_name: str = ""
    request: dict[str, object] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    nodes_considered: int = 0
    nodes_passed: int = 0
    passed_nodes: str = ""
    excluded: tuple[tuple[str, int, str], ...] = ()
    scores: tuple[NodeScore, ...] = ()
    nearest_node: str = ""
    smallest_change: tuple[str, ...] = ()
    plan: Plan | None = None
    fields: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    health: dict[str, object] = field(default_factory=dict)
    prediction: dict[str, object] = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    duration_us: float = 0.0
    #: The filter's message as far as planning reads it, whole, so that the job can be planned
    #: again; ``options`` is what people see of it.
    submitted: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A plan as Slurm must be told it, per node, still free of Slurm's syntax.

    ``cores`` and ``gpus`` are 0 when the plan leaves them to the user's options. ``domains`` is
    the number of NUMA nodes that the job must stay on, 0 when it need not (or uses them all);
    ``domain_gpus`` the GPUs on each of them, 0 when they can't share evenly. ``consume`` maps
    resource names (membw, nviops, nvme) to amounts. ``cores_are_threads``: ``cores`` counts
    hardware threads; ``options_are_cores``: the CPUs of the user's options are cores. With
    ``shards`` the job has those of one GPU instead of ``gpus`` whole ones.
    """

    gpus: int = 0
    shards: int = 0
    gpu_type: str | None = None
    cores: int = 0
    threads_per_core: int = 1
    cores_are_threads: bool = False
    options_are_cores: bool = False
    nodes: int = 1
    domains: int = 0
    domain_gpus: int = 0
    consume: dict[str, int] = field(default_factory=dict)
