"""What keeps the node's cache in order, put together: room, quota, leftovers, and who is told.

The hooks call ``make_room``, ``begin`` and ``end``, each within its time; all else happens in
``round``, in a thread that a dying drive may hold without holding anybody else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from crater_slurm.config.settings import Settings
from crater_slurm.node.cache import Cache
from crater_slurm.node.cgroups import Tree
from crater_slurm.node.eviction import Evictor
from crater_slurm.node.holdings import Room
from crater_slurm.node.jobs import PREPARED, JobRecord, JobStore
from crater_slurm.node.leftovers import Leftovers, remove_dead_sockets
from crater_slurm.node.notices import Notices, sender
from crater_slurm.node.quota import Change, Quotas
from crater_slurm.node.totals import Totals
from crater_slurm.slurm import live
from crater_slurm.slurm.client import Client

_log = logging.getLogger("crater.node.cache_life")
_LEFTOVER_SECONDS = 3600.0
#: A round is at most this far away, however seldom jobs are counted.
LONGEST_SECONDS = 30.0

#: A hundredth more or less is not worth a message.
_MUCH = 100

Told = Callable[[JobRecord, str], None]


def ask_slurm(settings: Settings) -> Callable[[], live.Live]:
    """Asks slurmctld which jobs live."""
    slurm = settings.slurm
    client = Client(bin_dir=slurm.bin_dir, conf=slurm.conf, timeout_seconds=slurm.timeout_seconds)
    return lambda: live.ask(client)


class CacheLife:
    """One per daemon. ``wake`` is called when something was set aside and is to be deleted;
    ``on_quota`` when a job went beyond its space or came back, with the reason or nothing;
    ``on_allowance`` when what its checkpoints may hold has changed by much.
    ``room`` is that of the last round, ``direct_writers`` counts jobs that were told."""

    def __init__(
        self,
        settings: Settings,
        store: JobStore,
        cache: Cache,
        tree: Tree,
        ask: Callable[[], live.Live] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._store = store
        self._holdings = cache.holdings
        self._clock = clock
        self._sockets = settings.node.socket.parent / "workers"
        self.notices = Notices(sender(settings.slurm))
        self.quotas = Quotas(settings.node.cache, store, cache.holdings)
        self.evictor = Evictor(settings.node.cache, store, cache, tree)
        self.leftovers = Leftovers(
            settings.node.cache, store, cache, tree, ask or ask_slurm(settings), clock
        )
        self.totals = Totals()
        self.room = Room()
        self.direct_writers = 0
        self.wake: Callable[[], None] = lambda: None
        self.on_quota: list[Told] = []
        self.on_allowance: Callable[[str, int], None] = lambda job_id, quota_bytes: None
        self._allowed: dict[str, int] = {}
        self._due = {"count": 0.0, "leftovers": 0.0}

    @property
    def seconds(self) -> float:
        """How often ``round`` is to be called."""
        return min(LONGEST_SECONDS, self._settings.node.cache.account_seconds)

    def make_room(self, record: JobRecord) -> None:
        """Before a job's folders are made: evict what its plan needs room for."""
        planned = int((record.plan or {}).get("cache_gb") or 0) * 10**9
        if self.evictor.make_room(record, planned):
            self.wake()

    def begin(self, record: JobRecord, before: JobRecord | None) -> None:
        """After a job's folders were made, and before its record is saved."""
        self.quotas.begin(record, before)

    def end(self, record: JobRecord) -> None:
        """After folders of an ended job were set aside."""
        self.quotas.end(record)

    def round(self) -> None:
        """Count, tell, evict, and now and then look for leftovers."""
        if self._is_due("count", self._settings.node.cache.account_seconds):
            for change in self.quotas.count():
                self._tell(change)
            self._allow()
        self.totals.see(self._store.all())
        aside = self.evictor.keep_floor()
        self.room = self._holdings.room()
        if self._is_due("leftovers", _LEFTOVER_SECONDS):
            aside = self.leftovers.sweep() or aside
            self._drop_sockets(self._sockets)
        if aside:
            self.wake()

    def held_bytes(self, record: JobRecord) -> int:
        """What a job's folders held at the last count."""
        sizes = (
            self._holdings.size(record.cluster, record.job_id, kind) for kind in record.folders
        )
        counted = sum(size or 0 for size in sizes)
        told = record.quota.get("used_bytes")
        return max(counted, told) if isinstance(told, int) else counted

    def _is_due(self, what: str, seconds: float) -> bool:
        now = self._clock()
        # A clock that was set back must not stop it for long.
        if self._due[what] - seconds <= now < self._due[what]:
            return False
        self._due[what] = now + seconds
        return True

    def _tell(self, change: Change) -> None:
        record, text = change.record, change.text
        with self._store.exclusive(record.job_id):
            if self._store.get(record.job_id) is record:
                self._store.save(record)
        if text:
            _log.warning("quota: job %s: %s", record.job_id, text)
            if record.phase == PREPARED:
                self.notices.tell(
                    record.job_id, f"{text}; no more checkpoints are taken until it holds less"
                )
        for told in self.on_quota:
            told(record, text)

    def _allow(self) -> None:
        before, self._allowed = self._allowed, {}
        for record in self._store.all():
            if record.folders and record.phase == PREPARED:
                now, was = self.quotas.allowance(record), before.get(record.job_id, 0)
                changed = abs(now - was) > was // _MUCH or bool(now) != bool(was)
                self._allowed[record.job_id] = now if changed else was
                if changed:
                    self.on_allowance(record.job_id, now)

    def _drop_sockets(self, folder: Path) -> None:
        for name in remove_dead_sockets(folder, self._store):
            _log.info("leftovers: removed the socket %s of a worker that is gone", name)
