"""Which NUMA nodes are measured against which: each one's own memory, or all pairs.

Memory without CPUs is a target like any other. A row of the matrix reaches the profile only when
it is whole, since the profile has one figure per NUMA node and no way to say that one is unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from crater_slurm.errors import CraterError, UsageError
from crater_slurm.model.profile import NodeProfile, NumaNode
from crater_slurm.probe.bench import memory
from crater_slurm.probe.bench.memory import MemoryOptions, Pair
from crater_slurm.probe.bench.result import Announce, Measurement, Step, now

#: Places in the profile's list of NUMA nodes: whose CPUs, whose memory.
Place = tuple[int, int]


def places(profile: NodeProfile, ids: Sequence[int] | None, *, all_pairs: bool) -> list[Place]:
    """The pairs to measure, as places in ``numa_nodes``; ``ids`` chooses whose CPUs.

    A NUMA node without memory is no target. Raises UsageError for a node that is not there or has
    no CPUs.
    """
    known = [node.id for node in profile.numa_nodes]
    with_cpus = [node.id for node in profile.cpu_domains]
    if wrong := [i for i in ids or () if i not in with_cpus]:
        raise UsageError(
            f"NUMA node {wrong[0]} has no CPUs here; those with CPUs are {with_cpus} of {known}"
        )
    rows = [i for i, node in enumerate(profile.numa_nodes) if node.cpus]
    if ids is not None:
        rows = [i for i in rows if known[i] in ids]
    return [
        (i, j)
        for i in rows
        for j, target in enumerate(profile.numa_nodes)
        if target.memory_mib != 0 and (all_pairs or i == j)
    ]


def steps(profile: NodeProfile, where: Sequence[Place], options: MemoryOptions) -> list[Step]:
    """What ``bench`` would do."""
    found = []
    for i, j in where:
        plan = memory.pair(profile, profile.numa_nodes[i], profile.numa_nodes[j], options)
        found.append(
            Step(
                what=_name(profile.numa_nodes[i], profile.numa_nodes[j]),
                seconds=options.step_seconds,
                memory_mib=plan.total_mib,
                details=f"{len(plan.cpus)} threads, {options.repeats} repeats of a += b and a copy",
            )
        )
    return found


def bench(
    profile: NodeProfile, where: Sequence[Place], options: MemoryOptions, announce: Announce
) -> list[Measurement]:
    """Bandwidth of each pair; the diagonal is the node's own, with a copy as second figure.

    What can't be measured is handed back as refused, and the others are measured all the same.
    """
    found = []
    for i, j in where:
        nodes = profile.numa_nodes
        announce(_name(nodes[i], nodes[j]), options.step_seconds)
        found += _bench_pair(profile, (i, j), options)
    return found


def _bench_pair(profile: NodeProfile, where: Place, options: MemoryOptions) -> list[Measurement]:
    i, j = where
    cpus_of, memory_of = profile.numa_nodes[i], profile.numa_nodes[j]
    what = _name(cpus_of, memory_of)
    plan = memory.pair(profile, cpus_of, memory_of, options)
    why = memory.obstacle(plan)
    busy = None if why else memory.busy(plan)
    if why or (busy and not options.allow_noise):
        return [Measurement(what=what, time=now(), refused=why or busy)]
    unfit = f"noise: {busy}" if busy else _too_few_cores(plan)
    try:
        add, copy = memory.measure_pair(plan, options, what, unfit)
    except CraterError as error:
        return [Measurement(what=what, time=now(), refused=str(error))]
    own = i == j
    path = "memory_bandwidth_gb_s" if own else f"remote_bandwidth_gb_s[{j}]"
    warning = memory.implausible(profile, add.value) if own and add.value else None
    add = dataclasses.replace(
        add, path=f"numa_nodes[{i}].{path}", warnings=(warning,) if warning else ()
    )
    return [add, copy] if own else [add]


def _too_few_cores(plan: Pair) -> str | None:
    if not plan.missing_cores:
        return None
    return (
        f"{plan.missing_cores} of {plan.missing_cores + len(plan.cpus)} cores of the node may not "
        "be used by this process"
    )


def _name(cpus_of: NumaNode, memory_of: NumaNode) -> str:
    if cpus_of.id == memory_of.id:
        return f"memory bandwidth of NUMA node {cpus_of.id}"
    return f"memory bandwidth from NUMA node {cpus_of.id} to {memory_of.id}"
