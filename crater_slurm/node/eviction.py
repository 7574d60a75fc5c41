"""Makes room in the cache: removes what is safe of ended jobs, oldest first, and nothing else.

Never a running job's, never what its record doesn't call safe, never what no record knows, and
never the only copy of a job that waits to be started again. Removing is renaming into the trash, so
a Prolog can wait for it; the sweep then gives the space back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from crater_slurm.config.cache import Cache as CacheSettings
from crater_slurm.node import checkpoints_state, space
from crater_slurm.node.cache import Cache
from crater_slurm.node.cgroups import Tree
from crater_slurm.node.holdings import Room
from crater_slurm.node.jobs import ENDED, PREPARED, JobRecord, JobStore

_log = logging.getLogger("crater.node.eviction")
#: A Prolog waits no longer than this for room, drive and all.
PROLOG_SECONDS = 0.4
#: The floor is kept in rounds of this length; the next one goes on.
_ROUND_SECONDS = 5.0
#: Of a folder that was never counted no more is looked at before it goes.
_QUICK_ENTRIES = 20_000
_KINDS = ("checkpoint", "dataset", "temp")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder that may go. ``bytes`` is unknown before the first count."""

    record: JobRecord
    kind: str
    bytes: int | None


class Evictor:
    """One per daemon. ``evicted`` counts folders by kind, ``evicted_bytes`` what they held,
    since the start."""

    def __init__(
        self,
        settings: CacheSettings,
        store: JobStore,
        cache: Cache,
        tree: Tree,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._store = store
        self._cache = cache
        self._tree = tree
        self._clock = clock
        self._lock = threading.Lock()
        self.evicted: dict[str, int] = dict.fromkeys(_KINDS, 0)
        self.evicted_bytes = 0

    def keep_floor(self) -> bool:
        """Free what the site wants free at all times; whether anything was set aside."""
        floor, room = self._settings.evict_below_percent, self._cache.holdings.room()
        missing = int(room.total_bytes * floor / 100) - room.free_bytes
        if missing <= 0:
            return False
        why = f"{room.free_percent:.1f} % are free, the floor is {floor:g} %"
        return self._free(missing, why, self._clock() + _ROUND_SECONDS)

    def make_room(self, record: JobRecord, need_bytes: int) -> bool:
        """Free what a job's plan says before it starts; whether anything was set aside."""
        end = self._clock() + PROLOG_SECONDS
        room = self._cache.holdings.room(PROLOG_SECONDS / 2)
        held = sum(self._size(record, kind) or 0 for kind in _KINDS)
        need = max(0, need_bytes - held)
        missing = need + self._promised(record) - room.free_bytes if need else 0
        missing = max(missing, self._below_minimum(room))
        if not room.total_bytes or missing <= 0:
            return False
        why = f"job {record.job_id} needs {need_bytes / 1e9:g} GB of cache"
        return self._free(missing, why, end, starting=record.job_id)

    def candidates(self, starting: str = "") -> list[Candidate]:
        """What may go, in the order in which it goes; nothing of a job that is about to start,
        whose last run may have left what it will restore from."""
        cgroups = self._tree.job_names()
        found = [
            Candidate(record, kind, self._size(record, kind))
            for record in self._store.all()
            for kind in _KINDS
            if record.job_id != starting
            and kind in record.folders
            and self._may_go(record, kind, cgroups)
        ]
        return sorted(found, key=lambda c: (_worth(c), c.record.ended or 0.0))

    def _below_minimum(self, room: Room) -> int:
        """What is missing to the share that must be free before a job gets folders at all."""
        return int(room.total_bytes * self._settings.min_free_percent / 100) - room.free_bytes

    def _promised(self, newcomer: JobRecord) -> int:
        """What running jobs' plans say and they have not written yet."""
        promised = 0
        for record in self._store.all():
            if record.phase == PREPARED and record.job_id != newcomer.job_id and record.folders:
                planned = int((record.plan or {}).get("cache_gb") or 0) * 10**9
                used = sum(self._size(record, kind) or 0 for kind in record.folders)
                promised += max(0, planned - used)
        return promised

    def _free(self, missing: int, why: str, end: float, starting: str = "") -> bool:
        """Set folders aside until so many bytes will come back, or the time is over."""
        done = False
        if not self._lock.acquire(timeout=max(0.0, end - self._clock())):
            return False
        try:
            for candidate in self.candidates(starting):
                left = end - self._clock()
                if missing <= 0 or left <= 0:
                    break
                size = self._counted(candidate, left)
                if size and self._evict(candidate, size, why, end - self._clock()):
                    missing -= size
                    done = True
        finally:
            self._lock.release()
        return done

    def _counted(self, candidate: Candidate, seconds: float) -> int:
        """What a folder holds; one that was never counted is counted now, as far as time goes."""
        if candidate.bytes is not None:
            return candidate.bytes
        record, budget = candidate.record, space.Budget(_QUICK_ENTRIES, min(seconds, 0.1))
        try:
            return self._cache.holdings.count(
                record.cluster, record.job_id, candidate.kind, budget
            ).bytes
        except (OSError, TimeoutError):
            return 0

    def _evict(self, candidate: Candidate, size: int, why: str, seconds: float) -> bool:
        record, kind = candidate.record, candidate.kind
        with self._store.attempt(record.job_id) as alone:
            # Looked at again, now that nobody else works on the job.
            if not alone or self._store.get(record.job_id) is not record:
                return False
            if kind not in record.folders or not self._may_go(record, kind, self._tree.job_names()):
                return False
            patience = max(0.01, min(seconds, 1.0))
            if not self._cache.release(record.cluster, record.job_id, [kind], patience):
                return False
            record.folders = {k: v for k, v in record.folders.items() if k != kind}
            self._store.save(record)
        _log.info("cache: evicted %s of job %s, %.3g GB: %s", kind, record.job_id, size / 1e9, why)
        self.evicted[kind] += 1
        self.evicted_bytes += size
        return True

    def _may_go(self, record: JobRecord, kind: str, cgroups: set[str]) -> bool:
        # A job whose Prolog found no daemon runs on, whatever its old record says.
        if record.phase != ENDED or cgroups & set(record.cgroup_names):
            return False
        if kind != "checkpoint":
            return True
        known = record.checkpoints
        only_copy = not known.get("destination")
        waits = known.get("requeue") and only_copy
        return checkpoints_state.safe_to_remove(record) and not waits

    def _size(self, record: JobRecord, kind: str) -> int | None:
        return self._cache.holdings.size(record.cluster, record.job_id, kind)


def _worth(candidate: Candidate) -> int:
    """Checkpoints with a copy at their destination go first, those without one last."""
    if candidate.kind != "checkpoint":
        return 1
    return 0 if candidate.record.checkpoints.get("destination") else 2
