"""What the job's partitions allow, told beside the hardware's conditions; nothing is refused by it.

Whether a job over a limit is refused or waits is Slurm's to say (EnforcePartLimits), and a QOS may
lift a limit. So a limit is a condition with need and have, and a sentence where it keeps the job
from running; which nodes can run the job stays a question of their hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from crater_slurm.model.cluster import Partition
from crater_slurm.model.job import Job
from crater_slurm.model.plan import Condition
from crater_slurm.model.units import format_mib
from crater_slurm.placement.need import Need

_STATES = {
    "DOWN": "jobs wait there until it is up",
    "DRAIN": "Slurm takes no new jobs there",
    "INACTIVE": "Slurm neither takes nor starts jobs there",
}


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of one partition against one job: texts of need and have, and whether it holds."""

    partition: str
    name: str
    need: str
    have: str
    ok: bool
    slack: float


#: Need, have, whether the limit holds, and how wide it is: more is better.
Finding = tuple[str, str, bool, float]
Rule = Callable[[Partition, Need, Job], Finding | None]


def conditions(
    limits: Sequence[Limit], nodes: Mapping[str, int], candidates: int
) -> tuple[Condition, ...]:
    """One line for each limit; a node counts where at least one of its partitions allows the job.

    ``nodes`` are the node sets of all the job's partitions; one without the limit allows every job.
    """
    found = []
    for name in dict.fromkeys(limit.name for limit in limits):
        group = [limit for limit in limits if limit.name == name]
        bad = {limit.partition: limit for limit in group if not limit.ok}
        allowed = 0
        for partition, there in nodes.items():
            allowed |= there if partition not in bad else 0
        passed = candidates & allowed if bad else candidates
        best = max(group, key=lambda limit: (limit.ok, limit.slack))
        found.append(
            Condition(
                name=name,
                need=best.need,
                have=best.have,
                passed_nodes=passed.bit_count(),
                failed_nodes=(candidates & ~passed).bit_count(),
                failed_examples=tuple(f"{p}: {limit.have}" for p, limit in bad.items())[:3],
                reason=next((limit.have for limit in bad.values()), ""),
            )
        )
    return tuple(found)


def check(partitions: Iterable[Partition], need: Need, job: Job) -> list[Limit]:
    """Every limit of these partitions that the job comes near to, in the order of the rules."""
    found = []
    for name, rule in _RULES.items():
        for partition in partitions:
            result = rule(partition, need, job)
            if result is not None:
                found.append(Limit(partition.name, name, *result))
    return found


def notes(
    partitions: Sequence[Partition], limits: Sequence[Limit], enforced: str
) -> tuple[str, ...]:
    """Sentences for what keeps the job from running in its partitions, as Slurm will see it."""
    said = []
    bad: dict[str, list[Limit]] = {}
    for limit in limits:
        if not limit.ok:
            bad.setdefault(limit.partition, []).append(limit)
    if bad and (enforced == "ALL" or len(bad) == len(partitions)):
        refuses = enforced in ("ALL", "ANY", "YES")
        then = f"Slurm refuses it (EnforcePartLimits={enforced})" if refuses else "it waits"
        for name, group in bad.items():
            over = " and ".join(f"{limit.have}, the job asks for {limit.need}" for limit in group)
            said.append(
                f"partition {name} allows {over}: {then}, unless its QOS or an admin allows more"
            )
    states = [(p.name, p.state.upper()) for p in partitions]
    if states and all(state in _STATES for _, state in states):
        said += [f"partition {name} is {state}: {_STATES[state]}" for name, state in states]
    return tuple(said)


def window_minutes(partitions: Sequence[Partition], job: Job) -> float:
    """How long the job may run: its own limit, else the shortest default; infinite without any."""
    if job.time_limit_minutes is not None:
        return float(job.time_limit_minutes)
    defaults = [p.default_time_minutes or p.max_time_minutes for p in partitions]
    return float(min((d for d in defaults if d is not None), default=float("inf")))


def _nodes(partition: Partition, need: Need, job: Job) -> Finding | None:
    most, least = partition.max_nodes, partition.min_nodes
    if job.max_nodes is not None and job.max_nodes < least:
        asked = f"at most {_count(job.max_nodes, 'node')}"
        return asked, f"at least {_count(least, 'node')}", False, 0
    if most is None:
        return None
    have = f"at most {_count(most, 'node')}"
    return _count(need.nodes, "node"), have, need.nodes <= most, most


def _time(partition: Partition, need: Need, job: Job) -> Finding | None:
    most, asked = partition.max_time_minutes, job.time_limit_minutes
    if most is None or asked is None:
        return None
    return duration(asked), f"at most {duration(most)}", asked <= most, most


def _cpus(partition: Partition, need: Need, job: Job) -> Finding | None:
    most = partition.max_cpus_per_node
    if most is None or not need.cpus:
        return None
    have = f"at most {_count(most, 'CPU')} a node"
    return _count(need.cpus, "CPU"), have, need.cpus <= most, most


def _memory(partition: Partition, need: Need, job: Job) -> Finding | None:
    most = partition.max_memory_per_node_mib
    if most is None or not need.memory_mib:
        return None
    have = f"at most {format_mib(most)} a node"
    return format_mib(need.memory_mib), have, need.memory_mib <= most, most


def duration(minutes: float) -> str:
    """As Slurm writes it: ``1-02:00:00``."""
    hours, rest = divmod(int(minutes), 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02}:{rest:02}:00"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"


_RULES: dict[str, Rule] = {
    "partition-nodes": _nodes,
    "partition-time": _time,
    "partition-cpus": _cpus,
    "partition-memory": _memory,
}
