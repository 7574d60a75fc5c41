"""What a task's sender should know beforehand, though nothing of it is wrong: sizes that a card
can't be cut into, a wait that nobody will shorten, memory that will not do. Pure, and never in the
way: a task that nothing can be told of has no notes.
"""

from __future__ import annotations

from collections.abc import Iterator

from crater_slurm.alldata.request import request_of
from crater_slurm.alldata.task import Task
from crater_slurm.catalogue.models import lookup
from crater_slurm.config.sharing import Sharing
from crater_slurm.errors import UsageError
from crater_slurm.model.request import Request
from crater_slurm.model.slices import slicing
from crater_slurm.model.units import format_mib
from crater_slurm.model.workload import workload_of
from crater_slurm.placement.prediction.memory import predict

#: A platform that shows a wait should ask for this share of it, so that there is time to help.
_SHARE_OF_DISPLAYED = 0.8


def notes(task: Task, sharing: Sharing | None = None) -> tuple[str, ...]:
    """One sentence each."""
    request = request_of(task)
    return (
        *_memory(request, sharing or Sharing()),
        *_wait(task),
        *_estimate(task, request),
    )


def _memory(request: Request, sharing: Sharing) -> Iterator[str]:
    """memory_mb against the card: more than it has, or no whole number of its slices."""
    asked = request.gpu_memory_mib
    card = lookup(request.gpu_type) if request.gpu_type else None
    if asked is None or card is None:
        return
    where = "/resource_requirements/gpu/memory_mb"
    if asked > card.driver_memory_mib:
        yield (
            f"{where}: {asked:,} MiB is more than an {card.id} has, "
            f"{card.driver_memory_mib:,} MiB as its driver counts"
        )
        return
    cut = slicing(card.driver_memory_mib, sharing.reserve, sharing.rounding)
    slices = -(-asked // cut.slice_mib)
    if request.gpu_sharing and asked % cut.slice_mib:
        yield (
            f"{where}: a shared {card.id} is given in slices of {cut.slice_mib:,} MiB, so "
            f"{asked:,} MiB takes {slices} of them, {slices * cut.slice_mib:,} MiB"
        )


def _wait(task: Task) -> Iterator[str]:
    """max_queue_time_seconds against the wait that the platform shows."""
    sla = task.sla
    if sla is None or sla.max_queue_time_seconds is None or sla.displayed_wait_seconds is None:
        return
    displayed = sla.displayed_wait_seconds
    if sla.max_queue_time_seconds >= displayed:
        yield (
            f"/sla/max_queue_time_seconds: {sla.max_queue_time_seconds:,} s is not below the wait "
            f"that is shown, {displayed:,} s, so no escalation will ever happen; write "
            f"{round(_SHARE_OF_DISPLAYED * displayed):,}"
        )


def _estimate(task: Task, request: Request) -> Iterator[str]:
    """memory_mb against what the work is expected to take."""
    nodes = (task.scheduling_config and task.scheduling_config.nodes) or 1
    workload = workload_of(request, (request.gpus or 0) * nodes)
    if workload is None or not request.gpus or request.gpu_memory_mib is None:
        return
    try:
        found = predict(workload)
    except UsageError:
        return  # a model whose size nobody knows
    needed = found.mib(found.needed)
    if request.gpu_memory_mib < needed:
        method = request.method or "the usual method"
        yield (
            f"/resource_requirements/gpu/memory_mb: {format_mib(request.gpu_memory_mib)} may be "
            f"too little: {request.model or 'the model'} with {method} is expected to take "
            f"{format_mib(found.mib(found.expected))} of each GPU "
            f"({format_mib(found.mib(found.lower))} to {format_mib(needed)}); 'crater estimate' "
            "shows why"
        )
