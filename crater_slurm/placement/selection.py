"""Of the machines that pass, those that one Slurm request can name together.

A request names one gres type and one number of sockets; machines that would need another are
left out, so that what Slurm chooses is always what was planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from crater_slurm.placement import numa
from crater_slurm.placement.inventory import NodeClass
from crater_slurm.placement.need import Need
from crater_slurm.placement.rules import Result, physical_cores
from crater_slurm.placement.tally import enough, nodes_of, union


def choose_type(
    passing: list[tuple[NodeClass, Result]], need: Need, candidates: int, named: int
) -> tuple[str | None, list[tuple[NodeClass, Result]]]:
    """The gres type to ask for, where machines mix GPUs that qualify with others that do not.

    A request names at most one type. Without one, a machine serves whose GPUs all qualify; with
    one, any that has enough GPUs of the type. What serves the most nodes is asked for.
    """
    uniform = [(c, r) for c, r in passing if len(r.eligible) == len(c.profile.gpus)]
    if not need.gpus or len(uniform) == len(passing):
        return None, passing
    if need.untyped:
        serve = enough(nodes_of(uniform, candidates), need, named)
        return None, uniform if serve else passing
    by_type: dict[str, list[tuple[NodeClass, Result]]] = {}
    for node_class, result in passing:
        for name, narrowed in _types(node_class, result, need):
            by_type.setdefault(name, []).append((node_class, narrowed))
    if need.gres_type:
        mixed = [
            (c, r)
            for name, found in by_type.items()
            if name == need.gres_type
            for c, r in found
            if len(r.eligible) < len(c.profile.gpus)
        ]
        return None, uniform + mixed
    choices: list[tuple[str | None, list[tuple[NodeClass, Result]]]] = [(None, uniform)]
    choices += sorted(by_type.items())
    return max(choices, key=lambda choice: nodes_of(choice[1], candidates).bit_count())


def kinds(passing: list[tuple[NodeClass, Result]]) -> set[tuple[int, int]]:
    """NUMA nodes that the job uses and GPUs on each, as far as they differ among machines."""
    return {(r.fit.count, r.fit.gpus_per_domain) for _, r in passing if r.fit}


def alike(
    passing: list[tuple[NodeClass, Result]], need: Need, candidates: int, usable: int
) -> list[tuple[NodeClass, Result]]:
    """Machines on which a strict job uses the same number of NUMA nodes, the fewest possible.

    Slurm can be told one number only; told none, it would spread the job on every machine. And
    what keeps GPUs and cores together on a socket (GPUs per socket with enforce-binding) it takes
    for impossible where the machine is one socket, as found on 22.05 to 26.05.
    """
    groups: dict[tuple[int, int, bool], list[tuple[NodeClass, Result]]] = {}
    for node_class, result in passing:
        if result.fit:
            single = need.gpus > 0 and node_class.is_single
            key = (result.fit.count, result.fit.gpus_per_domain, single)
            groups.setdefault(key, []).append((node_class, result))
    if len(groups) < 2:
        return passing

    def rank(key: tuple[int, int, bool]) -> tuple[bool, bool, bool, int, int]:
        nodes = union(c.nodes for c, _ in groups[key]) & candidates
        few_up = (nodes & usable).bit_count() < need.nodes
        uneven = need.gpus > 0 and not key[1]
        few = nodes.bit_count() < need.nodes
        return (few, few_up, uneven, key[0], -nodes.bit_count())

    best = min(groups, key=rank)
    return passing if rank(best)[0] else groups[best]


def _types(node_class: NodeClass, result: Result, need: Need) -> Iterable[tuple[str, Result]]:
    """Gres types of which the machine has enough, all qualifying, and the fit with those alone."""
    by_type: dict[str, list[int]] = {}
    profile = node_class.profile
    for gpu in profile.gpus:
        by_type.setdefault(gpu.gres_type or "", []).append(gpu.index)
    for name, indexes in by_type.items():
        if not name or len(indexes) < need.gpus or not result.eligible.issuperset(indexes):
            continue
        gpus = frozenset(indexes)
        fit = None
        if need.strict:
            fit = numa.fit(profile, gpus, need, physical_cores(profile, need))
        if fit is None or fit.ok:
            yield name, dataclasses.replace(result, eligible=gpus, fit=fit)
