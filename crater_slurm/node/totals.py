"""Counters of all workers together, which only grow, from what each worker says of itself.

A worker runs as its job's user, begins again at zero when it is replaced, and vanishes when its
job is done. What it says is added up by its steps forward; a step that no hardware could take is
not believed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from crater_slurm.node.jobs import JobRecord

#: What workers count (docs/checkpoint-format.md): seconds, bytes, and things.
NAMES = (
    *("saved", "failed", "direct", "drained_bytes", "drain_seconds"),
    *("flushed", "flushed_bytes", "flush_seconds"),
    *("restored", "restored_bytes", "restore_seconds", "cache_hits", "cache_misses"),
    *("staged_hits", "staged_misses"),
)
#: More than this a second is a lie; also more seconds than a worker's threads could work.
_MOST_PER_SECOND = {"bytes": 1e12, "seconds": 1e3}
_MOST_EVENTS_PER_SECOND = 1e5
#: After this long without a look a step may be as large as it likes, within these bounds.
_LONGEST_SECONDS = 86_400.0
_MOST_PENDING = 4096


@dataclass(slots=True)
class _Seen:
    time: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Pending:
    """What lies in the cache and is not at its destination yet."""

    bytes: int = 0
    steps: int = 0
    oldest_seconds: float = 0.0


class Totals:
    """``see`` is called now and then with all records. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}
        self._waiting: dict[tuple[str, str, int, str], float] = {}
        self._totals = dict.fromkeys(NAMES, 0.0)
        self._pending = Pending()

    def see(self, records: Iterable[JobRecord]) -> None:
        """Add what the workers of these jobs did since the last time; forget all other jobs."""
        with self._lock:
            now, pending = self._clock(), 0
            runs: set[str] = set()
            waiting: dict[tuple[str, str, int, str], float] = {}
            for record in records:
                if not record.checkpoints:
                    continue
                runs.add(record.run)
                self._add(record, now)
                for key, size in _unflushed(record):
                    if len(waiting) < _MOST_PENDING:
                        waiting[key] = self._waiting.get(key, now)
                        pending += size
            self._seen = {run: seen for run, seen in self._seen.items() if run in runs}
            self._waiting = waiting
            oldest = now - min(waiting.values(), default=now)
            self._pending = Pending(pending, len(waiting), oldest)

    def get(self) -> dict[str, float]:
        """The totals by name."""
        with self._lock:
            return dict(self._totals)

    @property
    def pending(self) -> Pending:
        return self._pending

    def _add(self, record: JobRecord, now: float) -> None:
        told = record.checkpoints.get("counters")
        values = {
            name: float(value)
            for name, value in (told if isinstance(told, dict) else {}).items()
            if name in self._totals and type(value) in (int, float) and 0 <= value < 1e19
        }
        before = self._seen.get(record.run) or _Seen(now - _LONGEST_SECONDS, {})
        seconds = min(_LONGEST_SECONDS, max(1.0, now - before.time))
        for name, value in values.items():
            was = before.values.get(name, 0.0)
            step = value - was if value >= was else value
            most = _MOST_PER_SECOND.get(name.rpartition("_")[2], _MOST_EVENTS_PER_SECOND)
            if step <= most * seconds:
                self._totals[name] += step
        self._seen[record.run] = _Seen(now, before.values | values)


def _unflushed(record: JobRecord) -> Iterable[tuple[tuple[str, str, int, str], int]]:
    """Each step that waits for its destination, with its bytes."""
    if record.checkpoints.get("destination"):
        for step in record.checkpoints.get("steps", ()):
            if not step["flushed"] and step["local"]:
                yield (record.job_id, step["name"], step["step"], step["run"]), step["bytes"]
