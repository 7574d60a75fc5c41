"""Decides: which nodes can take a job, what it should get there, or why none can.

Pure and fast: equal needs on an unchanged inventory are evaluated once, and a decision then costs
set operations only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from crater_slurm.model.job import Job
from crater_slurm.model.plan import Condition, Placement, Plan
from crater_slurm.model.request import Request
from crater_slurm.placement import advice
from crater_slurm.placement.inventory import Inventory, NodeClass
from crater_slurm.placement.need import Need, join
from crater_slurm.placement.rules import (
    Check,
    Result,
    combine,
    evaluate_machine,
    evaluate_storage,
)

#: Evaluated needs kept per inventory; a cluster's users repeat themselves far below this.
_CACHE_SIZE = 4096
_EXAMPLES = 3

FeaturePredicate = Callable[[frozenset[str]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which nodes the user's own options leave: partitions, -w, -x and --constraint."""

    partitions: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    features: FeaturePredicate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of planning. ``plan`` is None when the job is refused (``feasible`` False).

    ``passed`` and ``failed`` are node sets of the inventory; ``known`` False means that no
    profile covers the nodes in question, so that crater has no say.
    """

    need: Need
    feasible: bool
    known: bool = True
    plan: Plan | None = None
    passed: int = 0
    failed: int = 0
    placement: Placement | None = None
    domains: int = 0
    conditions: tuple[Condition, ...] = ()
    excluded: tuple[tuple[str, int, str], ...] = ()
    nearest_node: str = ""
    nearest_have: tuple[str, ...] = ()
    smallest_change: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Planner:
    """Plans jobs on one inventory. ``refine`` may replace a request by a predicted one.

    ``scores`` are node scores by class example for stages that prefer nodes; empty means that
    all nodes that can are equal, and Slurm chooses among them.
    """

    inventory: Inventory
    refine: Callable[[Request], Request] = lambda request: request
    _results: dict[Need, list[tuple[NodeClass, Result]]] = field(default_factory=dict)
    _outcomes: dict[tuple[Need, int, int], Outcome] = field(default_factory=dict)

    def plan(self, plan_id: str, request: Request, job: Job, scope: Scope) -> Outcome:
        """Outcome for a job; never raises for a request that parsed."""
        joined = join(self.refine(request), job)
        candidates = self._candidates(scope)
        named = self.inventory.name_set(scope.only or ())
        key = (joined.need, candidates, named)
        outcome = self._outcomes.get(key)
        if outcome is None:
            outcome = self._decide(joined.need, candidates, named)
            if len(self._outcomes) >= _CACHE_SIZE:
                self._outcomes.clear()
            self._outcomes[key] = outcome
        return dataclasses.replace(
            outcome,
            plan=_plan(plan_id, request, outcome) if outcome.placement else None,
            notes=joined.notes + outcome.notes,
        )

    def _decide(self, need: Need, candidates: int, named: int) -> Outcome:
        """The part that is the same for every job with this need among these nodes."""
        results = [
            (node_class, result)
            for node_class, result in self._evaluate(need)
            if node_class.nodes & candidates
        ]
        if not results:
            return Outcome(need=need, feasible=True, known=False)
        passing = [(c, r) for c, r in results if r.ok]
        gres_type, passing = _choose_type(passing, need, candidates)
        if not named:
            passing = _alike(passing, need, candidates, self.inventory.usable)
        passed = _union(c.nodes for c, _ in passing) & candidates
        outcome = Outcome(
            need=need,
            # A node that the user names with -w is always part of the job: all of them must pass.
            feasible=passed.bit_count() >= need.nodes and not named & ~passed,
            passed=passed,
            failed=candidates & ~passed,
            conditions=_conditions(results, candidates),
            excluded=_excluded(results, candidates, self.inventory, passed, _kinds(passing)),
        )
        if not outcome.feasible:
            return self._with_way_out(outcome, results, candidates)
        return dataclasses.replace(
            outcome,
            placement=_placement(need, passing, gres_type),
            domains=max((r.fit.count for _, r in passing if r.fit), default=0),
            notes=self._notes(passing, passed),
        )

    def _candidates(self, scope: Scope) -> int:
        inventory = self.inventory
        partitions = scope.partitions or (
            (inventory.default_partition,) if inventory.default_partition else ()
        )
        nodes = _union(inventory.partitions.get(p, 0) for p in partitions)
        if not partitions:
            nodes = inventory.everything
        if scope.only is not None:
            nodes &= inventory.name_set(scope.only)
        nodes &= ~inventory.name_set(scope.without)
        if scope.features is not None:
            nodes &= _union(n for f, n in inventory.feature_sets if scope.features(f))
        return nodes

    def _evaluate(self, need: Need) -> list[tuple[NodeClass, Result]]:
        cached = self._results.get(need)
        if cached is None:
            cached = _evaluate_all(self.inventory.classes, need)
            if len(self._results) >= _CACHE_SIZE:
                self._results.clear()
            self._results[need] = cached
        return cached

    def _with_way_out(
        self, outcome: Outcome, results: list[tuple[NodeClass, Result]], candidates: int
    ) -> Outcome:
        """A refusal with the node that comes nearest and what would fit."""
        need = outcome.need
        name = ""
        have: tuple[str, ...] = ()
        change: tuple[str, ...] = ()
        near = advice.nearest([(c, r) for c, r in results if not r.ok])
        if near:
            name = next(iter(self.inventory.names_of(near[0].nodes & candidates, 1)), "")
            have = tuple(_sentence(c) for c in near[1].checks if not c.ok)
            change = advice.smallest_change(near[0].profile, need)
        if outcome.passed and outcome.passed.bit_count() < need.nodes:
            change = (f"--nodes={outcome.passed.bit_count()}", *change)
        return dataclasses.replace(
            outcome, nearest_node=name, nearest_have=have, smallest_change=change
        )

    def _notes(self, passing: list[tuple[NodeClass, Result]], passed: int) -> tuple[str, ...]:
        notes = []
        if not passed & self.inventory.usable:
            notes.append(
                f"all {passed.bit_count()} nodes that can run this job are down or drained now"
            )
        if partly := [c for c, r in passing if r.fit is not None and not r.fit.everywhere]:
            example = next(iter(self.inventory.names_of(partly[0].nodes, 1)), partly[0].example)
            fits = next(r.fit for c, r in passing if c is partly[0] and r.fit)
            chosen = ", ".join(str(n) for n in fits.chosen)
            notes.append(
                f"on {example} only NUMA node {chosen} meets the need and Slurm can't be told "
                "which one to use; crater explain shows which one the job got"
            )
        return tuple(notes)


def _union(sets: Iterable[int]) -> int:
    result = 0
    for nodes in sets:
        result |= nodes
    return result


def _choose_type(
    passing: list[tuple[NodeClass, Result]], need: Need, candidates: int
) -> tuple[str | None, list[tuple[NodeClass, Result]]]:
    """The gres type to ask for, where machines mix GPUs that qualify with others that do not.

    A gres request names at most one type, so of mixed machines those with the most common
    qualifying type are kept.
    """
    if not need.gpus:
        return None, passing
    if all(len(r.eligible) == len(c.profile.gpus) for c, r in passing):
        return None, passing
    votes: dict[str, int] = {}
    for node_class, result in passing:
        for name in _types(node_class, result, need.gpus):
            votes[name] = votes.get(name, 0) + (node_class.nodes & candidates).bit_count()
    if not votes:
        return None, []
    winner = max(sorted(votes), key=lambda name: votes[name])
    return winner, [(c, r) for c, r in passing if winner in _types(c, r, need.gpus)]


def _kinds(passing: list[tuple[NodeClass, Result]]) -> set[tuple[int, int]]:
    """NUMA nodes that the job uses and GPUs on each, as far as they differ among machines."""
    return {(r.fit.count, r.fit.gpus_per_domain) for _, r in passing if r.fit}


def _alike(
    passing: list[tuple[NodeClass, Result]], need: Need, candidates: int, usable: int
) -> list[tuple[NodeClass, Result]]:
    """Machines on which a strict job uses the same number of NUMA nodes, the fewest possible.

    Slurm can be told one number only; told none, it would spread the job on every machine.
    """
    groups: dict[tuple[int, int], list[tuple[NodeClass, Result]]] = {}
    for node_class, result in passing:
        if result.fit:
            key = (result.fit.count, result.fit.gpus_per_domain)
            groups.setdefault(key, []).append((node_class, result))
    if len(groups) < 2:
        return passing

    def rank(key: tuple[int, int]) -> tuple[bool, bool, bool, int]:
        nodes = _union(c.nodes for c, _ in groups[key]) & candidates
        few_up = (nodes & usable).bit_count() < need.nodes
        uneven = need.gpus > 0 and not key[1]
        return (nodes.bit_count() < need.nodes, few_up, uneven, key[0])

    best = min(groups, key=rank)
    return passing if rank(best)[0] else groups[best]


def _types(node_class: NodeClass, result: Result, count: int) -> set[str]:
    """Gres types of which the machine has enough, all of them qualifying."""
    by_type: dict[str, list[int]] = {}
    for gpu in node_class.profile.gpus:
        by_type.setdefault(gpu.gres_type or "", []).append(gpu.index)
    return {
        name
        for name, indexes in by_type.items()
        if name and len(indexes) >= count and result.eligible.issuperset(indexes)
    }


def _plan(plan_id: str, request: Request, outcome: Outcome) -> Plan:
    need = outcome.need
    return Plan(
        id=plan_id,
        gpus=need.gpus,
        gpu_type=outcome.placement.gpu_type if outcome.placement else None,
        cpus=need.cpus,
        memory_mib=need.memory_mib,
        memory_bandwidth_gb_s=need.memory_bandwidth_gb_s,
        ssd_iops=need.ssd_iops,
        cache_gb=need.cache_gb,
        numa="strict" if need.strict else "best_effort",
        domains=outcome.domains,
        precision=request.precision,
        checkpoint=request.checkpoint,
    )


def _placement(
    need: Need, passing: list[tuple[NodeClass, Result]], gres_type: str | None
) -> Placement:
    consume = {
        "membw": math.ceil(need.memory_bandwidth_gb_s or 0),
        "nviops": need.ssd_iops or 0,
        "nvme": need.cache_gb or 0,
    }
    keep_together = need.strict and not _whole_node(passing)
    return Placement(
        gpus=need.gpus,
        gpu_type=gres_type,
        cores=0 if need.cpus is None or need.cpus_are_threads else need.cpus,
        threads_per_core=max(c.profile.cpu.threads_per_core for c, _ in passing),
        nodes=need.nodes,
        domains=max((r.fit.count for _, r in passing if r.fit), default=0) if keep_together else 0,
        domain_gpus=_domain_gpus(passing) if keep_together else 0,
        consume={name: amount for name, amount in consume.items() if amount},
    )


def _domain_gpus(passing: list[tuple[NodeClass, Result]]) -> int:
    """GPUs per NUMA node when every machine shares them out alike, else 0."""
    shares = _kinds(passing)
    return next(iter(shares))[1] if len(shares) == 1 else 0


def _whole_node(passing: list[tuple[NodeClass, Result]]) -> bool:
    """Whether the job uses all NUMA nodes of every machine anyway: nothing to keep together."""
    return all(r.fit is None or r.fit.count == len(c.profile.cpu_domains) for c, r in passing)


def _evaluate_all(classes: Iterable[NodeClass], need: Need) -> list[tuple[NodeClass, Result]]:
    """Every class, its machine and its storage each checked once however many share them."""
    machines: dict[int, Result] = {}
    storages: dict[int, tuple[Check, ...]] = {}
    whole: dict[tuple[int, int], Result] = {}
    results = []
    for c in classes:
        if c.machine not in machines:
            machines[c.machine] = evaluate_machine(c.profile, need)
        if c.storage not in storages:
            storages[c.storage] = evaluate_storage(c.profile, need)
        pair = (c.machine, c.storage)
        if pair not in whole:
            whole[pair] = combine(machines[c.machine], storages[c.storage])
        results.append((c, whole[pair]))
    return results


@dataclass(slots=True)
class _Tally:
    """The nodes to which one check applies, and one of them."""

    check: Check
    nodes: int
    example: str


def _conditions(results: list[tuple[NodeClass, Result]], candidates: int) -> tuple[Condition, ...]:
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
    everything = _union(c.nodes for c, _ in results) & candidates
    return tuple(
        _condition(name, list(named.values()), everything) for name, named in tallies.items()
    )


def _condition(name: str, tallies: list[_Tally], everything: int) -> Condition:
    bad = [t for t in tallies if not t.check.ok]
    failed = _union(t.nodes for t in bad)
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


def _excluded(
    results: list[tuple[NodeClass, Result]],
    candidates: int,
    inventory: Inventory,
    passed: int,
    kinds: set[tuple[int, int]],
) -> tuple[tuple[str, int, str], ...]:
    """Why nodes did not pass, counted, each reason with an example node."""
    by_result: dict[int, tuple[Result, int]] = {}
    for node_class, result in results:
        nodes = node_class.nodes & candidates & ~passed
        if nodes:
            _, before = by_result.get(id(result), (result, 0))
            by_result[id(result)] = (result, before | nodes)
    groups: dict[str, list[int]] = {}
    for result, nodes in by_result.values():
        bad = [c.reason for c in result.checks if not c.ok]
        reason = "; ".join(bad) or _set_apart(result, kinds)
        groups.setdefault(reason, []).append(nodes)
    if unknown := inventory.unknown & candidates:
        groups.setdefault("has no profile in the store", []).append(unknown)
    rows = []
    for reason, sets in groups.items():
        nodes = _union(sets)
        rows.append((inventory.names_of(nodes, 1)[0], nodes.bit_count(), reason))
    return tuple(sorted(rows, key=lambda row: -row[1]))


def _set_apart(result: Result, kinds: set[tuple[int, int]]) -> str:
    """Why a machine that meets every need is left out all the same."""
    if result.fit and (result.fit.count, result.fit.gpus_per_domain) not in kinds:
        return f"the job would use {result.fit.count} NUMA nodes, unlike on the nodes chosen"
    return "has no GPU type that can be asked for alone"


def _sentence(check: Check) -> str:
    return f"{check.name}: needs {check.need}, {check.reason or 'has ' + check.have}"
