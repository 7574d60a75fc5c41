"""Holds jobs and users to their space in the cache, and says so to whoever goes beyond it.

Where the cache's file system has project quota the kernel holds a job to its limit; everywhere the
daemon counts, now and then and at bounded cost, also because a user can change his files' project.
Nothing is ever deleted for it: a job beyond its limit is told, and saves no more checkpoints.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from crater_slurm.config.cache import Cache as CacheSettings
from crater_slurm.node import prjquota, space
from crater_slurm.node.bounded import Bounded
from crater_slurm.node.holdings import Holdings
from crater_slurm.node.jobs import PREPARED, JobRecord, JobStore

_log = logging.getLogger("crater.node.quota")
#: A Prolog waits this long for the quota; then the job is held by accounting.
_PATIENCE_SECONDS = 0.3
#: How many project ids are tried for a job.
_TRIES = 64
#: Where the kernel counts, files are counted by hand only so often, to notice changed numbers.
_BY_HAND_EVERY = 10
#: A write that did not fit leaves a little free.
_FULL = 0.99
#: A limit of 0 would be none.
_LEAST = 4096

PROJECT, ACCOUNTING = "project", "accounting"


@dataclass(frozen=True, slots=True)
class Change:
    """A job that went beyond its space, or came back; ``text`` is empty then."""

    record: JobRecord
    text: str


class Quotas:
    """One per daemon. ``exceeded`` counts how often a job went beyond its or its user's limit."""

    def __init__(self, settings: CacheSettings, store: JobStore, holdings: Holdings) -> None:
        self._settings = settings
        self._store = store
        self._holdings = holdings
        self._bounded = Bounded()
        self._lock = threading.Lock()
        self._round = itertools.count()
        self._next_job = ""
        self._problem = ""
        self.exceeded = 0

    def begin(self, record: JobRecord, before: JobRecord | None = None) -> None:
        """Set the limits of a job whose folders were just made; never raises.

        ``before`` is the record of an earlier run, whose checkpoints may be there still.
        """
        record.quota = {}
        if self._settings.quota == "off" or not record.folders:
            return
        record.quota = {"by": ACCOUNTING, "limit_bytes": self._limit(record), "used_bytes": 0}
        known = _number(before, "project") if before else 0
        if self._settings.quota == "auto":
            with self._lock:
                self._attempt(lambda: self._give_project(record, known))
        self._judge(record, self._by_user())

    def end(self, record: JobRecord) -> None:
        """Give a job's project id back once its folders are gone. Safe twice; never raises."""
        project = _number(record, "project")
        if not project or record.folders:
            return

        def work() -> None:
            device = self._holdings.quota_device()
            if device:
                prjquota.limit(device, project, 0)
            record.quota = {**record.quota, "project": 0}

        self._attempt(work)

    def allowance(self, record: JobRecord) -> int:
        """Bytes that a job's checkpoints may hold beside its other folders; 0 is no limit."""
        hard = self._hard(record, self._by_user()) if record.quota else 0
        others = (self._size(record, kind) or 0 for kind in record.folders if kind != "checkpoint")
        return max(_LEAST, hard - sum(others)) if hard else 0

    def count(self, budget: space.Budget | None = None) -> list[Change]:
        """Count what jobs hold; those that went beyond their limit, or came back under it.

        A round that runs out of its budget goes on where it stopped.
        """
        budget = budget or space.Budget()
        if self._settings.quota == "off":
            return []
        by_hand = next(self._round) % _BY_HAND_EVERY == 0
        for record in self._in_turn():
            if budget.spent:
                self._next_job = record.job_id
                break
            self._count(record, budget, by_hand=by_hand)
        changes, by_user = [], self._by_user()
        for record in self._store.all():
            was = record.quota.get("exceeded", "")
            text = self._judge(record, by_user)
            self._attempt_limit(record, by_user)
            if bool(was) != bool(text):
                self.exceeded += bool(text)
                changes.append(Change(record, text))
        return changes

    def _limit(self, record: JobRecord) -> int:
        planned = (record.plan or {}).get("cache_gb")
        return int(planned or self._settings.job_quota_gb or 0) * 10**9

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do what the file system may refuse; each reason is logged once."""
        try:
            self._bounded.call(work, _PATIENCE_SECONDS)
            return
        except OSError as error:
            problem = error.strerror or str(error)
        except TimeoutError:
            problem = "the cache does not answer"
        if problem != self._problem:
            self._problem = problem
            _log.warning("quota: couldn't use project quota: %s; held by accounting", problem)

    def _give_project(self, record: JobRecord, known: int) -> None:
        device = self._holdings.quota_device()
        if not device:
            return
        project = self._choose(device, record.job_id, known)
        if project is None:
            _log.warning("quota: no project id is free for job %s", record.job_id)
            return
        self._holdings.tag(record.cluster, record.job_id, record.folders, project)
        hard = self._hard(record, self._by_user())
        prjquota.limit(device, project, hard)
        record.quota |= {"by": PROJECT, "project": project, "hard_bytes": hard}

    def _hard(self, record: JobRecord, by_user: dict[int, int]) -> int:
        """What the kernel holds a job to: its limit, and no more than its user has left."""
        limit = _number(record, "limit_bytes")
        if self._settings.user_quota_gb is None:
            return limit
        left = self._settings.user_quota_gb * 10**9 - by_user.get(record.uid, 0)
        most = max(_LEAST, _number(record, "used_bytes") + left)
        return min(limit, most) if limit else most

    def _attempt_limit(self, record: JobRecord, by_user: dict[int, int]) -> None:
        """Follow what the user has left, where the kernel holds the job."""
        project, before = _number(record, "project"), _number(record, "hard_bytes")
        hard = self._hard(record, by_user)
        if not project or not record.folders or abs(hard - before) <= before // 100:
            return

        def work() -> None:
            device = self._holdings.quota_device()
            if device:
                prjquota.limit(device, project, hard)
                record.quota = {**record.quota, "hard_bytes": hard}

        self._attempt(work)

    def _choose(self, device: str, job_id: str, known: int) -> int | None:
        """A project id of no other job that nobody else uses: the job's own where that goes."""
        ids = self._settings.projects
        taken = {
            _number(record, "project") for record in self._store.all() if record.job_id != job_id
        }
        if known in ids and known not in taken:
            return known
        start = int(job_id) if job_id.isdecimal() else 0
        for step in range(min(_TRIES, len(ids))):
            project = ids[(start + step) % len(ids)]
            if project not in taken and prjquota.held(device, project).unused:
                return project
        return None

    def _in_turn(self) -> Iterator[JobRecord]:
        """Jobs with folders, from the one on where the last round stopped."""
        records = [r for r in self._store.all() if r.folders and r.quota]
        records.sort(key=lambda r: (r.job_id < self._next_job, r.job_id))
        self._next_job = ""
        yield from records

    def _count(self, record: JobRecord, budget: space.Budget, *, by_hand: bool) -> None:
        project, used = _number(record, "project"), 0
        if project:
            found: list[int] = []
            self._attempt(lambda: found.append(self._held(project)))
            used = found[0] if found else 0
        # What the kernel counts needs no hand, and an ended job's folders are at rest.
        at_rest = record.quota.get("final") if record.phase != PREPARED else bool(used)
        for kind in record.folders:
            if by_hand or not at_rest or self._size(record, kind) is None:
                self._count_folder(record, kind, budget)
        counted = sum(self._size(record, kind) or 0 for kind in record.folders)
        record.quota = {
            **record.quota,
            "used_bytes": max(used, counted),
            "final": record.phase != PREPARED,
        }

    def _count_folder(self, record: JobRecord, kind: str, budget: space.Budget) -> None:
        try:
            self._holdings.count(record.cluster, record.job_id, kind, budget)
        except (OSError, TimeoutError) as error:
            _log.info("quota: couldn't count %s of job %s: %s", kind, record.job_id, error)

    def _held(self, project: int) -> int:
        device = self._holdings.quota_device()
        return prjquota.held(device, project).used_bytes if device else 0

    def _size(self, record: JobRecord, kind: str) -> int | None:
        return self._holdings.size(record.cluster, record.job_id, kind)

    def _by_user(self) -> dict[int, int]:
        """Bytes that each user's jobs hold together."""
        found: dict[int, int] = {}
        for record in self._store.all():
            if record.folders:
                used = _number(record, "used_bytes")
                found[record.uid] = found.get(record.uid, 0) + used
        return found

    def _judge(self, record: JobRecord, by_user: dict[int, int]) -> str:
        """Note whether a job is beyond its space, or its user beyond his; the reason."""
        quota: dict[str, Any] = record.quota
        if not quota or not record.folders or record.phase != PREPARED:
            return str(quota.get("exceeded", "")) if quota else ""
        used, limit = _number(record, "used_bytes"), _number(record, "limit_bytes")
        most = limit * _FULL if quota.get("by") == PROJECT else limit
        user_limit = (self._settings.user_quota_gb or 0) * 10**9
        text = ""
        if limit and used > most:
            text = f"it holds {_gb(used)} in the local cache, its limit is {_gb(limit)}"
        elif user_limit and by_user.get(record.uid, 0) > user_limit * _FULL:
            text = (
                f"all jobs of its user hold {_gb(by_user[record.uid])} in the local cache, "
                f"the limit is {_gb(user_limit)}"
            )
        record.quota = {**quota, "exceeded": text}
        return text


def _number(record: JobRecord, key: str) -> int:
    value = record.quota.get(key, 0)
    return value if type(value) is int else 0


def _gb(amount: int) -> str:
    return f"{amount / 1e9:.3g} GB"


def described(record: JobRecord) -> dict[str, str]:
    """What ``crater explain`` shows of a job's space."""
    quota = record.quota
    if not quota:
        return {}
    limit = _number(record, "limit_bytes")
    by = "project quota" if quota.get("by") == PROJECT else "accounting"
    found = {"cache_limit": f"{_gb(limit)}, by {by}"} if limit else {}
    if _number(record, "used_bytes"):
        found["cache_used"] = _gb(_number(record, "used_bytes"))
    if quota.get("exceeded"):
        found["cache_exceeded"] = str(quota["exceeded"])
    return found
