"""Decides: which nodes can take a job, what it should get there, or why none can.

Pure and fast: equal needs on an unchanged inventory are evaluated once, and a decision then costs
set operations only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from crater_slurm.model.cluster import SlurmCluster
from crater_slurm.model.job import Job
from crater_slurm.model.request import Request
from crater_slurm.placement import (
    advice,
    linked,
    planned,
    reservations,
    score,
    sharing,
    site,
    ways_out,
)
from crater_slurm.placement.check import Check
from crater_slurm.placement.inventory import Inventory, NodeClass
from crater_slurm.placement.need import Expected, Need, join
from crater_slurm.placement.outcome import Outcome, Scope
from crater_slurm.placement.rules import Result, evaluate
from crater_slurm.placement.selection import alike, choose_type, kinds
from crater_slurm.placement.tally import conditions, enough, excluded, nodes_of, union

#: Evaluated needs kept per inventory; a cluster's users repeat themselves far below this.
_CACHE_SIZE = 4096
_NO_PROFILE = "has no profile in the store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Which nodes of many to prefer: those within ``tolerance`` of the best score."""

    weights: score.Weights = field(default_factory=score.Weights)
    tolerance: float = 0.01


@dataclass(slots=True)
class Planner:
    """Plans jobs on one inventory."""

    inventory: Inventory
    preference: Preference = field(default_factory=Preference)
    #: How GPUs are shared; None where the site gives whole ones only.
    sharing_policy: sharing.Policy | None = None
    _results: dict[Need, list[tuple[NodeClass, Result]]] = field(default_factory=dict)
    _outcomes: dict[tuple[Need, int, int], Outcome] = field(default_factory=dict)
    _ways_out: dict[ways_out.Key, tuple[str, ...]] = field(default_factory=dict)

    def plan(
        self,
        plan_id: str,
        request: Request,
        job: Job,
        scope: Scope,
        expected: Expected | None = None,
    ) -> Outcome:
        """Outcome for a job; never raises for a request that parsed."""
        joined = join(request, job, expected)
        candidates = self._candidates(scope)
        named = self.inventory.name_set(scope.only or ())
        outcome = self._outcome_of(joined.need, candidates, named)
        if not outcome.feasible:
            asked = ways_out.Asked(request, job, expected)
            change = self._way_out(outcome, asked, candidates, named)
            outcome = dataclasses.replace(outcome, smallest_change=change)
        outcome = site.told(outcome, self.inventory, job, scope, candidates, named)
        return dataclasses.replace(
            outcome,
            plan=planned.plan(plan_id, request, outcome) if outcome.placement else None,
            notes=joined.notes + outcome.notes,
        )

    def ruled(self, cluster: SlurmCluster) -> Planner:
        """The same on nodes whose partitions or reservations changed; what is known stays."""
        return dataclasses.replace(self, inventory=self.inventory.ruled(cluster))

    def _outcome_of(self, need: Need, candidates: int, named: int) -> Outcome:
        """The outcome of a need, worked out once; a part of a GPU where it may be and can be."""
        for tried in sharing.ways(need, self.sharing_policy):
            outcome = self._kept(tried, candidates, named)
            if outcome.feasible:
                break
        if need.shared and outcome.placement and not outcome.share:
            why = sharing.why_whole(self.sharing_policy)
            outcome = dataclasses.replace(outcome, notes=(why, *outcome.notes))
        return outcome

    def _kept(self, need: Need, candidates: int, named: int) -> Outcome:
        key = (need, candidates, named)
        outcome = self._outcomes.get(key)
        if outcome is None:
            outcome = self._decide(need, candidates, named)
            if len(self._outcomes) >= _CACHE_SIZE:
                self._outcomes.clear()
            self._outcomes[key] = outcome
        return outcome

    def _decide(self, need: Need, candidates: int, named: int) -> Outcome:
        """The part that is the same for every job with this need among these nodes."""
        results = [
            (node_class, result)
            for node_class, result in self._evaluate(need)
            if node_class.nodes & candidates
        ]
        if not results:
            return Outcome(need=need, feasible=True, known=False)
        choice = self._slices(results, need, candidates, named)
        results = choice.results if choice else results
        passing = [(c, r) for c, r in results if r.ok]
        gres_type = None
        if choice is None:
            gres_type, passing = choose_type(passing, need, candidates, named)
        if not named:
            passing = alike(passing, need, candidates, self.inventory.usable)
        passed = nodes_of(passing, candidates)
        outcome = Outcome(
            need=need,
            feasible=enough(passed, need, named),
            passed=passed,
            failed=candidates & ~passed,
            unknown=candidates & self.inventory.unknown & ~self.inventory.without_shards,
            conditions=conditions(results, candidates),
            excluded=excluded(results, candidates, self.inventory, passed, kinds(passing)),
        )
        if not outcome.feasible:
            return self._with_nearest(outcome, results, candidates)
        share = choice.share(passing) if choice else None
        part = share.shards / share.slices if share else None
        ranked = score.rank(passing, need, candidates, self.preference.weights, part)
        preferred = score.preferred(ranked, self.preference.tolerance)
        return dataclasses.replace(
            outcome,
            ranked=ranked,
            scores=score.told(ranked, preferred),
            preferred=preferred,
            prefer=score.expression_of(preferred, passed, self.inventory.feature_sets),
            placement=planned.placement(need, passing, gres_type, share),
            domains=max((r.fit.count for _, r in passing if r.fit), default=0),
            facts=linked.facts(self.inventory, passing, need, passed),
            share=share,
            notes=planned.notes(self.inventory, passing, need, passed, self._shared(share)),
        )

    def _shared(self, share: sharing.Share | None) -> sharing.Shared | None:
        policy = self.sharing_policy
        return sharing.Shared(share, policy) if share and policy else None

    def _slices(
        self, results: list[tuple[NodeClass, Result]], need: Need, candidates: int, named: int
    ) -> sharing.Choice | None:
        """What slices make of each class; None for a job that has none."""
        among = sharing.Among(self.inventory, candidates, named)
        return sharing.choose(results, need, self.sharing_policy, among)

    def _candidates(self, scope: Scope) -> int:
        inventory = self.inventory
        names = site.partitions_of(inventory, scope)
        nodes = union(inventory.partitions.get(p, 0) for p in names)
        if not names:
            nodes = inventory.everything
        reserved = reservations.confined(inventory.reservations, scope.reservations)
        if reserved is not None:
            nodes &= reserved
        if scope.only is not None:
            nodes &= inventory.name_set(scope.only)
        nodes &= ~inventory.name_set(scope.without)
        if scope.features is not None:
            nodes &= union(n for f, n in inventory.feature_sets if scope.features(f))
        return nodes

    def _evaluate(self, need: Need) -> list[tuple[NodeClass, Result]]:
        cached = self._results.get(need)
        if cached is None:
            cached = [(c, evaluate(c.profile, need)) for c in self.inventory.classes(need)]
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
        self, outcome: Outcome, asked: ways_out.Asked, candidates: int, named: int
    ) -> tuple[str, ...]:
        """The smallest changes after which this job would fit, each tried as a whole job."""
        key = asked.key(candidates, named)
        ways = self._ways_out.get(key)
        if ways is None:
            if len(self._ways_out) >= _CACHE_SIZE:
                self._ways_out.clear()

            def fits(need: Need, on: int) -> bool:
                passed = self._passed(need, candidates, named)
                return enough(passed, need, named) and bool(passed & on)

            fewer = self._fewer_shards(outcome.need, candidates, named)
            ways = fewer + ways_out.found(outcome, asked, self.inventory, fits)
            self._ways_out[key] = ways
        return ways

    def _fewer_shards(self, need: Need, candidates: int, named: int) -> tuple[str, ...]:
        """The user's own option with the most shards that one card has."""
        results = [(c, r) for c, r in self._evaluate(need) if c.nodes & candidates]
        choice = self._slices(results, need, candidates, named)
        most = sharing.largest(choice) if choice else 0
        fewer = dataclasses.replace(need, own_shards=most)
        if 0 < most < need.own_shards and self._kept(fewer, candidates, named).feasible:
            return (f"--gres=shard:{most}",)
        return ()

    def _passed(self, need: Need, candidates: int, named: int) -> int:
        """The candidates that can take a job of this need."""
        passing = [(c, r) for c, r in self._evaluate(need) if r.ok and c.nodes & candidates]
        if need.own_shards and (choice := self._slices(passing, need, candidates, named)):
            return nodes_of([(c, r) for c, r in choice.results if r.ok], candidates)
        return nodes_of(choose_type(passing, need, candidates, named)[1], candidates)


def _sentence(check: Check) -> str:
    return f"{check.name}: needs {check.need}, {check.reason or 'has ' + check.have}"
