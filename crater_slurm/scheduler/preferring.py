"""Which nodes a job should rather get, by what it would strand on the cluster as it is now.

Worked out beside the submissions: the first job of its kind is told what its score alone says, the
next ones what was found meanwhile. A picture that can't be had leaves the score alone in force.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
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
from crater_slurm.placement.stranding import Kind, Rest, Taken
from crater_slurm.scheduler.state import View

_log = logging.getLogger("crater.scheduler.preferring")
#: Kinds of jobs that are kept up to date, the ones asked for last.
_MOST_KEPT = 128
#: After so many jobs a picture is old; but Slurm is asked no more often than that.
_MANY_JOBS, _LEAST_SECONDS = 50, 3.0
#: Jobs whose mix counts, the newest.
_MOST_SEEN = 5000
#: Groups of nodes that are told apart for one job; a cluster whose nodes all have features of
#: their own would have thousands.
_MOST_GROUPS = 48

_Key = tuple[Need, int]
#: Nodes, and what Slurm takes of them; None without room.
_Group = tuple[int, Taken | None]


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
        #: Jobs that were planned since the last picture.
        self._learnt = 0
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
                self._learnt += 1

    def _run(self) -> None:
        while not self._stopping:
            self._guard.run(self.refresh)
            self._wait()

    def _wait(self) -> None:
        """Until it is time for a new picture; kinds that are asked for meanwhile are worked out.

        Many jobs at once change the cluster in less time, and all of a kind would be sent to where
        there is no room any more.
        """
        begin = time.monotonic()
        while not self._stopping and (passed := time.monotonic() - begin) < self._seconds:
            if self._learnt >= _MANY_JOBS and passed >= _LEAST_SECONDS:
                return
            if self._wake.wait(min(0.5, self._seconds)):
                self._wake.clear()
                self._work_out(only_new=True)

    def refresh(self) -> None:
        """Take a new picture, and work out every kept kind anew. Raises CraterError."""
        self._learnt = 0
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
        choices = self._choices(picture, [outcome for _, outcome in todo], picture.measure)
        with self._lock:
            for (key, outcome), choice in zip(todo, choices, strict=True):
                if key in self._kept:
                    self._kept[key] = (outcome, choice)

    def _choices(
        self, picture: _Picture, outcomes: Sequence[Outcome], measure: Measure
    ) -> list[Choice]:
        inventory = picture.inventory
        groups = [_groups(outcome, inventory) for outcome in outcomes]
        asked = [
            (_kind(outcome, inventory), stranding.masks(sets, len(inventory.names)))
            for outcome, sets in zip(outcomes, groups, strict=True)
        ]
        looked = picture.rest.look(asked, measure)
        return [
            self._choice(inventory, outcome, kind.gpus, list(zip(sets, taken, strict=True)))
            for outcome, (kind, _), sets, taken in zip(outcomes, asked, groups, looked, strict=True)
        ]

    def _choice(
        self, inventory: Inventory, outcome: Outcome, gpus: int, groups: list[_Group]
    ) -> Choice:
        scored = [(self._with(inventory, outcome, *group, gpus), group[1]) for group in groups]
        scored.sort(key=lambda one: (-one[0].score.value, one[0].nodes & -one[0].nodes))
        # Where no node has room now Slurm has no choice to make, and what is spared is not named.
        able = [ranked for ranked, taken in scored if taken is not None and not taken.spared]
        preferred = score.preferred(able, self._tolerance)
        prefer = score.expression_of(preferred, outcome.passed, inventory.feature_sets)
        ranked = tuple(ranked for ranked, _ in scored)
        return Choice(inventory, ranked, score.told(ranked, preferred), preferred, prefer)

    def _with(
        self, inventory: Inventory, outcome: Outcome, nodes: int, taken: Taken | None, gpus: int
    ) -> Ranked:
        """A group with the score of the node that Slurm takes of it, and fragmentation as one more
        term."""
        one = nodes & -nodes if taken is None else 1 << taken.node
        fit = next(group.score for group in outcome.ranked if group.nodes & one)
        part = 0.0 if taken is None else stranding.value(taken.lost, gpus)
        why = "no room now" if taken is None else _words(taken)
        terms = tuple(
            Term(term.name, term.weight * (1 - self._share), term.value, term.why)
            for term in fit.terms
        )
        own = self._share if terms else 1.0
        term = Term("fragmentation", own, part, why)
        total = sum(t.weight * t.value for t in (*terms, term))
        return Ranked(nodes, inventory.names_of(one, 1)[0], Score(total, (*terms, term)))


def _kind(outcome: Outcome, inventory: Inventory) -> Kind:
    """The job as the mix counts it, on the GPU models that can take it."""
    models = frozenset(m for m, nodes in inventory.models.items() if nodes & outcome.passed)
    take, share = stranding.take_of(outcome.need), outcome.share
    if share is None:
        return Kind(outcome.need.gpus, take, models)
    return Kind(1, take, models, -(-WHOLE * share.shards // share.slices))


def _groups(outcome: Outcome, inventory: Inventory) -> list[int]:
    """Nodes that can run the job, in the groups that features can tell apart, which is all that
    Slurm can be told; by GPU model alone where there are too many of those."""
    able = 0
    for ranked in outcome.ranked:
        able |= ranked.nodes
    found = _of(able, [members for _, members in inventory.feature_sets])
    if len(found) > _MOST_GROUPS:
        found = _of(able, list(inventory.models.values()))
    return found[:_MOST_GROUPS]


def _of(able: int, sets: list[int]) -> list[int]:
    return [nodes for members in sets if (nodes := able & members)]


def _words(taken: Taken) -> str:
    left = "; left to jobs that only the few largest nodes can take" if taken.spared else ""
    gpus = abs(taken.lost) / 1000
    if gpus < 0.05:
        return f"takes just what it uses there{left}"
    what = "strands" if taken.lost > 0 else "takes up stranded"
    return f"{what} {gpus:.2g} GPU of the cluster's mix there{left}"
