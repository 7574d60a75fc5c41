"""Which nodes a job should rather get, by what it would strand on the cluster as it is now.

Worked out beside the submissions: the first job of its kind is told what its score alone says, the
next ones what was found meanwhile. A picture that can't be had leaves the score alone in force.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from crater_slurm.guard import Guard
from crater_slurm.model.cluster import NodeUse
from crater_slurm.model.plan import NodeScore
from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement import score, stranding
from crater_slurm.placement.inventory import Inventory
from crater_slurm.placement.need import Need
from crater_slurm.placement.outcome import Outcome
from crater_slurm.placement.packing.kernels import WHOLE, Measure
from crater_slurm.placement.packing.score import packs_of
from crater_slurm.placement.score import Ranked, Score, Term
from crater_slurm.placement.stranding import Kind, Rest
from crater_slurm.scheduler.state import View

_log = logging.getLogger("crater.scheduler.preferring")
#: Kinds of jobs that are kept up to date, the ones asked for last.
_MOST_KEPT = 64
#: Jobs whose mix counts, the newest.
_MOST_SEEN = 5000
#: Groups of nodes that are told apart for one job; a cluster whose nodes all have features of
#: their own would have thousands.
_MOST_GROUPS = 48

_NO_ROOM = "no room now"

_Key = tuple[Need, int]


@dataclass(frozen=True, slots=True)
class _Picture:
    """The cluster at one moment: of which inventory, what is left of it, and what is measured by.

    ``measure`` is of the mix that was asked for till then; None before anything was.
    """

    inventory: Inventory
    rest: Rest
    measure: Measure | None


@dataclass(frozen=True, slots=True)
class Choice:
    """Groups of nodes with fragmentation in their score, best first, and the preferred ones."""

    inventory: Inventory
    ranked: tuple[Ranked, ...]
    scores: tuple[NodeScore, ...]
    preferred: int
    prefer: str


class Preferring:
    """The thread, and what it worked out. ``share`` is fragmentation's part of the score."""

    def __init__(
        self,
        view: Callable[[], View | None],
        profiles: Callable[[], Mapping[str, NodeProfile]],
        used: Callable[[], Mapping[str, NodeUse]],
        *,
        share: float,
        tolerance: float,
        seconds: float,
    ) -> None:
        self._view = view
        self._profiles = profiles
        self._used = used
        self._share = share
        self._tolerance = tolerance
        self._seconds = seconds
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, tuple[Outcome, Choice | None]] = OrderedDict()
        self._seen: deque[Kind] = deque(maxlen=_MOST_SEEN)
        self._wake = threading.Event()
        self._stopping = False
        self._picture: _Picture | None = None
        self._thread = threading.Thread(target=self._run, name="preferring", daemon=True)
        self._guard = Guard(_log, "can't tell what jobs would strand")

    @property
    def problem(self) -> str:
        return self._guard.problem

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=5)

    def look(self, outcome: Outcome, inventory: Inventory) -> Outcome:
        """The outcome with the preference that holds now; costs no time worth speaking of."""
        if not outcome.feasible or not outcome.ranked:
            return outcome
        key = (outcome.need, outcome.passed)
        with self._lock:
            known = self._kept.get(key)
            self._kept[key] = (outcome, known[1] if known else None)
            self._kept.move_to_end(key)
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        choice = known[1] if known else None
        if choice is None or choice.inventory is not inventory:
            self._wake.set()
            return outcome
        return replace(
            outcome,
            ranked=choice.ranked,
            scores=choice.scores,
            preferred=choice.preferred,
            prefer=choice.prefer,
        )

    def learn(self, outcome: Outcome, inventory: Inventory) -> None:
        """A job of this need was planned: it is a part of the mix."""
        if outcome.feasible:
            kind = _kind(outcome, inventory)
            with self._lock:
                self._seen.append(kind)

    def _run(self) -> None:
        while not self._stopping:
            self._guard.run(self.refresh)
            self._wait()

    def _wait(self) -> None:
        """Until it is time for a new picture; kinds that are asked for meanwhile are worked out."""
        for _ in range(max(1, round(self._seconds / 0.5))):
            if self._stopping:
                return
            if self._wake.wait(0.5):
                self._wake.clear()
                self._work_out(only_new=True)

    def refresh(self) -> None:
        """Take a new picture, and work out every kept kind anew. Raises CraterError."""
        view = self._view()
        if view is None:
            return
        inventory, profiles, used = view.planner.inventory, self._profiles(), self._used()
        names = inventory.names
        weights = {node.name: node.weight or 0 for node in view.cluster.nodes}
        (usable,) = stranding.masks([inventory.usable], len(names))
        rest = Rest(
            [profiles.get(name) for name in names],
            [used.get(name, NodeUse()) for name in names],
            usable,
            [weights.get(name, 0) for name in names],
            view.cluster.version,
        )
        with self._lock:
            seen = Counter(self._seen)
        measure = packs_of(rest.mix(seen)) if seen else None
        self._picture = _Picture(inventory, rest, measure)
        self._work_out()

    def _work_out(self, *, only_new: bool = False) -> None:
        picture = self._picture
        if picture is None or picture.measure is None:
            return
        with self._lock:
            todo = [
                (key, outcome)
                for key, (outcome, choice) in self._kept.items()
                if not only_new or choice is None or choice.inventory is not picture.inventory
            ]
        for key, outcome in todo:
            choice = self._choice(picture, outcome, picture.measure)
            with self._lock:
                if key in self._kept:
                    self._kept[key] = (outcome, choice)

    def _choice(self, picture: _Picture, outcome: Outcome, measure: Measure) -> Choice:
        inventory = picture.inventory
        groups = _groups(outcome, inventory)
        arrays = stranding.masks([nodes for nodes, _ in groups], len(inventory.names))
        kind = _kind(outcome, inventory)
        costs = picture.rest.costs(kind, arrays, measure)
        ranked = tuple(
            sorted(
                (self._with(inventory, nodes, fit, cost, kind.gpus)
                 for (nodes, fit), cost in zip(groups, costs, strict=True)),
                key=lambda group: (-group.score.value, group.nodes & -group.nodes),
            )
        )  # fmt: skip
        # Where no node has room now, Slurm has no choice to make.
        able = [group for group in ranked if group.score.terms[-1].why != _NO_ROOM]
        preferred = score.preferred(able, self._tolerance)
        prefer = score.expression_of(preferred, outcome.passed, inventory.feature_sets)
        return Choice(inventory, ranked, score.told(ranked, preferred), preferred, prefer)

    def _with(
        self, inventory: Inventory, nodes: int, fit: Score, cost: float | None, gpus: int
    ) -> Ranked:
        """A group's score with fragmentation as one more term."""
        part = 0.0 if cost is None else stranding.value(cost, gpus)
        why = _NO_ROOM if cost is None else _words(cost)
        terms = tuple(
            Term(term.name, term.weight * (1 - self._share), term.value, term.why)
            for term in fit.terms
        )
        own = self._share if terms else 1.0
        term = Term("fragmentation", own, part, why)
        total = sum(t.weight * t.value for t in (*terms, term))
        return Ranked(nodes, inventory.names_of(nodes, 1)[0], Score(total, (*terms, term)))


def _kind(outcome: Outcome, inventory: Inventory) -> Kind:
    """The job as the mix counts it, on the GPU models that can take it."""
    models = frozenset(m for m, nodes in inventory.models.items() if nodes & outcome.passed)
    take, share = stranding.take_of(outcome.need), outcome.share
    if share is None:
        return Kind(outcome.need.gpus, take, models)
    return Kind(1, take, models, -(-WHOLE * share.shards // share.slices))


def _groups(outcome: Outcome, inventory: Inventory) -> list[tuple[int, Score]]:
    """Nodes that suit alike and that features can tell apart; by GPU model alone where there are
    too many such groups, and then those that suit best."""
    by_features = (members for _, members in inventory.feature_sets)
    found = _crossed(outcome, list(by_features))
    if len(found) > _MOST_GROUPS:
        found = _crossed(outcome, list(inventory.models.values()))
    return found[:_MOST_GROUPS]


def _crossed(outcome: Outcome, sets: list[int]) -> list[tuple[int, Score]]:
    return [
        (nodes, ranked.score)
        for ranked in outcome.ranked
        for members in sets
        if (nodes := ranked.nodes & members)
    ]


def _words(cost: float) -> str:
    gpus = abs(cost) / 1000
    if gpus < 0.05:
        return "takes just what it uses there"
    what = "strands" if cost > 0 else "takes up stranded"
    return f"{what} {gpus:.2g} GPU of the cluster's mix there"
