"""The CRATER_ variables of a task, as pure functions of what is known.

A variable without a value is unset, not left alone: sbatch passes on the submitting shell's
environment, and a stale path of another job is worse than none. CUDA_VISIBLE_DEVICES and the
binding itself are Slurm's and are never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.plan import Plan
from crater_slurm.node.gpus import GpuFact, parse_indexes


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    """A task's share of its job. ``job_gpus`` are Slurm's indexes (Prolog), ``step_gpus`` and
    ``visible`` what the task itself was told, ``numa_nodes`` those of ``cpus``. ``cores`` are the
    CPUs by core; without them each CPU counts as one."""

    cpus: tuple[int, ...]
    numa_nodes: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...] = ()
    job_gpus: tuple[int, ...] = ()
    step_gpus: str | None = None
    visible: str | None = None


def host_gpus(view: TaskView) -> tuple[int, ...]:
    """Slurm's indexes of the GPUs that the task sees.

    With ConstrainDevices CUDA_VISIBLE_DEVICES counts within the step's GPUs, otherwise over the
    node's. A subset that could be read both ways is read as the former, which is how Slurm is
    set up where GPUs are kept apart at all.
    """
    step = tuple(g for g in parse_indexes(view.step_gpus) if g in view.job_gpus) or view.job_gpus
    if view.visible is None:
        return step
    visible = parse_indexes(view.visible)
    if not visible or len(visible) >= len(step):
        # Nothing of CUDA's, UUIDs, or all of the step's GPUs: the step's list is the answer.
        return step if view.visible else ()
    if all(index < len(step) for index in visible):
        return tuple(step[index] for index in visible)
    return visible if set(visible) <= set(step) else ()


def gpu_count(view: TaskView) -> int:
    """How many GPUs CUDA will show the task, numbered from 0."""
    if view.visible is None:
        return len(host_gpus(view))
    return len([part for part in view.visible.split(",") if part.strip() not in ("", "-1")])


def preprocessing_cpus(
    cpus: Sequence[int], cores: Sequence[Sequence[int]] = (), percent: int = 20
) -> tuple[int, ...]:
    """The CPUs to prepare data on: ``percent`` of the cores, rounded up, from the end of the list.

    The split is inside the allocation, takes both threads of a core, and leaves at least one core
    on either side; so there is none of a single core.
    """
    cores = cores or [(cpu,) for cpu in sorted(cpus)]
    share = min(-(-len(cores) * percent // 100), len(cores) - 1)
    return tuple(sorted(cpu for core in cores[len(cores) - max(0, share) :] for cpu in core))


def _split(view: TaskView, percent: int) -> dict[str, str | None]:
    """CPUs to prepare data on and to compute on; unset where the task's CPUs are not known."""
    prepare = preprocessing_cpus(view.cpus, view.cores, percent)
    compute = tuple(cpu for cpu in view.cpus if cpu not in set(prepare))
    known = bool(view.cpus)
    return {
        "CRATER_PREPROC_CPUS": format_cpulist(prepare) or None,
        "CRATER_PREPROC_CPU_COUNT": str(len(prepare)) if known else None,
        "CRATER_COMPUTE_CPUS": format_cpulist(compute) or None,
        "CRATER_COMPUTE_CPU_COUNT": str(len(compute)) if known else None,
    }


def build(
    view: TaskView,
    plan: Plan | None,
    folders: Mapping[str, str],
    facts: Mapping[int, GpuFact],
    preprocessing_percent: int = 20,
) -> dict[str, str | None]:
    """Every CRATER_ variable with its value; None is to be unset. ``folders`` are the job's cache
    folders by kind (checkpoint, dataset, temp), ``facts`` the node's GPUs by Slurm's index."""
    host = host_gpus(view)
    part = plan if plan and is_shared(view, plan) else None
    uuids = [facts[i].uuid for i in host if i in facts]
    all_uuids = len(uuids) == len(host) and all(uuids)
    return {
        "CRATER_PLAN_ID": plan.id if plan else None,
        "CRATER_PRECISION": plan.precision if plan else None,
        "CRATER_GPU_IDS": _join(range(gpu_count(view))),
        "CRATER_GPU_IDS_HOST": _join(host),
        "CRATER_GPU_SHARED": "1" if part else None,
        "CRATER_GPU_MEMORY_MIB": str(part.gpu_memory_mib) if part else None,
        "CRATER_GPU_UUIDS": ",".join(u for u in uuids if u) if all_uuids and host else None,
        "CRATER_CPU_CORES": str(len(view.cpus)) if view.cpus else None,
        "CRATER_CPU_LIST": format_cpulist(view.cpus) or None,
        **_split(view, preprocessing_percent),
        "CRATER_NUMA_NODE": _join(view.numa_nodes),
        "CRATER_CHECKPOINT_PATH": folders.get("checkpoint"),
        "CRATER_DATASET_PATH": folders.get("dataset"),
        "CRATER_CACHE_PATH": folders.get("temp"),
        "CRATER_TMPDIR": folders.get("temp"),
    }


def checkpoint_variables(
    *, ring: str | None, destination: str, run: str, job_path: str
) -> dict[str, str | None]:
    """Variables for crater_slurm.job. ``ring`` is None for a job that has none; nothing secret."""
    return {
        "CRATER_RING": ring,
        "CRATER_CHECKPOINT_DESTINATION": destination or None,
        "CRATER_RUN": run,
        "CRATER_JOB_PATH": job_path or None,
    }


def python_path(known: str | None, job_path: str) -> str | None:
    """The task's PYTHONPATH with ``job_path`` at its end; None when it is to stay as it is."""
    if not job_path or ":" in job_path or (known and not known.isprintable()):
        return None
    if not known:
        return job_path
    return None if job_path in known.split(":") else f"{known}:{job_path}"


def is_shared(view: TaskView, plan: Plan) -> bool:
    """Whether the task has the part of a GPU that was planned; more GPUs are Slurm's word."""
    return bool(plan.shards and plan.gpu_memory_mib) and len(view.job_gpus) == 1


def mps_limits(view: TaskView, plan: Plan) -> dict[str, str | None]:
    """What the CUDA MPS daemon shall keep each client of a task to; nothing for whole GPUs.

    The memory limit counts devices as the client sees them, which has one. The share of threads is
    that of the slices, rounded down so that all jobs of a card together have no more than it has.
    """
    if not is_shared(view, plan) or gpu_count(view) != 1:
        return {}
    percent = max(1, 100 * plan.shards // max(plan.slices, plan.shards))
    return {
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={plan.gpu_memory_mib}M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent),
    }


def task_lines(variables: Mapping[str, str | None]) -> list[str]:
    """TaskProlog lines. A value that could end its line is dropped, and the variable unset."""
    lines = []
    for name, value in variables.items():
        if value and value.isprintable():
            lines.append(f"export {name}={value}")
        else:
            lines.append(f"unset {name}")
    return lines


def _join(numbers: Iterable[int]) -> str | None:
    return ",".join(str(n) for n in numbers) or None
