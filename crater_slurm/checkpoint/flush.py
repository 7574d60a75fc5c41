"""The flush: brings complete parts of steps from the node's cache to their destination.

The newest step is worth most and goes first, except that one which another node of the job has
brought there already goes before it, so that steps get complete there. A step that a newer complete
one makes needless is skipped. A destination that fails is tried again for as long as the worker
lives; a step counts as flushed only once its manifest has been read back from there.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from crater_slurm.checkpoint import flush_state, order, remote
from crater_slurm.checkpoint.carry import Carrier
from crater_slurm.checkpoint.flush_state import (
    FAILED,
    FLUSHED,
    PENDING,
    RUNNING,
    SKIPPED,
    Note,
    Step,
)
from crater_slurm.checkpoint.remote import cleaning, retry
from crater_slurm.checkpoint.remote.catalogue import Catalogue
from crater_slurm.checkpoint.remote.store import (
    Limiter,
    RemoteError,
    SourceError,
    StoppedError,
    Store,
    Unlimited,
)
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.job import layout

_FIRST_SECONDS = 2.0
_WAITING = (PENDING, RUNNING)

Wait = Callable[[threading.Condition, float | None], object]


def _wait(condition: threading.Condition, seconds: float | None) -> object:
    return condition.wait(seconds)


class Flusher:
    """Flushes one job's parts on one node, in a thread of its own.

    ``on_change`` is told each step whose state changed, from that thread; ``log`` takes a level
    (info, warning, error) and a text. ``store`` and the clock come from tests.
    """

    def __init__(
        self,
        spec: Spec,
        on_change: Callable[[Step], None],
        log: Callable[[str, str], None],
        *,
        limiter: Limiter | None = None,
        store: Store | None = None,
        clock: Callable[[], float] = time.time,
        wait: Wait = _wait,
    ) -> None:
        self._spec = spec
        self._on_change = on_change
        self._log = log
        self._store = store
        self._catalogue: Catalogue | None = None
        self._clock = clock
        self._wait = wait
        self._steps: dict[tuple[str, int, str], Step] = {}
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._failing_since = self._resting_until = 0.0
        self._tidied = False
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._carrier = Carrier(limiter or Unlimited(), self._stop, log, clock)

    # What the worker calls.

    def start(self) -> None:
        """Take up what lies in the cache, and flush from now on."""
        self.scan()
        if self._thread is None and self._spec.remote.url:
            self._thread = threading.Thread(target=self._run, name="crater-flush", daemon=True)
            self._thread.start()

    def stop(self, seconds: float | None = None) -> None:
        """Break off; what is begun is gone on with by the next worker."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)

    def scan(self) -> None:
        """Add the parts of this node that lie in the cache."""
        for folder, part in flush_state.parts_of(self._spec.folder, self._spec.node):
            self.add(folder, part)

    def add(self, folder: str, manifest: layout.Manifest) -> None:
        """A part got its final name. Adding one again does nothing. Of ranks that wrote a step
        without a worker, each has a part of its own: they go as one."""
        if not self._spec.remote.url:
            return
        note = Note.read(folder, manifest.run, self._spec.remote.url)
        step = Step(folder, manifest, note, FLUSHED if note.flushed else PENDING)
        step.done = manifest.size if note.flushed else 0
        with self._changed:
            known = self._steps.get(step.key)
            again = known is not None and known.manifest.time < manifest.time
            if known is not None and not (again and known.manifest.ranks == manifest.ranks):
                more = [f for f in manifest.files if f.rank not in known.manifest.ranks]
                if not more:
                    return
                files = sorted([*known.manifest.files, *more], key=lambda file: file.rank)
                note = Note(manifest.run, note.destination, files=known.note.files)
                step = Step(folder, dataclasses.replace(manifest, files=files), note)
            # Else it was saved again, by a training that was started anew.
            for key in [k for k, s in self._steps.items() if step.takes_over(s)]:
                del self._steps[key]
            self._steps[step.key] = step
            self._changed.notify_all()

    def forget(self, name: str, step: int, run: str) -> None:
        """A part is no longer in the cache."""
        with self._changed:
            found = self._steps.get((name, step, run))
            if found is not None and found.state != RUNNING:
                del self._steps[name, step, run]

    def flush_now(self, step: int | None = None, name: str = "step") -> bool:
        """Try again at once, all that failed; or a step, which then goes first, also where it was
        needless. False: unknown step."""
        with self._changed:
            found = [s for s in self._steps.values() if step is None or s.key[:2] == (name, step)]
            for one in found:
                if one.state == FAILED or (one.state == SKIPPED and step is not None):
                    one.state = PENDING
                if one.state == PENDING:
                    one.error, one.since, one.next_try = "", 0.0, 0.0
                one.urgent = step is not None
            self._resting_until = 0.0
            self._changed.notify_all()
        return bool(found) or step is None

    @property
    def idle(self) -> bool:
        """Whether nothing is left that could still be flushed."""
        with self._changed:
            return not any(step.state in _WAITING for step in self._steps.values())

    def state(self) -> list[dict[str, Any]]:
        """Each step's state, oldest first."""
        with self._changed:
            steps = sorted(self._steps.values(), key=lambda s: (s.manifest.step, s.manifest.time))
            return [step.as_dict() for step in steps]

    def safe(self, name: str, step: int, run: str) -> bool:
        """Whether a part may leave the cache: it is at the destination, or needless there."""
        with self._changed:
            found = self._steps.get((name, step, run))
            return found is not None and found.state in (FLUSHED, SKIPPED)

    def arrived(self, name: str, step: int, run: str) -> bool:
        """Whether a part lies at the destination."""
        with self._changed:
            found = self._steps.get((name, step, run))
            return found is not None and found.state == FLUSHED

    def error(self, name: str, step: int, run: str) -> str:
        """Why a part is not at the destination, with since when and what next; empty if it is."""
        with self._changed:
            found = self._steps.get((name, step, run))
            return str(found.as_dict()["error"]) if found is not None else ""

    def counters(self) -> dict[str, float]:
        """Parts that were brought there since the start, their bytes, and the time it took."""
        with self._changed:
            return dict(self._counters)

    # The thread.

    def _run(self) -> None:
        while not self._stop.is_set():
            if self.turn():
                continue
            with self._changed:
                if self._stop.is_set():
                    return
                rest = self._resting_until - self._clock()
                busy = any(step.state == PENDING for step in self._steps.values())
                if busy and rest <= 0:
                    continue
                self._wait(self._changed, max(0.05, rest) if busy else None)

    def turn(self) -> bool:
        """Flush one step, or fail to; whether there was anything to do now."""
        with self._changed:
            waiting = [s for s in self._steps.values() if s.state == PENDING]
            if not waiting or self._clock() < self._resting_until:
                return False
        step = None
        before = 0
        try:
            store, known = self._ready()
            step, needless = order.choose(waiting, known, self._spec)
            for one in needless:
                self._skip(store, one)
            if step is not None:
                before = step.done = 0
                self._set(step, RUNNING)
                began = self._clock()
                self._carrier.bring(store, step)
                self._recovered()
                self._count(step, self._clock() - began)
                self._set(step, FLUSHED)
                cleaning.clean(store, known, self._spec, step.manifest, self._log)
        except StoppedError:
            if step is not None:
                self._set(step, PENDING)
        except SourceError as error:
            if step is not None and self._steps.get(step.key) is step:
                self._failed_for_good(step, str(error))
        except RemoteError as error:
            self._failed(step, waiting, error, moved=step is not None and step.done > before)
        except Exception as error:  # whatever it was, the next try may go well
            text = f"{self._spec.remote.url}: the flush failed: {type(error).__name__}: {error}"
            self._failed(step, waiting, RemoteError(text), moved=False)
        return True

    def _ready(self) -> tuple[Store, Catalogue]:
        if self._store is None:
            self._store = remote.open_store(self._spec.remote, self._spec.home)
        if self._catalogue is None:
            self._catalogue = Catalogue(self._store)
        if not self._tidied:
            with self._changed:
                steps = list(self._steps.values())
            self._carrier.tidy(self._store, steps)
            self._tidied = True
        return self._store, self._catalogue

    def _skip(self, store: Store, step: Step) -> None:
        """A step that newer ones there make needless stays here only."""
        self._carrier.give_up(store, step)
        self._log(
            "info",
            f"{step.title} is not flushed: newer steps are complete at {store.where}, and "
            f"keep_last {self._spec.keep_last} would remove it at once.",
        )
        self._set(step, SKIPPED)

    # What came of it.

    def _set(self, step: Step, state: str) -> None:
        with self._changed:
            step.state = state
            if state in (FLUSHED, SKIPPED):
                step.error, step.since, step.next_try, step.urgent = "", 0.0, 0.0, False
        self._on_change(step)

    def _count(self, step: Step, seconds: float) -> None:
        with self._changed:
            self._counters["flushed"] += 1
            self._counters["flushed_bytes"] += step.manifest.size
            self._counters["flush_seconds"] += max(0.0, seconds)

    def _recovered(self) -> None:
        if self._failures:
            self._log("info", f"{self._spec.remote.url} works again.")
        self._failures, self._failing_since = 0, 0.0

    def _failed_for_good(self, step: Step | None, text: str) -> None:
        assert step is not None
        step.error = f"{step.title} can't be flushed: {text}"
        step.since, step.next_try, step.urgent = self._clock(), 0.0, False
        self._log("error", step.error)
        self._set(step, FAILED)

    def _failed(
        self, step: Step | None, waiting: list[Step], error: RemoteError, *, moved: bool
    ) -> None:
        now = self._clock()
        self._failures = 1 if moved else self._failures + 1
        self._failing_since = self._failing_since or now
        seconds = retry.MOST_SECONDS
        if not error.lasting:
            seconds = retry.wait_seconds(self._failures, _FIRST_SECONDS, retry.MOST_SECONDS)
        with self._changed:
            self._resting_until = now + seconds
            for one in [step] if step is not None else waiting:
                one.state, one.error, one.urgent = PENDING, str(error), False
                one.since, one.next_try = self._failing_since, now + seconds
        if self._failures in (1, 2) or error.lasting:
            self._log("warning", f"{error} Next try in {seconds:.0f} s.")
        for one in [step] if step is not None else waiting:
            self._on_change(one)
