"""Turns a placement into the job fields by which Slurm itself enforces it.

The only module that decides which lever is used. What was found on real slurmctld 22.05, 24.11
and 26.05:

* enforce-binding alone lets a job straddle sockets, as long as each core belongs to the socket of
  some chosen GPU. GPUs per socket x sockets per node, together with enforce-binding and the same
  GPUs per node, keeps all of it on that many sockets, and waits when none has room.
* The product must equal the GPUs per node and both must name the same type, or slurmctld refuses.
* Without a task count 24.11 and 26.05 give such a job the whole socket; 24.11 also where there are
  several tasks but the client was told neither nodes nor tasks per node.
* Without GPUs, cores per socket, one socket per node and one task per socket, all three, keep one
  task on one socket; with less a job that takes a CountOnly gres straddles even on an empty node.
* A job with shards has one GPU on each node, so enforce-binding alone keeps its cores on that GPU's
  socket (22.05 to 26.05). Shards and GPUs in one request are refused, and so is anything per GPU.
* Tasks on several nodes are shared out unevenly (15 cores here, 4 there) without tasks per node.
* ``--prefer`` is tried first at each turn and dropped where no such node is free: the one lever
  that prefers nodes for a single job without ever keeping it waiting. But nodes that could never
  run the job alone make Slurm refuse it, see ``scheduler.steering``.

The user's own options are never overridden or doubled: an option family that was used is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from crater_slurm.model.job import GpuScope, Job
from crater_slurm.model.plan import Placement

_NO_GPU_LEVER = {
    GpuScope.JOB: "--gpus on several nodes lets Slurm share them out unevenly; "
    "use --gpus-per-node with numa=strict",
    GpuScope.TASK: "--gpus-per-task is placed by Slurm task by task; "
    "use --gpus-per-node with numa=strict",
    GpuScope.SOCKET: "--gpus-per-socket is the user's own placement and is left as it is",
}


@dataclass(slots=True)
class Changes:
    """Fields to set on the job, bitflags to raise, and what the user should know about it."""

    fields: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: Whether Slurm was told to keep the job on as few NUMA nodes as were planned.
    together: bool = False


def changes(
    placement: Placement,
    job: Job,
    raw: Mapping[str, str],
    *,
    exclude: str = "",
    prefer: str = "",
    gres_names: frozenset[str] = frozenset(),
    gres_style: str = "/",
) -> Changes:
    """Job fields for a placement.

    ``raw`` holds the job's fields as the filter sent them (``field.NAME``), ``exclude`` a host
    list, ``prefer`` an expression of node features, ``gres_names`` the cluster's GresTypes,
    ``gres_style`` what follows ``gres`` in this Slurm's TRES strings.
    """
    result = Changes()
    _tasks_and_cpus(placement, job, raw, result)
    _gres(placement, job, raw, gres_names, result)
    if placement.domains:
        _keep_together(placement, job, raw, gres_style, result)
    if exclude:
        result.fields["exc_nodes"] = f"{job.exclude},{exclude}" if job.exclude else exclude
    # Slurm takes the preference in place of the constraint, so it is not ours to add one there.
    if prefer and not job.features and not raw.get("field.prefer"):
        result.fields["prefer"] = prefer
    return result


def _tasks_and_cpus(
    placement: Placement, job: Job, raw: Mapping[str, str], result: Changes
) -> None:
    """Cores per task, where the user's options leave them open."""
    if not placement.cores:
        if placement.domains and job.tasks is None and job.tasks_per_node is None:
            result.fields["num_tasks"] = str(placement.nodes)
        if placement.options_are_cores:
            _one_thread_per_core(placement, raw, result)
        return
    per_node = job.tasks_per_node or -(-(job.tasks or placement.nodes) // placement.nodes)
    tasks = job.tasks or per_node * placement.nodes
    if job.tasks is None:
        result.fields["num_tasks"] = str(tasks)
    own_threads = _own_threads(placement, raw)
    per_task = -(-placement.cores // per_node) * (own_threads or 1)
    if job.cpus_per_task is None:
        result.fields["cpus_per_task"] = str(per_task)
        result.fields["min_cpus"] = str(per_task * tasks)
    shared = placement.nodes > 1 and job.tasks and job.tasks_per_node is None
    if shared and tasks % placement.nodes == 0 and not raw.get("field.ntasks_per_gpu"):
        result.fields["ntasks_per_node"] = str(per_node)
    if not placement.cores_are_threads:
        # The directive counts cores: one thread of each, or Slurm would give half of them.
        _one_thread_per_core(placement, raw, result)
    if job.min_nodes is None and tasks > 1:
        result.fields["min_nodes"] = result.fields["max_nodes"] = str(placement.nodes)


def _one_thread_per_core(placement: Placement, raw: Mapping[str, str], result: Changes) -> None:
    if placement.threads_per_core > 1 and not _own_threads(placement, raw):
        result.fields["threads_per_core"] = "1"


def _own_threads(placement: Placement, raw: Mapping[str, str]) -> int:
    """Threads of each core that the user's --threads-per-core uses here; 0 without the option."""
    text = raw.get("field.threads_per_core", "")
    return min(int(text), placement.threads_per_core) if text.isdecimal() and text != "0" else 0


def _gres(
    placement: Placement,
    job: Job,
    raw: Mapping[str, str],
    gres_names: frozenset[str],
    result: Changes,
) -> None:
    """GPUs and consumed resources per node, added to what the user's own --gres says."""
    added: list[str] = []
    if placement.shards and not job.gpus:
        added.append(f"shard:{placement.shards}")
    elif placement.gpus and not job.gpus:
        added.append(_gpu(placement.gpu_type, placement.gpus))
    for name, amount in placement.consume.items():
        if name in gres_names and name not in job.gres:
            added.append(f"{name}:{amount}")
    if added:
        own = raw.get("field.tres_per_node") or raw.get("field.gres") or ""
        kept = [part.removeprefix("gres/").removeprefix("gres:") for part in own.split(",") if part]
        result.fields["gres"] = ",".join([*kept, *added])


def _gpu(gpu_type: str | None, count: int) -> str:
    return f"gpu:{gpu_type}:{count}" if gpu_type else f"gpu:{count}"


def _keep_together(
    placement: Placement, job: Job, raw: Mapping[str, str], gres_style: str, result: Changes
) -> None:
    """Keeps GPUs and cores on ``placement.domains`` sockets, Slurm's word for NUMA nodes here."""
    if job.disable_binding:
        result.notes.append("--gres-flags=disable-binding wins over numa=strict")
        return
    if job.sockets_per_node or job.cores_per_socket:
        result.notes.append("--sockets-per-node or --cores-per-socket win over numa=strict")
        return
    if not placement.gpus:
        if raw.get("field.ntasks_per_socket"):
            result.notes.append("--ntasks-per-socket wins over numa=strict")
            return
        _one_socket_of_cores(placement, job, raw, result)
        return
    if placement.shards:
        result.flags.append("GRES_ENFORCE_BIND")
        _on_as_many_nodes(placement, job, raw, result)
        return
    option = job.gpus[0] if job.gpus else None
    # --gpus on one node is the same as per node; anything else is the user's own placement.
    per_node = (GpuScope.NODE, GpuScope.JOB) if placement.nodes == 1 else (GpuScope.NODE,)
    if option is not None and option.scope not in per_node:
        result.notes.append(_NO_GPU_LEVER[option.scope])
        return
    result.flags.append("GRES_ENFORCE_BIND")
    if not placement.domain_gpus or len(job.gpus) > 1:
        result.notes.append(
            f"{placement.gpus} GPUs can't be shared evenly among {placement.domains} NUMA nodes: "
            "cores stay beside the GPUs, the number of NUMA nodes is Slurm's choice"
        )
        return
    gpu_type = option.type if option else placement.gpu_type
    result.fields["tres_per_socket"] = f"gres{gres_style}{_gpu(gpu_type, placement.domain_gpus)}"
    result.fields["sockets_per_node"] = str(placement.domains)
    _on_as_many_nodes(placement, job, raw, result)


def _on_as_many_nodes(
    placement: Placement, job: Job, raw: Mapping[str, str], result: Changes
) -> None:
    """What was said of one node holds for each: as many nodes as planned, tasks shared evenly."""
    result.together = True
    if job.min_nodes is None:
        result.fields["min_nodes"] = result.fields["max_nodes"] = str(placement.nodes)
    # Slurm takes tasks per GPU or per node, not both.
    open_share = job.tasks_per_node is None and not raw.get("field.ntasks_per_gpu")
    if job.tasks and open_share and job.tasks % placement.nodes == 0:
        result.fields["ntasks_per_node"] = str(job.tasks // placement.nodes)


def _one_socket_of_cores(
    placement: Placement, job: Job, raw: Mapping[str, str], result: Changes
) -> None:
    tasks = int(result.fields.get("num_tasks", job.tasks or 1))
    per_task = int(result.fields.get("cpus_per_task", job.cpus_per_task or 1))
    if placement.domains == 1 and tasks == placement.nodes:
        # The directive's CPUs are cores, the user's own -c counts threads, if not told otherwise.
        one = placement.options_are_cores or (placement.cores and not placement.cores_are_threads)
        default = 1 if one else placement.threads_per_core
        threads = _own_threads(placement, raw) or default
        result.fields["cores_per_socket"] = str(-(-per_task // threads))
        result.fields["sockets_per_node"] = result.fields["ntasks_per_socket"] = "1"
        result.together = True
    else:
        result.notes.append(
            "Slurm has no option that keeps several tasks without GPUs on one NUMA node; "
            "it packs them by default, and crater explain shows what the job got"
        )
