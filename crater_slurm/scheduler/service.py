"""crater-scheduler put together: state, recorder, filter socket, watch over the queue, metrics."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from crater_slurm.alldata.submitter import submitter
from crater_slurm.config import Settings
from crater_slurm.config.score import Score as ScoreSettings
from crater_slurm.model.plan import Mode
from crater_slurm.model.request import Request
from crater_slurm.placement import score
from crater_slurm.placement.outcome import Outcome
from crater_slurm.placement.planner import Preference
from crater_slurm.placement.sharing import Policy
from crater_slurm.scheduler import predicting, replan
from crater_slurm.scheduler.actions import Actor
from crater_slurm.scheduler.decide import Decider
from crater_slurm.scheduler.drain import Drains
from crater_slurm.scheduler.health import Board, HealthWatch
from crater_slurm.scheduler.health_metrics import HealthCollector
from crater_slurm.scheduler.keys import KeyFile
from crater_slurm.scheduler.observed import Observed
from crater_slurm.scheduler.planned import PlannedJobs
from crater_slurm.scheduler.preferring import Preferring
from crater_slurm.scheduler.prometheus import Prometheus
from crater_slurm.scheduler.reconcile import Reconciler, Replan
from crater_slurm.scheduler.recorder import Recorder
from crater_slurm.scheduler.reports import Reports
from crater_slurm.scheduler.sla import SlaWatch
from crater_slurm.scheduler.socket import FilterSocket, Pairs
from crater_slurm.scheduler.state import State, View
from crater_slurm.scheduler.tasks import Tasks
from crater_slurm.scheduler.utilization import Utilization
from crater_slurm.scheduler.watch import QueueWatch
from crater_slurm.scheduler.weights import Weights
from crater_slurm.slurm import jobs, occupancy
from crater_slurm.slurm.client import Client
from crater_slurm.slurm.control import Control
from crater_slurm.store.repository import Store

_log = logging.getLogger("crater.scheduler")
_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1)


class Service:
    """Owns every part of the daemon. ``start`` answers submissions from its return on."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self.settings = settings
        self.clock = clock
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
                weights=score.Weights(**settings.score.weights.model_dump()),
                tolerance=tolerance_alone(settings.score),
            ),
            sharing_policy=_sharing_policy(settings),
        )
        self.recorder = Recorder(self.store, settings.store.keep_decisions_days)
        self.reports = Reports(self.store)
        self.observed = Observed(self.store, self.recorder)
        self.health = self._health_watch()
        self.preferring = self._preferring()
        #: What is expected of a request; the filter and the API ask alike.
        self.predict = self._predictor()
        self._decider = Decider(
            mode=Mode(settings.filter.mode),
            key=self.keys.signing_key,
            consume=frozenset(settings.filter.consume),
            prefer=settings.score.prefer,
            predict=self.predict,
            preferring=self._prefer,
            board=self._board,
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
        self.registry.register(HealthCollector(self.health))
        self.utilization = Utilization(self.registry)
        consume = frozenset(settings.filter.consume)
        #: What planning a waiting job again comes to; see replan.wanted.
        self.replan: Replan = lambda decision, view: replan.wanted(
            decision, view, consume, self._board()
        )
        self.watch = self._queue_watch()
        self.tasks = Tasks(
            settings, self.store, self.slurm, submitter(settings, self.slurm), self.registry, clock
        )

    def _health_watch(self) -> HealthWatch:
        own = self.settings.health
        control = Control(self.slurm)
        source = None
        if own.prometheus.url:
            source = Prometheus(own.prometheus, self.state.node_names)
        return HealthWatch(
            self.settings,
            self.state,
            self.reports,
            Weights(control, own.state_file),
            Drains(control),
            source,
        )

    def _preferring(self) -> Preferring | None:
        own = self.settings.score
        if not (own.prefer and own.fragmentation):
            return None
        return Preferring(
            lambda: self.state.view,
            lambda: self.state.profiles,
            lambda: occupancy.read(self.slurm),
            share=own.fragmentation,
            tolerance=own.tolerance,
            seconds=self.settings.scheduler.refresh_seconds,
        )

    def _prefer(self, outcome: Outcome, view: View) -> Outcome:
        """The outcome with the nodes to prefer now; the job is a part of the mix from now on."""
        if self.preferring is None:
            return outcome
        self.preferring.learn(outcome, view.planner.inventory)
        return self.preferring.look(outcome, view.planner.inventory)

    def _predictor(self) -> predicting.Predict:
        own = self.settings.prediction
        if not own.enabled:
            return lambda request, job: predicting.NOTHING
        return predicting.Predictor(self.observed.peaks, require=own.require)

    def _board(self) -> Board | None:
        return self.health.board if self.settings.health.exclude_degraded else None

    def _queue_watch(self) -> QueueWatch:
        """What is done for jobs that wait; it changes jobs, so only where crater may enforce."""
        acts = Counter(
            "crater_job_actions",
            "Acts on waiting jobs",
            ["kind", "action", "outcome"],
            registry=self.registry,
        )
        settings = self.settings

        def actor(dry_run: bool) -> Actor:
            return Actor(
                functools.partial(jobs.update, self.slurm),
                self.store,
                self.clock,
                dry_run=dry_run,
                acted=lambda *words: acts.labels(*words).inc(),
            )

        sla = SlaWatch(settings.sla, actor(settings.sla.dry_run), self.store)
        late = Gauge("crater_sla_late_jobs", "Jobs past their max-wait", registry=self.registry)
        late.set_function(lambda: sla.late)
        reconciler = Reconciler(
            settings.reconcile,
            actor(settings.reconcile.dry_run),
            self.store,
            lambda decision, view: self.replan(decision, view),
            self._board,
            lambda: self.health.settled() or not settings.health.exclude_degraded,
        )
        return QueueWatch(
            (sla, reconciler),
            read=lambda excluded: jobs.queue(self.slurm, excluded=excluded, running=False),
            planned=PlannedJobs(self.keys.verifying_keys, self.store),
            view=lambda: self.state.view,
            off=lambda: settings.filter.mode != "enforce" or settings.off_switch.exists(),
            seconds=settings.scheduler.queue_seconds,
        )

    def take_observation(self, report: Mapping[str, Any]) -> None:
        """A node's report of a job's needs. Raises UsageError, StoreError."""
        one = self.observed.take(report)
        job = str(one.job_id)
        decision = None if one.ended else self.recorder.decision(one.plan_id)
        if decision is None:
            self.utilization.forget(job)
            return
        request = Request(**decision.request)  # type: ignore[arg-type]
        percent = one.gpu_utilization_mean_percent
        self.utilization.observe(job, one.plan_id, request, percent, one.seconds)

    def store(self) -> Store:
        """The store, opened when first needed and again after it was away. Raises StoreError."""
        if self._store is None:
            self._store = Store.open(self.settings.store.url)
        return self._store

    def start(self) -> None:
        self.state.start()
        self.recorder.start()
        self.observed.start()
        self.filter.start()
        self.health.start()
        self.watch.start()
        self.tasks.start()
        if self.preferring:
            self.preferring.start()

    def stop(self) -> None:
        self.filter.stop()
        if self.preferring:
            self.preferring.stop()
        self.tasks.stop()
        self.watch.stop()
        self.health.stop()
        self.state.stop()
        self.observed.stop()
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
        self.tasks.saw(fields, answer.decision.id if answer.decision else None)
        for line in answer.log:
            _log.info("uid %s: %s", fields.get("uid", "?"), line)
        return answer.pairs()

    def warnings(self) -> list[str]:
        """What is worth a look, and keeps nothing from working."""
        preferring = self.preferring.problem if self.preferring else ""
        found = [*self.health.warnings(), *([preferring] if preferring else [])]
        return found + self.tasks.problems()

    def problems(self) -> list[str]:
        """What keeps the daemon from doing its work; empty when it is healthy."""
        found = [self.state.problem, self.recorder.problem, self.keys.problem]
        found.append(self.watch.problem)
        view = self.state.view
        if view is None:
            found.append("the cluster has not been read yet")
        elif time.time() - view.cluster.time > 10 * self.settings.scheduler.refresh_seconds + 60:
            found.append("the picture of the cluster is old")
        return [problem for problem in dict.fromkeys(found) if problem]


def tolerance_alone(own: ScoreSettings) -> float:
    """How near to the best is as good where what a job strands is not known yet: so that the rest
    of the score decides no more than it does beside that."""
    rest = 1 - own.fragmentation
    return min(1.0, own.tolerance / rest) if rest else 1.0


def _sharing_policy(settings: Settings) -> Policy | None:
    """How this site shares GPUs; None when it does not."""
    sharing = settings.sharing
    if sharing.allow == "off":
        return None
    return Policy(rounding=sharing.rounding, reserve=sharing.reserve, mps=sharing.mps)
