"""Removes what dead jobs left and no record knows: folders in the cache, sockets of dead workers.

Records get lost (a reinstalled node, a full disk), jobs run on without them. So Slurm is asked
which jobs live, and any doubt about its answer ends the sweep with nothing removed. Checkpoints are
never removed here: what holds a saved part is kept and reported.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.config.cache import Cache as CacheSettings
from crater_slurm.errors import SlurmError
from crater_slurm.job import layout
from crater_slurm.node import safefs
from crater_slurm.node.cache import KINDS, Cache
from crater_slurm.node.cgroups import Tree
from crater_slurm.node.jobs import PREPARED, JobStore
from crater_slurm.slurm import live
from crater_slurm.slurm.live import Live

_log = logging.getLogger("crater.node.leftovers")
_JOB = re.compile(r"[1-9][0-9]{0,11}\Z")
#: Of a folder with more entries than this the rest is not looked at: it is kept.
_MOST_ENTRIES = 10_000
_HOUR = 3600.0
#: What is kept is said again after a day.
_SAY_AGAIN_SECONDS = 24 * _HOUR


@dataclass(frozen=True, slots=True, order=True)
class Leftover:
    """A folder of no record; ``age_seconds`` since its last change of any sort."""

    cluster: str
    job_id: str
    kind: str
    age_seconds: float


class Leftovers:
    """One per daemon; ``sweep`` is to be called from one thread.

    ``kept`` are the folders with checkpoints that the last sweep left for an admin, ``removed``
    counts folders since the start.
    """

    def __init__(
        self,
        settings: CacheSettings,
        store: JobStore,
        cache: Cache,
        tree: Tree,
        ask: Callable[[], Live],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._store = store
        self._cache = cache
        self._tree = tree
        self._ask = ask
        self._clock = clock
        self._said: dict[str, float] = {}
        self.kept: tuple[Leftover, ...] = ()
        self.removed = 0

    def sweep(self) -> bool:
        """One sweep; whether anything was set aside. Never raises for what it meets."""
        try:
            found = [one for one in self.find() if self._is_old(one)]
        except (OSError, safefs.UnsafeError) as error:
            _log.info("leftovers: couldn't look at the cache: %s", error)
            return False
        if not found:
            self.kept = ()
            return False
        answer = self._living()
        if answer is None:
            return False
        kept: list[Leftover] = []
        cgroups, before = self._tree.job_names(), self.removed
        for one in found:
            if one.cluster != answer.cluster:
                self._say(one, f"it is of cluster {one.cluster}, Slurm here of {answer.cluster}")
            elif one.job_id not in answer.job_ids and f"job_{one.job_id}" not in cgroups:
                self._remove(one, kept)
        self.kept = tuple(kept)
        return self.removed > before

    def find(self) -> list[Leftover]:
        """Folders of no record. Raises OSError."""
        found = []
        with safefs.opened(self._settings.mount_point) as root:
            for kind in KINDS:
                for cluster, parent in _folders(root, kind):
                    for name in _names(parent):
                        age = self._age(parent, name)
                        if _JOB.match(name) and age is not None and not self._store.get(name):
                            found.append(Leftover(cluster, name, kind, age))
        return sorted(found)

    def _age(self, parent: int, name: str) -> float | None:
        """Seconds since a folder's last change; None for what is no folder of this mount.

        By ctime, which nobody can set: a folder from the future would be kept for ever.
        """
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode) or status.st_dev != os.fstat(parent).st_dev:
                return None
        except OSError:
            return None
        return max(0.0, self._clock() - status.st_ctime)

    def _is_old(self, one: Leftover) -> bool:
        return one.age_seconds >= self._settings.leftover_hours * _HOUR

    def _living(self) -> Live | None:
        """The jobs that live; None, with a log line, when that can't be known."""
        try:
            answer = self._ask()
        except SlurmError as error:
            _log.warning("leftovers: nothing is removed: can't know which jobs live: %s", error)
            return None
        running = frozenset(
            record.job_id
            for record in self._store.all()
            if record.phase == PREPARED and record.cluster == answer.cluster
        )
        settled = self._settings.leftover_hours * _HOUR
        why = live.doubt(answer, running, self._clock(), settled)
        if why:
            _log.warning("leftovers: nothing is removed: %s", why)
            return None
        return answer

    def _remove(self, one: Leftover, kept: list[Leftover]) -> None:
        with self._store.attempt(one.job_id) as alone:
            if not alone or self._store.get(one.job_id) is not None:
                return
            if one.kind == "checkpoint" and self._has_parts(one):
                kept.append(one)
                self._say(one, "it holds checkpoints, and no record says that they are flushed")
                return
            if self._cache.release(one.cluster, one.job_id, [one.kind]):
                self.removed += 1
                hours = one.age_seconds / _HOUR
                _log.info(
                    "leftovers: removed %s of job %s, unchanged for %.0f h: Slurm knows no such "
                    "job", one.kind, one.job_id, hours,
                )  # fmt: skip

    def _has_parts(self, one: Leftover) -> bool:
        """Whether a folder holds a saved part of any step; what can't be looked at counts so."""
        try:
            with safefs.opened(self._settings.mount_point) as root:
                for cluster, parent in _folders(root, one.kind):
                    if cluster == one.cluster:
                        with safefs.opened(one.job_id, parent) as folder:
                            return _holds_a_part(folder)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def _say(self, one: Leftover, why: str) -> None:
        name, now = f"{one.kind}/{one.cluster}/{one.job_id}", self._clock()
        if now - self._said.get(name, -_SAY_AGAIN_SECONDS) >= _SAY_AGAIN_SECONDS:
            self._said[name] = now
            _log.warning("leftovers: %s of no record is kept: %s", name, why)


def _names(fd: int) -> list[str]:
    with os.scandir(fd) as entries:
        return sorted(entry.name for entry in entries)


def _folders(root: int, kind: str) -> Iterator[tuple[str, int]]:
    """Each cluster's folder of a kind, with its name, open while it is looked at."""
    with contextlib.ExitStack() as stack:
        try:
            above = stack.enter_context(safefs.opened(kind, root))
        except FileNotFoundError:
            return
        for cluster in _names(above):
            with contextlib.suppress(NotADirectoryError), safefs.opened(cluster, above) as parent:
                yield cluster, parent


def _holds_a_part(folder: int) -> bool:
    home, seen = safefs.mount_id(folder), 0
    for step in _names(folder):
        if layout.parse_step_name(step) is None and not layout.is_partial(step):
            continue
        with contextlib.suppress(NotADirectoryError), safefs.opened(step, folder) as inside:
            if safefs.mount_id(inside) != home:
                return True
            names = _names(inside)
            seen += len(names)
            if seen > _MOST_ENTRIES or any(layout.is_part(name) for name in names):
                return True
    return False


def remove_dead_sockets(folder: Path, store: JobStore) -> list[str]:
    """Remove the sockets of workers that are gone and of no job that we know; their names.

    Those of known jobs are the workers' own matter: a question here would disturb them."""
    removed = []
    try:
        names = sorted(path.name for path in folder.iterdir() if path.suffix == ".sock")
    except OSError:
        return []
    for name in names:
        job_id, path = name.removesuffix(".sock"), folder / name
        with store.attempt(job_id) as alone:
            if not alone or store.get(job_id) is not None:
                continue
            if _is_dead(path):
                path.unlink(missing_ok=True)
                removed.append(name)
    return removed


def _is_dead(path: Path) -> bool:
    """Whether nobody listens on a socket; in doubt somebody does."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(1)
            connection.connect(str(path))
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False
