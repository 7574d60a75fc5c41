"""Counts over node sets: how many nodes meet each condition, and why the others were left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from crater_slurm.model.plan import Condition
from crater_slurm.placement.check import Check
from crater_slurm.placement.inventory import Inventory, NodeClass
from crater_slurm.placement.need import Need
from crater_slurm.placement.rules import Result

_EXAMPLES = 3
_NO_PROFILE = "has no profile in the store"


def union(sets: Iterable[int]) -> int:
    result = 0
    for nodes in sets:
        result |= nodes
    return result


def nodes_of(passing: Sequence[tuple[NodeClass, Result]], candidates: int) -> int:
    return union(c.nodes for c, _ in passing) & candidates


def enough(passed: int, need: Need, named: int) -> bool:
    """A node that the user names with -w is always part of the job: all of them must pass."""
    return passed.bit_count() >= need.nodes and not named & ~passed


@dataclass(slots=True)
class _Tally:
    """The nodes to which one check applies, and one of them."""

    check: Check
    nodes: int
    example: str


def conditions(results: list[tuple[NodeClass, Result]], candidates: int) -> tuple[Condition, ...]:
    """One line for each need, over all candidate nodes; shared checks are tallied once."""
    tallies: dict[str, dict[int, _Tally]] = {}
    for node_class, result in results:
        nodes = node_class.nodes & candidates
        for check in result.checks:
            named = tallies.setdefault(check.name, {})
            tally = named.get(id(check))
            if tally is None:
                named[id(check)] = _Tally(check, nodes, node_class.example)
            else:
                tally.nodes |= nodes
    everything = union(c.nodes for c, _ in results) & candidates
    return tuple(
        _condition(name, list(named.values()), everything) for name, named in tallies.items()
    )


def _condition(name: str, tallies: list[_Tally], everything: int) -> Condition:
    bad = [t for t in tallies if not t.check.ok]
    failed = union(t.nodes for t in bad)
    best = max((t.check for t in tallies), key=lambda c: (c.ok, c.measure))
    return Condition(
        name=name,
        need=best.need,
        have=best.have,
        passed_nodes=(everything & ~failed).bit_count(),
        failed_nodes=failed.bit_count(),
        failed_examples=tuple(f"{t.example}: {t.check.reason}" for t in bad[:_EXAMPLES]),
        reason=bad[0].check.reason if bad else "",
    )


def excluded(
    results: list[tuple[NodeClass, Result]],
    candidates: int,
    inventory: Inventory,
    passed: int,
    kinds: set[tuple[int, int]],
) -> tuple[tuple[str, int, str], ...]:
    """Why nodes did not pass, counted, each reason with an example node."""
    by_result: dict[int, tuple[NodeClass, Result, int]] = {}
    for node_class, result in results:
        nodes = node_class.nodes & candidates & ~passed
        if nodes:
            *_, before = by_result.get(id(result), (node_class, result, 0))
            by_result[id(result)] = (node_class, result, before | nodes)
    groups: dict[str, list[int]] = {}
    for node_class, result, nodes in by_result.values():
        bad = [c.reason for c in result.checks if not c.ok]
        reason = "; ".join(dict.fromkeys(bad)) or _set_apart(node_class, result, kinds)
        groups.setdefault(reason, []).append(nodes)
    if unknown := inventory.unknown & candidates:
        groups.setdefault(_NO_PROFILE, []).append(unknown)
    rows = []
    for reason, sets in groups.items():
        nodes = union(sets)
        rows.append((inventory.names_of(nodes, 1)[0], nodes.bit_count(), reason))
    return tuple(sorted(rows, key=lambda row: -row[1]))


def _set_apart(node_class: NodeClass, result: Result, kinds: set[tuple[int, int]]) -> str:
    """Why a machine that meets every need is left out all the same."""
    uniform = len(result.eligible) == len(node_class.profile.gpus)
    if uniform and result.fit and (result.fit.count, result.fit.gpus_per_domain) in kinds:
        kind = "one NUMA node" if node_class.is_single else "several NUMA nodes"
        return f"the machine is {kind}, and Slurm can't be asked for both kinds at once"
    if result.fit and (result.fit.count, result.fit.gpus_per_domain) not in kinds:
        return f"the job would use {result.fit.count} NUMA nodes, unlike on the nodes chosen"
    return "has no GPU type that can be asked for alone"
