"""Writes decisions, grants and observations to the store from a thread of its own.

A submission never waits for the store: a locked or full database costs the record, with a line
in the log, never the job. What waits is bounded.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from crater_slurm.errors import StoreError
from crater_slurm.model.observation import Observation
from crater_slurm.model.plan import Decision
from crater_slurm.store.records import Grant
from crater_slurm.store.repository import Store

_log = logging.getLogger("crater.scheduler.recorder")

_T = TypeVar("_T")
Record = Decision | Grant | Observation
_MOST_WAITING = 50_000
_RECENT = 512
_RETRY_SECONDS = 2.0
_PRUNE_SECONDS = 6 * 3600.0


class Recorder:
    """Queue and thread. ``recent`` answers for decisions that are not in the store yet."""

    def __init__(self, store: Callable[[], Store], keep_days: int) -> None:
        self._open_store = store
        self._keep_days = keep_days
        self._queue: queue.Queue[Record | None] = queue.Queue(_MOST_WAITING)
        self._recent: dict[str, Decision] = {}
        self._checks: dict[str, str] = {}
        self._lock = threading.Lock()
        self.dropped = 0
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write what waits, for at most a few seconds."""
        self._queue.put(None)
        self._thread.join(timeout=10)

    def add(self, item: Record, check: str | None = None) -> None:
        """Queue a record; never blocks. ``check`` is the nonce by which crater check finds it."""
        if isinstance(item, Decision):
            with self._lock:
                _remember(self._recent, item.id, item)
                if check:
                    _remember(self._checks, check, item.id)
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.dropped += 1

    def decision(self, key: str) -> Decision | None:
        """A decision by its id or check nonce, from memory or the store."""
        with self._lock:
            key = self._checks.get(key, key)
            if found := self._recent.get(key):
                return found
        return self._open_store().decision(key)

    def _run(self) -> None:
        next_prune = 0.0
        waiting: list[Record] = []
        while True:
            try:
                item = self._queue.get(timeout=_RETRY_SECONDS if waiting else None)
            except queue.Empty:
                pass
            else:
                if item is None:
                    self._write(waiting)
                    return
                waiting.append(item)
                while len(waiting) < 500 and not self._queue.empty():
                    following = self._queue.get()
                    if following is None:
                        self._write(waiting)
                        return
                    waiting.append(following)
            if self._write(waiting):
                waiting = []
                if time.monotonic() >= next_prune:
                    next_prune = time.monotonic() + _PRUNE_SECONDS
                    self._prune()
            else:
                self._stop_growing(waiting)

    def _write(self, items: list[Record]) -> bool:
        try:
            store = self._open_store()
            store.save_decisions(i for i in items if isinstance(i, Decision))
            for item in items:
                if isinstance(item, Grant):
                    store.save_grant(item)
            if seen := [i for i in items if isinstance(i, Observation)]:
                store.add_observations(seen)
        except StoreError as error:
            if self.problem != str(error):
                _log.error("decisions can't be written and wait in memory: %s", error)
            self.problem = str(error)
            return False
        except Exception:
            # A record that the store can't hold must not hold up the others for ever.
            if len(items) > 1:
                return all(self._write([item]) for item in items)
            _log.exception("a record can't be written and is dropped")
            self.dropped += len(items)
        self.problem = ""
        return True

    def _prune(self) -> None:
        try:
            self._open_store().prune(self._keep_days, time.time())
        except StoreError as error:
            _log.warning("old decisions can't be removed: %s", error)

    def _stop_growing(self, waiting: list[Record]) -> None:
        if len(waiting) > _MOST_WAITING:
            self.dropped += len(waiting) - _MOST_WAITING
            del waiting[: len(waiting) - _MOST_WAITING]


def _remember(table: dict[str, _T], key: str, value: _T) -> None:
    table[key] = value
    while len(table) > _RECENT:
        table.pop(next(iter(table)))
