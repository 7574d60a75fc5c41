"""What the cache holds: free space, each job's folders as counted last, what the trash gives back.

The figures behind eviction and quota. Looks only; sets nothing aside and removes nothing. A drive
that hangs costs a limited time and an unknown figure.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from crater_slurm.config.cache import Cache as CacheSettings
from crater_slurm.node import mounts, prjquota, safefs, space
from crater_slurm.node.bounded import Bounded

_PATIENCE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Room:
    """How much the cache may hold, and what is free of it; both 0 when there is no cache."""

    total_bytes: int = 0
    free_bytes: int = 0

    @property
    def free_percent(self) -> float:
        return 100 * self.free_bytes / max(1, self.total_bytes)


class Holdings:
    """Figures of one node's cache. Thread-safe."""

    def __init__(self, settings: CacheSettings, mountinfo: Callable[[], str]) -> None:
        self._settings = settings
        self._mountinfo = mountinfo
        self._bounded = Bounded()
        self._measured_bytes = 0
        self._sizes: dict[tuple[str, str, str], int] = {}
        self._trash: dict[str, int] = {}

    def room(self, patience: float = _PATIENCE_SECONDS) -> Room:
        """Size and free space, with what the trash will give back."""
        try:
            if self._settings.require_mount and self._mount() is None:
                return Room()
            return self.room_of(
                self._bounded.call(lambda: os.statvfs(self._settings.mount_point), patience)
            )
        except (OSError, TimeoutError):
            return Room()

    def room_of(self, status: os.statvfs_result) -> Room:
        """The room that a file system with these figures has."""
        total, pending = status.f_blocks * status.f_frsize, self.trash_bytes
        free = min(total, status.f_bavail * status.f_frsize + pending)
        if self._settings.size_gb is not None:
            size = self._settings.size_gb * 10**9
            used = self._measured_bytes
            if self._mount():
                used = (status.f_blocks - status.f_bfree) * status.f_frsize
            free, total = min(free, size - max(0, used - pending)), min(total, size)
        return Room(total, max(0, free))

    def measure(self, kinds: Iterable[str]) -> None:
        """Count what the cache holds, where the file system can't tell because it is shared."""
        if self._settings.size_gb is None or self._mount():
            return
        used = 0
        for kind in kinds:
            for folder, _, files in os.walk(self._settings.mount_point / kind):
                for name in files:
                    with contextlib.suppress(OSError):
                        used += os.lstat(f"{folder}/{name}").st_blocks * 512
        self._measured_bytes = used

    def size(self, cluster: str, job_id: str, kind: str) -> int | None:
        """Bytes of a job's folder as counted last; None before the first count."""
        return self._sizes.get((cluster, job_id, kind))

    def count(self, cluster: str, job_id: str, kind: str, budget: space.Budget) -> space.Count:
        """Count what a job's folder holds. Raises OSError and TimeoutError."""

        def work() -> space.Count:
            with self._parent(kind, cluster) as parent:
                return space.count(parent, job_id, budget)

        found = self._bounded.call(work, budget.seconds + _PATIENCE_SECONDS)
        self._sizes[cluster, job_id, kind] = found.bytes
        return found

    def set_aside(self, cluster: str, job_id: str, kind: str, name: str) -> None:
        """A job's folder is in the trash now, under that name: its space will be free soon."""
        size = self._sizes.pop((cluster, job_id, kind), 0)
        if size:
            self._trash[name] = size

    def deleted(self, name: str) -> None:
        """That entry of the trash is gone, or gives nothing back."""
        self._trash.pop(name, None)

    @property
    def trash_bytes(self) -> int:
        """What the trash still holds, as far as it was counted before."""
        return sum(list(self._trash.values()))

    def tag(self, cluster: str, job_id: str, kinds: Iterable[str], project: int) -> None:
        """Give a job's folders a project. Raises OSError."""
        for kind in kinds:
            with self._parent(kind, cluster) as parent, safefs.opened(job_id, parent) as folder:
                prjquota.tag(folder, project)

    def quota_device(self) -> str:
        """Device file of the cache, where its file system holds projects to their limits; empty
        where it does not. Raises OSError."""
        mount = self._mount()
        if mount is None or not prjquota.is_enforced(mount):
            return ""
        return prjquota.device_of(mount, self._settings.mount_point.stat().st_dev)

    def _mount(self) -> mounts.Mount | None:
        return mounts.find_mount(self._settings.mount_point, self._mountinfo())

    @contextlib.contextmanager
    def _parent(self, kind: str, cluster: str) -> Iterator[int]:
        """The folder that holds a cluster's jobs, opened without following a link."""
        with (
            safefs.opened(self._settings.mount_point) as root,
            safefs.opened(kind, root) as above,
            safefs.opened(cluster, above) as parent,
        ):
            yield parent
