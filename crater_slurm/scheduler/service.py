"""crater-scheduler put together: state, recorder, filter socket, metrics."""

from __future__ import annotations

import logging
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from crater_slurm.config import Settings
from crater_slurm.model.plan import Mode
from crater_slurm.placement.planner import Preference
from crater_slurm.placement.score import Weights
from crater_slurm.placement.sharing import Policy
from crater_slurm.scheduler.decide import Decider
from crater_slurm.scheduler.keys import KeyFile
from crater_slurm.scheduler.recorder import Recorder
from crater_slurm.scheduler.reports import Reports
from crater_slurm.scheduler.socket import FilterSocket, Pairs
from crater_slurm.scheduler.state import State
from crater_slurm.slurm.client import Client
from crater_slurm.store.repository import Store

_log = logging.getLogger("crater.scheduler")
_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1)


class Service:
    """Owns every part of the daemon. ``start`` answers submissions from its return on."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._store: Store | None = None
        self.keys = KeyFile(settings.plan.key_file)
        self.slurm = Client(
            bin_dir=settings.slurm.bin_dir,
            conf=settings.slurm.conf,
            timeout_seconds=settings.slurm.timeout_seconds,
        )
        self.state = State(
            self.slurm,
            self.store,
            refresh_seconds=settings.scheduler.refresh_seconds,
            allow_declared=settings.filter.allow_declared,
            preference=Preference(
                weights=Weights(**settings.score.weights.model_dump()),
                tolerance=settings.score.tolerance,
            ),
            sharing_policy=_sharing_policy(settings),
        )
        self.recorder = Recorder(self.store, settings.store.keep_decisions_days)
        self.reports = Reports(self.store)
        self._decider = Decider(
            mode=Mode(settings.filter.mode),
            key=self.keys.signing_key,
            consume=frozenset(settings.filter.consume),
            prefer=settings.score.prefer,
        )
        self.filter = FilterSocket(
            settings.filter.socket, settings.filter.allowed_users, self.answer
        )
        self.registry = CollectorRegistry()
        self._decisions = Counter(
            "crater_decisions", "Decisions by verdict", ["verdict", "mode"], registry=self.registry
        )
        self._seconds = Histogram(
            "crater_decision_seconds",
            "Time of a decision",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        profiles = Gauge("crater_profiled_nodes", "Nodes with a profile", registry=self.registry)
        profiles.set_function(lambda: self.state.view.profiles if self.state.view else 0)

    def store(self) -> Store:
        """The store, opened when first needed and again after it was away. Raises StoreError."""
        if self._store is None:
            self._store = Store.open(self.settings.store.url)
        return self._store

    def start(self) -> None:
        self.state.start()
        self.recorder.start()
        self.filter.start()

    def stop(self) -> None:
        self.filter.stop()
        self.state.stop()
        self.recorder.stop()

    def answer(self, message: Pairs) -> Pairs:
        """Answer one filter message."""
        begin = time.perf_counter()
        fields = dict(message)
        answer = self._decider.decide(fields, self.state.view)
        self._seconds.observe(time.perf_counter() - begin)
        if answer.decision:
            self._decisions.labels(answer.decision.verdict, answer.decision.mode).inc()
            self.recorder.add(answer.decision, fields.get("check"))
        for line in answer.log:
            _log.info("uid %s: %s", fields.get("uid", "?"), line)
        return answer.pairs()

    def problems(self) -> list[str]:
        """What keeps the daemon from doing its work; empty when it is healthy."""
        found = [self.state.problem, self.recorder.problem, self.keys.problem]
        view = self.state.view
        if view is None:
            found.append("the cluster has not been read yet")
        elif time.time() - view.cluster.time > 10 * self.settings.scheduler.refresh_seconds + 60:
            found.append("the picture of the cluster is old")
        return [problem for problem in dict.fromkeys(found) if problem]


def _sharing_policy(settings: Settings) -> Policy | None:
    """How this site shares GPUs; None when it does not."""
    sharing = settings.sharing
    if sharing.allow == "off":
        return None
    return Policy(rounding=sharing.rounding, reserve=sharing.reserve, mps=sharing.mps)
