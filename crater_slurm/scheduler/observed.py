"""What jobs were seen to need, in memory by workload, so that no decision waits for the store.

Takes the nodes' reports, joins them with the decision that they belong to, hands them to the
recorder and keeps the newest of each workload. A node may be wrong or hostile: what it says is
bounded here, and teaches only about plans that were made.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from crater_slurm.errors import StoreError, UsageError
from crater_slurm.model.observation import FIGURES, Observation, key_of
from crater_slurm.model.plan import Decision
from crater_slurm.model.request import Request
from crater_slurm.model.workload import Workload, stated, workload_of
from crater_slurm.scheduler.recorder import Recorder
from crater_slurm.store.repository import Store

_log = logging.getLogger("crater.scheduler.observed")
_PER_KEY = 32
_MOST_KEYS = 4096
_MOST_RUNNING = 50_000
_MOST_PLANS = 8192
_LOADED = 20_000
_RETRY_SECONDS = 5.0
#: A running job that was not reported for so long is not known to run.
_STALE_SECONDS = 3600.0
_WHOLE = frozenset(name for name in FIGURES if name.endswith("_mib"))

#: Key and settings of a plan's workload; the key is None when its user named no model.
_Known = tuple[str | None, Mapping[str, object]]
#: Job, node and plan: of which only the newest report counts.
_Name = tuple[int, str, str]


class Observed:
    """The index. Safe to share between threads."""

    def __init__(
        self, store: Callable[[], Store], recorder: Recorder, clock: Callable[[], float] = time.time
    ) -> None:
        self._open_store = store
        self._recorder = recorder
        self._clock = clock
        self._lock = threading.Lock()
        self._by_key: OrderedDict[str, tuple[Observation, ...]] = OrderedDict()
        self._running: OrderedDict[_Name, Observation] = OrderedDict()
        self._plans: OrderedDict[str, _Known] = OrderedDict()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observed", daemon=True)

    def start(self) -> None:
        """Load what the store has, in the background."""
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def peaks(self, workload: Workload) -> tuple[Observation, ...]:
        """What jobs of the same model, method and framework needed, the newest first.

        Only of jobs that ended well or ran long; those with ``is_lower_bound`` were killed for
        their memory and needed more.
        """
        with self._lock:
            return self._by_key.get(key_of(workload), ())

    def running(self) -> tuple[Observation, ...]:
        """The newest report of each job and node that runs; every five minutes or so a new one."""
        since = self._clock() - _STALE_SECONDS
        with self._lock:
            for key in [k for k, one in self._running.items() if one.time < since]:
                del self._running[key]
            return tuple(self._running.values())

    def take(self, report: Mapping[str, Any]) -> Observation:
        """A node's report, checked, joined and kept. Raises UsageError, StoreError."""
        figures = _checked(report["figures"])
        key, settings = self._workload(str(report["plan_id"]))
        one = Observation(
            job_id=int(report["job_id"]),
            plan_id=str(report["plan_id"]),
            node=str(report["node"]),
            # A clock that is ahead must not make its reports the newest for ever.
            time=min(float(report["time"]), self._clock()),
            seconds=float(report["seconds"]),
            ended=bool(report["ended"]),
            succeeded=report["succeeded"] if report["ended"] else None,
            oom_kills=int(report["oom_kills"]),
            samples=int(report["samples"]),
            gpus=int(report["gpus"]),
            key=key,
            workload=settings,
            **figures,
        )
        self._recorder.add(one)
        self._enter(one)
        return one

    def load(self) -> None:
        """Read the newest observations of the store. Raises StoreError."""
        for one in reversed(self._open_store().observations(limit=_LOADED, with_key=True)):
            if one.ended:
                self._enter(one)
            else:
                self._index(one)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.load()
                return
            except StoreError:
                pass  # the recorder says so, once
            except Exception:
                _log.exception("what was observed earlier can't be read")
                return
            self._stop.wait(_RETRY_SECONDS)

    def _enter(self, one: Observation) -> None:
        name = _name(one)
        with self._lock:
            before = self._running.get(name)
            if one.ended and (before is None or before.time <= one.time):
                self._running.pop(name, None)
            elif not one.ended and (before is None or before.time <= one.time):
                self._running[name] = one
                self._running.move_to_end(name)
                while len(self._running) > _MOST_RUNNING:
                    self._running.popitem(last=False)
        self._index(one)

    def _index(self, one: Observation) -> None:
        """Put it among its like, sorted, so that whoever decides has nothing to do but to look."""
        if one.key is None or not one.counts:
            return
        with self._lock:
            known = {_name(other): other for other in self._by_key.get(one.key, ())}
            before = known.get(_name(one))
            if before is None or before.time <= one.time:
                known[_name(one)] = one
            kept = sorted(known.values(), key=lambda other: other.time, reverse=True)
            self._by_key[one.key] = tuple(kept[:_PER_KEY])
            self._by_key.move_to_end(one.key)
            while len(self._by_key) > _MOST_KEYS:
                self._by_key.popitem(last=False)

    def _workload(self, plan_id: str) -> _Known:
        """Of a plan; a job reports every few minutes, so that the store is asked once only."""
        with self._lock:
            known = self._plans.get(plan_id)
        if known is not None:
            return known
        decision = self._recorder.decision(plan_id) if plan_id else None
        if decision is None:
            return None, {}
        known = settings_of(decision)
        with self._lock:
            self._plans[plan_id] = known
            while len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        return known


def _name(one: Observation) -> _Name:
    return one.job_id, one.node, one.plan_id


def settings_of(decision: Decision) -> _Known:
    """Key and stated settings of a decision's workload; a job without model has no key."""
    names = {entry.name for entry in dataclasses.fields(Request)}
    given: dict[str, Any] = {k: v for k, v in decision.request.items() if k in names}
    nodes = decision.options.get("min_nodes")
    gpus = (decision.plan.gpus if decision.plan else 0) * (nodes if isinstance(nodes, int) else 1)
    workload = workload_of(Request(**given), gpus)
    if workload is None:
        return None, {}
    return key_of(workload), stated(workload)


def _checked(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Known figures within what a machine can say; unknown ones come from a newer node."""
    found: dict[str, Any] = {}
    for name, most in FIGURES.items():
        value = figures.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 <= value <= most:
            raise UsageError(f"{name} is {str(value)[:40]}; it must be from 0 to {most:g}")
        found[name] = round(value) if name in _WHOLE else float(value)
    return found
