"""What a job really needs on each node: the request joined with the user's own Slurm options.

The user's own options win. A directive that contradicts one is not an error: the option counts
and the user is told, because scripts are often reused with other options on the command line.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from crater_slurm.model.job import GpuScope, Job
from crater_slurm.model.request import Request
from crater_slurm.placement import mig


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Minimum needs per node. ``None`` (or 0 GPUs) means that the dimension does not matter.

    Frozen and hashable: equal needs on an unchanged cluster share one evaluation.
    """

    nodes: int = 1
    gpus: int = 0
    gpu_type: str | None = None
    gres_type: str | None = None
    #: The user's own GPU option names no type, and it is not ours to add one.
    untyped: bool = False
    gpu_memory_mib: int | None = None
    #: What a card is preferred for, beyond what it must have: the upper bound of a prediction.
    gpu_memory_wanted_mib: int | None = None
    precision: str | None = None
    tensor_cores: bool = False
    mig: str | None = None
    driver: str | None = None
    cuda: str | None = None
    cpus: int | None = None
    cpus_are_threads: bool = False
    #: What ``physical-cores`` changes: True, the CPUs of the user's options are cores; False, those
    #: of the directive are hardware threads; None, nothing.
    physical_cores: bool | None = None
    avx: str | None = None
    memory_mib: int | None = None
    memory_bandwidth_gb_s: float | None = None
    ssd_iops: int | None = None
    ssd_latency_us: float | None = None
    cache_gb: int | None = None
    strict: bool = False
    #: The job may have a part of its one GPU.
    shared: bool = False
    #: Shards on each node that the user's own option asks for.
    own_shards: int = 0

    @property
    def cpus_in_options(self) -> bool:
        """Whether the CPUs are those of the user's own options, not the directive's."""
        if self.physical_cores is None:
            return self.cpus_are_threads
        return self.physical_cores


@dataclass(frozen=True, slots=True)
class Expected:
    """What is predicted of each GPU: no card with less than ``least_mib`` can hold the work, one
    with ``wanted_mib`` will."""

    least_mib: int
    wanted_mib: int

    def refine(self, request: Request) -> Request:
        """The request with the memory that each GPU must have; of a shared one, what it takes."""
        own = request.gpu_memory_mib
        least = self.wanted_mib if own is None and request.gpu_sharing else self.least_mib
        return dataclasses.replace(request, gpu_memory_mib=max(own or 0, least) or None)


@dataclass(frozen=True, slots=True)
class Joined:
    """The need, and a sentence for each directive that an option overrode."""

    need: Need
    notes: tuple[str, ...] = ()


def join(request: Request, job: Job, expected: Expected | None = None) -> Joined:
    """Need of a job whose user wrote ``request`` and ``job``'s options, of which so much is
    ``expected``. A prediction alone asks for no GPU."""
    notes: list[str] = []
    if expected and (request.gpus or request.gpu_memory_mib or request.gpu_type or job.gpus):
        request = expected.refine(request)
    else:
        expected = None
    gpus = _gpus(request, job, notes)
    strict = request.numa == "strict" and not job.exclusive
    if request.numa == "strict" and job.exclusive:
        notes.append("--exclusive takes whole nodes and wins over numa=strict")
    cpus, threads = _cpus(request, job, gpus, strict, notes)
    threads, physical = _unit(request, job, threads, notes)
    types = {g.type for g in job.gpus if g.type}
    gpu_needs = bool(gpus) or any_shards(job)
    gpu_type = _gpu_type(request, types, notes)
    memory = job.memory_per_node_mib
    if memory is None and job.memory_per_cpu_mib is not None and cpus:
        memory = job.memory_per_cpu_mib * cpus
    return Joined(
        Need(
            nodes=job.nodes,
            gpus=gpus,
            gpu_type=gpu_type.lower() if gpu_type and gpus else None,
            gres_type=next(iter(types)) if len(types) == 1 and gpus else None,
            untyped=bool(gpus) and job.gpus_per_node is not None and len(types) != 1,
            gpu_memory_mib=request.gpu_memory_mib if gpu_needs else None,
            gpu_memory_wanted_mib=expected.wanted_mib if expected and gpu_needs else None,
            precision=request.precision if gpu_needs else None,
            tensor_cores=bool(request.tensor_cores) and gpu_needs,
            mig=_mig(request, job, notes) if gpus else None,
            driver=request.driver,
            cuda=request.cuda,
            cpus=cpus,
            cpus_are_threads=threads,
            physical_cores=physical,
            avx=request.avx,
            memory_mib=memory,
            memory_bandwidth_gb_s=request.memory_bandwidth_gb_s,
            ssd_iops=request.ssd_iops,
            ssd_latency_us=request.ssd_latency_us,
            cache_gb=request.cache_gb,
            strict=strict,
            shared=_shared(request, job, gpus, notes),
            own_shards=_own_shards(job),
        ),
        tuple(notes),
    )


def _gpu_type(request: Request, types: set[str], notes: list[str]) -> str | None:
    if len(types) != 1:
        return request.gpu_type
    (option,) = types
    if request.gpu_type and option != request.gpu_type:
        notes.append(f"the option's GPU type {option} wins over gpu-type={request.gpu_type}")
    return option


def any_shards(job: Job) -> bool:
    """Whether the user asked for GPU shards, which planning leaves to the user."""
    return any(g.shards for g in job.gpus)


def _own_shards(job: Job) -> int:
    """The most shards that an option asks for at once: per node, or for one task."""
    return max((g.count for g in job.gpus if g.shards), default=0)


def _shared(request: Request, job: Job, gpus: int, notes: list[str]) -> bool:
    """Whether a part of a GPU will do; a note says what speaks against it where the user asked."""
    if not request.gpu_sharing or any_shards(job):
        return False
    if job.gpus_per_node is not None:
        against = "the option that asks for whole GPUs wins over it"
    elif job.per_gpu:
        against = f"Slurm takes {job.per_gpu[0]} for whole GPUs only"
    elif job.exclusive:
        against = "--exclusive wins over it"
    elif request.mig:
        against = f"mig={request.mig} is a part of a GPU already"
    elif gpus != 1:
        against = f"it is for jobs of one GPU, and this one has {gpus or 'none'}"
    elif request.gpu_memory_mib is None:
        against = "without gpu-memory nobody knows how much of a GPU to give"
    else:
        return True
    notes.append(f"gpu-sharing=yes shares nothing: {against}")
    return False


def _gpus(request: Request, job: Job, notes: list[str]) -> int:
    option = job.gpus_per_node
    if option is None:
        if any_shards(job):
            if request.gpus:
                notes.append(f"the option for GPU shards wins over gpus={request.gpus}")
            return 0
        if request.gpus is None and (request.gpu_type or request.gpu_memory_mib):
            notes.append("gpu-type or gpu-memory without gpus asks for one GPU")
            return 1
        if request.gpus is None and (request.mig or request.tensor_cores):
            notes.append("mig or tensor-cores without gpus asks for one GPU")
            return 1
        return request.gpus or 0
    if request.gpus is not None and request.gpus != option:
        spelled = {
            GpuScope.NODE: "--gres or --gpus-per-node",
            GpuScope.JOB: "--gpus",
            GpuScope.SOCKET: "--gpus-per-socket",
            GpuScope.TASK: "--gpus-per-task",
        }[job.gpus[0].scope]
        notes.append(f"{spelled} asks for {option} per node and wins over gpus={request.gpus}")
    return option


def _mig(request: Request, job: Job, notes: list[str]) -> str | None:
    """The MIG profile of each GPU; None for whole GPUs. A type in an option may name one too."""
    types = {g.type for g in job.gpus if g.type}
    option = mig.profile_of_type(next(iter(types))) if len(types) == 1 else None
    if types and option != request.mig:
        if request.mig:
            notes.append(f"the option's GPU type {min(types)} wins over mig={request.mig}")
        return option
    return request.mig


def _unit(request: Request, job: Job, threads: bool, notes: list[str]) -> tuple[bool, bool | None]:
    """Whether CPUs count hardware threads, and what physical-cores changes of that.

    Slurm's options count threads and the directive counts cores, unless the user says otherwise:
    by physical-cores, or by --threads-per-core, which wins.
    """
    own = job.threads_per_core
    said = request.physical_cores
    if own is not None and said is not None and (own == 1) is not said:
        word = "yes" if said else "no"
        notes.append(f"--threads-per-core={own} wins over physical-cores={word}")
    if own is not None:
        # Of one thread of each core the options count cores.
        return threads and own > 1, None
    if request.physical_cores and (threads or request.cpus is None):
        return False, True
    if request.physical_cores is False and not threads and request.cpus is not None:
        return True, False
    return threads, None


def _cpus(
    request: Request, job: Job, gpus: int, strict: bool, notes: list[str]
) -> tuple[int | None, bool]:
    """CPUs per node, and whether they count hardware threads (Slurm's options do)."""
    if job.cpus_per_gpu is not None and job.cpus_per_task is None and gpus:
        option = job.cpus_per_gpu * gpus
        if request.cpus is not None and request.cpus != option:
            notes.append(f"--cpus-per-gpu asks for {option} CPUs and wins over cpus={request.cpus}")
        return option, True
    if job.cpus_per_task is None:
        # -n alone leaves the cores per task open: the directive fills that.
        if request.cpus is not None:
            tasks = job.cpus_per_node or 1
            # Slurm gives every task as many: 10 cores for 3 tasks are 4 each.
            cores = -(-request.cpus // tasks) * tasks
            if cores != request.cpus:
                notes.append(f"cpus={request.cpus} shared by {tasks} tasks asks for {cores} cores")
            return cores, False
        if job.tasks is None and job.tasks_per_node is None:
            return None, False
    if job.min_nodes is None and job.tasks_per_node is None and (job.tasks or 1) > 1 and not strict:
        # Without -N Slurm may spread the tasks; one task is all that a node must hold.
        option = job.cpus_per_task or 1
    else:
        option = job.cpus_per_node or 1
    if request.cpus is not None and request.cpus != option:
        notes.append(f"the options ask for {option} CPUs and win over cpus={request.cpus}")
    return option, True
