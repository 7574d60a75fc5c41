"""The smallest changes with which a refused job would fit, each tried as a whole job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from crater_slurm.model.job import Job
from crater_slurm.model.request import Request
from crater_slurm.placement import advice
from crater_slurm.placement.inventory import Inventory
from crater_slurm.placement.need import Expected, Need, join
from crater_slurm.placement.outcome import Outcome

Key = Hashable
#: Whether enough nodes can take a need, at least one of them of this set.
Fits = Callable[[Need, int], bool]


@dataclass(frozen=True, slots=True)
class Asked:
    """A refused job: what its user asked, by directives and options, and what is expected of it."""

    request: Request
    job: Job
    expected: Expected | None = None

    def key(self, candidates: int, named: int) -> Key:
        """What ways out depend on."""
        return (self.request, _shape(self.job), self.expected, candidates, named)

    def need(self, request: Request, job: Job) -> Need:
        """The need of the job as changed."""
        return join(request, job, self.expected).need


def found(outcome: Outcome, asked: Asked, inventory: Inventory, fits: Fits) -> tuple[str, ...]:
    """The changes in the user's words."""

    def told(words: advice.Words) -> str | None:
        changed = advice.reworded(words, outcome.need, asked.request, asked.job)
        near = inventory.name_set([outcome.nearest_node])
        if changed and fits(asked.need(changed.request, changed.job), near):
            return changed.text
        return None

    ways: tuple[str, ...] = ()
    count = outcome.passed.bit_count()
    if 0 < count < outcome.need.nodes:
        fewer = dataclasses.replace(asked.job, min_nodes=count)
        if fits(asked.need(asked.request, fewer), outcome.passed):
            ways = (f"--nodes={count}",)
    if outcome.nearest_profile:
        ways += advice.smallest_change(outcome.nearest_profile, outcome.need, told)
    return ways


def _shape(job: Job) -> Hashable:
    """The options on which a way out depends."""
    return (
        job.gpus,
        job.min_nodes,
        job.tasks,
        job.tasks_per_node,
        job.cpus_per_task,
        job.cpus_per_gpu,
        job.threads_per_core,
        job.memory_per_node_mib,
        job.memory_per_cpu_mib,
        job.sockets_per_node,
        job.exclusive,
    )
