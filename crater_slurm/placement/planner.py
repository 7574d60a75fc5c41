"""Decides: which nodes can take a job, what it should get there, or why none can.

Pure and fast: equal needs on an unchanged inventory are evaluated once, and a decision then costs
set operations only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from crater_slurm.model.job import Job
from crater_slurm.model.plan import Condition, Placement, Plan
from crater_slurm.model.profile import NodeProfile
from crater_slurm.model.request import Request
from crater_slurm.placement import advice, numa
from crater_slurm.placement.inventory import Inventory, NodeClass
from crater_slurm.placement.need import Need, join
from crater_slurm.placement.rules import (
    Check,
    Result,
    combine,
    evaluate_machine,
    evaluate_storage,
    physical_cores,
)

#: Evaluated needs kept per inventory; a cluster's users repeat themselves far below this.
_CACHE_SIZE = 4096
_EXAMPLES = 3
_NO_PROFILE = "has no profile in the store"

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
    nearest_profile: NodeProfile | None = None
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
    _ways_out: dict[Hashable, tuple[str, ...]] = field(default_factory=dict)

    def plan(self, plan_id: str, request: Request, job: Job, scope: Scope) -> Outcome:
        """Outcome for a job; never raises for a request that parsed."""
        request = self.refine(request)
        joined = join(request, job)
        candidates = self._candidates(scope)
        named = self.inventory.name_set(scope.only or ())
        key = (joined.need, candidates, named)
        outcome = self._outcomes.get(key)
        if outcome is None:
            outcome = self._decide(joined.need, candidates, named)
            if len(self._outcomes) >= _CACHE_SIZE:
                self._outcomes.clear()
            self._outcomes[key] = outcome
        if not outcome.feasible:
            change = self._way_out(outcome, request, job, candidates, named)
            outcome = dataclasses.replace(outcome, smallest_change=change)
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
        gres_type, passing = _choose_type(passing, need, candidates, named)
        if not named:
            passing = _alike(passing, need, candidates, self.inventory.usable)
        passed = _nodes_of(passing, candidates)
        outcome = Outcome(
            need=need,
            feasible=_enough(passed, need, named),
            passed=passed,
            failed=candidates & ~passed,
            conditions=_conditions(results, candidates),
            excluded=_excluded(results, candidates, self.inventory, passed, _kinds(passing)),
        )
        if not outcome.feasible:
            return self._with_nearest(outcome, results, candidates)
        return dataclasses.replace(
            outcome,
            placement=_placement(need, passing, gres_type),
            domains=max((r.fit.count for _, r in passing if r.fit), default=0),
            notes=self._notes(passing, need, passed),
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

    def _with_nearest(
        self, outcome: Outcome, results: list[tuple[NodeClass, Result]], candidates: int
    ) -> Outcome:
        """A refusal with the node that comes nearest."""
        near = advice.nearest([(c, r) for c, r in results if not r.ok])
        if near:
            name = self.inventory.names_of(near[0].nodes & candidates, 1)[0]
            have = tuple(_sentence(c) for c in near[1].checks if not c.ok)
            return dataclasses.replace(
                outcome, nearest_node=name, nearest_have=have, nearest_profile=near[0].profile
            )
        if not outcome.passed:  # every condition is met, but Slurm can't be asked for these GPUs
            name, _, reason = next(row for row in outcome.excluded if row[2] != _NO_PROFILE)
            return dataclasses.replace(outcome, nearest_node=name, nearest_have=(reason,))
        return outcome

    def _way_out(
        self, outcome: Outcome, request: Request, job: Job, candidates: int, named: int
    ) -> tuple[str, ...]:
        """The smallest changes after which this job would fit, each tried as a whole job."""
        key = (request, _shape(job), candidates, named)
        ways = self._ways_out.get(key)
        if ways is None:
            if len(self._ways_out) >= _CACHE_SIZE:
                self._ways_out.clear()
            ways = self._find_way_out(outcome, request, job, candidates, named)
            self._ways_out[key] = ways
        return ways

    def _find_way_out(
        self, outcome: Outcome, request: Request, job: Job, candidates: int, named: int
    ) -> tuple[str, ...]:
        def fits(request: Request, job: Job, on: int) -> bool:
            need = join(request, job).need
            passed = self._passed(need, candidates, named)
            return _enough(passed, need, named) and bool(passed & on)

        def told(words: advice.Words) -> str | None:
            changed = advice.reworded(words, outcome.need, request, job)
            near = self.inventory.name_set([outcome.nearest_node])
            if changed and fits(changed.request, changed.job, near):
                return changed.text
            return None

        ways: tuple[str, ...] = ()
        count = outcome.passed.bit_count()
        if 0 < count < outcome.need.nodes:
            fewer = dataclasses.replace(job, min_nodes=count)
            if fits(request, fewer, outcome.passed):
                ways = (f"--nodes={count}",)
        if outcome.nearest_profile:
            ways += advice.smallest_change(outcome.nearest_profile, outcome.need, told)
        return ways

    def _passed(self, need: Need, candidates: int, named: int) -> int:
        """The candidates that can take a job of this need."""
        passing = [(c, r) for c, r in self._evaluate(need) if r.ok and c.nodes & candidates]
        return _nodes_of(_choose_type(passing, need, candidates, named)[1], candidates)

    def _notes(
        self, passing: list[tuple[NodeClass, Result]], need: Need, passed: int
    ) -> tuple[str, ...]:
        notes = []
        if not passed & self.inventory.usable:
            notes.append(
                f"all {passed.bit_count()} nodes that can run this job are down or drained now"
            )
        if partly := [c for c, r in passing if r.fit is not None and not r.fit.everywhere]:
            example = self.inventory.names_of(partly[0].nodes & passed, 1)[0]
            fits = next(r.fit for c, r in passing if c is partly[0] and r.fit)
            chosen = ", ".join(str(n) for n in fits.chosen)
            nodes, meet = ("node", "meets") if len(fits.chosen) == 1 else ("nodes", "meet")
            notes.append(
                f"on {example} only NUMA {nodes} {chosen} {meet} the need and Slurm can't be told "
                "which one to use; crater explain shows which one the job got"
            )
        mixed = [(c, r) for c, r in passing if len(r.eligible) < len(c.profile.gpus)]
        if mixed and need.untyped:
            example = self.inventory.names_of(mixed[0][0].nodes & passed, 1)[0]
            types = ", ".join(sorted({g.gres_type or g.model for g in mixed[0][0].profile.gpus}))
            notes.append(
                f"{example} has GPUs that do not meet the need ({types}) and your own option names "
                "no type: Slurm may give any of them"
            )
        return tuple(notes)


def _union(sets: Iterable[int]) -> int:
    result = 0
    for nodes in sets:
        result |= nodes
    return result


def _nodes_of(passing: Sequence[tuple[NodeClass, Result]], candidates: int) -> int:
    return _union(c.nodes for c, _ in passing) & candidates


def _enough(passed: int, need: Need, named: int) -> bool:
    """A node that the user names with -w is always part of the job: all of them must pass."""
    return passed.bit_count() >= need.nodes and not named & ~passed


def _shape(job: Job) -> Hashable:
    """The options on which a way out depends."""
    return (
        job.gpus,
        job.min_nodes,
        job.tasks,
        job.tasks_per_node,
        job.cpus_per_task,
        job.cpus_per_gpu,
        job.memory_per_node_mib,
        job.memory_per_cpu_mib,
        job.sockets_per_node,
        job.exclusive,
    )


def _choose_type(
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
        enough = _enough(_nodes_of(uniform, candidates), need, named)
        return None, uniform if enough else passing
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
    return max(choices, key=lambda choice: _nodes_of(choice[1], candidates).bit_count())


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
        groups.setdefault(_NO_PROFILE, []).append(unknown)
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
