"""A job as its user's Slurm options describe it, free of Slurm's own syntax."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class JobKind(StrEnum):
    """How the job came in; only batch jobs have a script and an environment."""

    BATCH = "batch"
    INTERACTIVE = "interactive"
    CRON = "cron"


class GpuScope(StrEnum):
    """What the user's GPU count is per: --gres and --gpus-per-node, --gpus, and so on."""

    NODE = "node"
    JOB = "job"
    SOCKET = "socket"
    TASK = "task"


@dataclass(frozen=True, slots=True)
class GpuOption:
    """GPUs that the user asked for by a Slurm option. ``count`` is per ``scope``."""

    scope: GpuScope
    count: int
    type: str | None = None
    shards: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The options of one job (or het component). ``None`` means the user did not say.

    ``per_gpu`` are the options that say something for each whole GPU.
    """

    user_id: int
    user_name: str = ""
    kind: JobKind = JobKind.BATCH
    partitions: tuple[str, ...] = ()
    min_nodes: int | None = None
    max_nodes: int | None = None
    tasks: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    per_gpu: tuple[str, ...] = ()
    min_cpus: int | None = None
    gpus: tuple[GpuOption, ...] = ()
    gres: dict[str, int] = field(default_factory=dict)
    memory_per_node_mib: int | None = None
    memory_per_cpu_mib: int | None = None
    features: str | None = None
    exclude: str | None = None
    node_list: str | None = None
    exclusive: bool = False
    sockets_per_node: int | None = None
    cores_per_socket: int | None = None
    threads_per_core: int | None = None
    time_limit_minutes: int | None = None
    reservation: str | None = None
    immediate: bool = False
    enforce_binding: bool = False
    disable_binding: bool = False
    array: bool = False
    het_component: int | None = None
    comment: str = ""

    @property
    def nodes(self) -> int:
        """Nodes the job needs at least."""
        return max(1, self.min_nodes or 1)

    @property
    def cpus_per_node(self) -> int | None:
        """CPUs per node that the user's options name; None when they name none."""
        per_task = self.cpus_per_task
        tasks = self.tasks_per_node
        if tasks is None and self.tasks is not None:
            tasks = -(-self.tasks // self.nodes)
        if per_task is None and tasks is None:
            return None
        return (per_task or 1) * (tasks or 1)

    @property
    def gpus_per_node(self) -> int | None:
        """Whole GPUs per node that the user's options name; None when they name none."""
        whole = [g for g in self.gpus if not g.shards]
        if not whole:
            return None
        total = 0
        for option in whole:
            if option.scope is GpuScope.NODE:
                total += option.count
            elif option.scope is GpuScope.JOB:
                total += -(-option.count // self.nodes)
            elif option.scope is GpuScope.TASK:
                tasks = self.tasks_per_node or -(-(self.tasks or 1) // self.nodes)
                total += option.count * tasks
            else:
                total += option.count * (self.sockets_per_node or 1)
        return total
