"""Private cache folders of jobs on the node's NVMe: made at Prolog, set aside at Epilog.

    <mount>/<checkpoint|dataset|temp>/<cluster>/<job id>    owner: the job's user, mode 0700

Removing is renaming into a trash folder of root's, at once however much there is; a thread
deletes from there. Whatever is wrong with the cache, the job runs, without it and told so.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from crater_slurm.config.cache import Cache as CacheSettings
from crater_slurm.node import mounts, safefs
from crater_slurm.node.bounded import Bounded
from crater_slurm.node.holdings import Holdings

_log = logging.getLogger("crater.node.cache")

KINDS = ("checkpoint", "dataset", "temp")
TRASH = ".crater-trash"
MISSING = "cache_missing"
READ_ONLY = "cache_read_only"
#: Less than the hooks' deadline, so that a job learns why it has no cache.
_PATIENCE_SECONDS = 1.0
_MOUNT_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Folders:
    """A job's folders by kind; without them ``problem`` says why, ``fault`` if it is the node's."""

    paths: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    fault: str = ""


class CacheProblemError(Exception):
    """No cache for now; ``fault`` names a fault of the node, empty for a full cache."""

    def __init__(self, text: str, fault: str = "") -> None:
        super().__init__(text)
        self.fault = fault


class Cache:
    """The cache of one node. Thread-safe; no call takes longer than about a second."""

    def __init__(
        self, settings: CacheSettings, mountinfo: Callable[[], str] = mounts.read_mountinfo
    ) -> None:
        mounts.check_device_name(settings.device)
        self._settings = settings
        self._mountinfo = mountinfo
        self._bounded = Bounded()
        self._serial = itertools.count()
        self._mount_tried = -_MOUNT_RETRY_SECONDS
        self.holdings = Holdings(settings, mountinfo)
        self._stuck: set[str] = set()
        self._sweeping = threading.Lock()

    def prepare(
        self, cluster: str, job_id: str, uid: int, gid: int, keep: Iterable[str] = ()
    ) -> Folders:
        """Folders of a job, empty but for the kinds in ``keep``; never raises.

        ``cluster`` and ``job_id`` are plain names. A kept folder must be the user's own.
        """
        try:
            paths = self._bounded.call(
                lambda: self._prepare(cluster, job_id, uid, gid, frozenset(keep)), _PATIENCE_SECONDS
            )
            return Folders(paths)
        except CacheProblemError as error:
            return Folders(problem=str(error), fault=error.fault)
        except TimeoutError:
            return Folders(problem="the cache does not answer", fault=MISSING)
        except safefs.UnsafeError as error:
            return Folders(problem=f"couldn't {error}")
        except OSError as error:
            return Folders(problem=f"the cache can't be written: {error.strerror}")

    def release(
        self,
        cluster: str,
        job_id: str,
        kinds: Iterable[str] = KINDS,
        patience: float = _PATIENCE_SECONDS,
    ) -> bool:
        """Set a job's folders aside; False when that has to be tried again. Never raises."""
        try:
            return self._bounded.call(
                lambda: self._release(cluster, job_id, tuple(kinds)), patience
            )
        except (OSError, TimeoutError, safefs.UnsafeError, CacheProblemError) as error:
            _log.warning("cache: couldn't remove the folders of job %s: %s", job_id, error)
            return False

    def free_gb(self) -> float:
        """GB (10^9 bytes) that are free for users, 0 when there is no cache."""
        return self.holdings.room().free_bytes / 1e9

    def device_number(self) -> int | None:
        """The device that holds the cache, as the kernel numbers it; None when there is none."""
        point = self._settings.mount_point
        try:
            return self._bounded.call(lambda: point.stat().st_dev, _PATIENCE_SECONDS)
        except (OSError, TimeoutError):
            return None

    def ensure_mounted(self) -> None:
        """Mount the configured device when nothing is mounted; tried at most once a minute."""
        device, point = self._settings.device, self._settings.mount_point
        if not device or mounts.find_mount(point, self._mountinfo()):
            return
        if time.monotonic() - self._mount_tried < _MOUNT_RETRY_SECONDS:
            return
        self._mount_tried = time.monotonic()
        try:
            _log.info("cache: %s", mounts.mount_device(device, point))
        except (mounts.MountError, OSError) as error:
            _log.warning("cache: couldn't %s", error)

    def measure(self) -> None:
        """Count what the cache holds, where the file system can't tell because it is shared."""
        self.holdings.measure(KINDS)

    def sweep(self) -> None:
        """Delete what is in the trash. May take long; only one sweep runs at a time."""
        with self._sweeping:
            try:
                self._check_mount()
                with (
                    safefs.opened(self._settings.mount_point) as root,
                    safefs.parent_folder(root, TRASH, 0o700) as trash,
                ):
                    while self._sweep_once(trash):
                        pass
            except (OSError, safefs.UnsafeError, CacheProblemError) as error:
                _log.info("cache: couldn't sweep the trash: %s", error)

    def _sweep_once(self, trash: int) -> bool:
        """One pass; whether another may find more (a deep tree was moved up)."""
        progress = False
        for name in os.listdir(trash):
            try:
                whole = safefs.remove_tree(trash, name)
                reason = "another file system is mounted inside"
            except OSError as error:
                whole, reason = False, str(error.strerror)
            if whole:
                self.holdings.deleted(name)
                self._stuck.discard(name)
                progress = True
            elif name not in self._stuck:
                self.holdings.deleted(name)
                self._stuck.add(name)
                _log.warning("cache: couldn't delete %s in the trash: %s", name, reason)
        return progress and bool(set(os.listdir(trash)) - self._stuck)

    def _check_mount(self) -> None:
        point = self._settings.mount_point
        mount = mounts.find_mount(point, self._mountinfo())
        if mount is None and self._settings.require_mount:
            raise CacheProblemError(f"nothing is mounted at {point}", MISSING)
        if mount is not None and mount.read_only:
            raise CacheProblemError(f"the cache at {point} is read-only", READ_ONLY)

    def _check_room(self, root: int) -> None:
        status = os.statvfs(root)
        room, size_gb = self.holdings.room_of(status), self._settings.size_gb
        drive = 100 * (status.f_bavail * status.f_frsize + self.holdings.trash_bytes)
        free_percent = drive / max(1, status.f_blocks * status.f_frsize)
        if free_percent < self._settings.min_free_percent:
            raise CacheProblemError(f"the cache is full, {free_percent:.1f} % are free")
        if size_gb is not None and room.free_bytes == 0:
            raise CacheProblemError(f"the cache holds its {size_gb} GB already")

    def _check_root(self, root: int) -> None:
        status = os.fstat(root)
        if stat.S_IMODE(status.st_mode) & 0o022 or status.st_uid not in (0, os.geteuid()):
            raise CacheProblemError(
                f"others than root can write to {self._settings.mount_point}; chmod 0711 it"
            )

    def _prepare(
        self, cluster: str, job_id: str, uid: int, gid: int, keep: frozenset[str]
    ) -> dict[str, str]:
        self._check_mount()
        try:
            with safefs.opened(self._settings.mount_point) as root:
                self._check_root(root)
                with safefs.parent_folder(root, TRASH, 0o700) as trash:
                    for kind in KINDS:
                        with (
                            safefs.parent_folder(root, kind) as above,
                            safefs.parent_folder(above, cluster) as parent,
                        ):
                            kept = kind in keep and safefs.is_private_folder(parent, job_id, uid)
                            if not kept:
                                self._set_aside(parent, trash, kind, cluster, job_id)
                    self._check_room(root)
                    for kind in KINDS:
                        with (
                            safefs.parent_folder(root, kind) as above,
                            safefs.parent_folder(above, cluster) as parent,
                        ):
                            if not safefs.is_private_folder(parent, job_id, uid):
                                safefs.make_private(parent, job_id, uid, gid)
        except FileNotFoundError as error:
            raise CacheProblemError(
                f"there is no folder {self._settings.mount_point}", MISSING
            ) from error
        base = self._settings.mount_point
        return {kind: str(base / kind / cluster / job_id) for kind in KINDS}

    def _release(self, cluster: str, job_id: str, kinds: tuple[str, ...]) -> bool:
        self._check_mount()
        with safefs.opened(self._settings.mount_point) as root:
            self._check_root(root)
            with safefs.parent_folder(root, TRASH, 0o700) as trash:
                for kind in kinds:
                    with (
                        contextlib.suppress(FileNotFoundError),
                        safefs.opened(kind, root) as above,
                        safefs.opened(cluster, above) as parent,
                    ):
                        self._set_aside(parent, trash, kind, cluster, job_id)
        return True

    def _set_aside(self, parent: int, trash: int, kind: str, cluster: str, job_id: str) -> None:
        if safefs.exists(parent, job_id):
            name = f"{kind}.{cluster}.{job_id}.{time.time_ns()}.{next(self._serial)}"
            os.rename(job_id, name, src_dir_fd=parent, dst_dir_fd=trash)
            self.holdings.set_aside(cluster, job_id, kind, name)
