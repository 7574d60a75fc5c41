"""What the site's partitions and reservations say of a job, beside what the hardware does.

They change without a node changing and depend on the time, so they are told anew for each job and
are no part of what is kept for a need.
"""

from __future__ import annotations

import dataclasses

from crater_slurm.model.job import Job
from crater_slurm.placement import partitions, reservations
from crater_slurm.placement.inventory import Inventory
from crater_slurm.placement.outcome import Outcome, Scope


def partitions_of(inventory: Inventory, scope: Scope) -> tuple[str, ...]:
    """The job's partitions: those of its options, or Slurm's default."""
    default = inventory.default_partition
    return scope.partitions or ((default,) if default else ())


def told(
    outcome: Outcome, inventory: Inventory, job: Job, scope: Scope, candidates: int, named: int
) -> Outcome:
    """The outcome with the partitions' limits as conditions, and what must be waited for."""
    if not outcome.known:
        return outcome
    names = partitions_of(inventory, scope)
    there = [inventory.limits[name] for name in names if name in inventory.limits]
    limits = partitions.check(there, outcome.need, job)
    notes = partitions.notes(there, limits, inventory.enforce_limits)
    if outcome.feasible and inventory.reservations and not scope.reservations:
        minutes = partitions.window_minutes(there, job)
        held, passed = inventory.reservations, outcome.passed
        note = reservations.note(held, outcome.need, passed, named, scope.now, minutes)
        notes += (note,) if note else ()
    if not limits and not notes:
        return outcome
    nodes = {name: inventory.partitions.get(name, 0) for name in names}
    more = partitions.conditions(limits, nodes, candidates)
    return dataclasses.replace(
        outcome, conditions=outcome.conditions + more, notes=outcome.notes + notes
    )
