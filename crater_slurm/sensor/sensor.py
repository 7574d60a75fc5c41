"""Scans, samples and reports this node, in turns that never wait for the scheduler.

A changed profile is spooled until the scheduler has it. Health is of the moment: what could not be
sent is superseded by the next.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from crater_slurm.config.settings import Settings
from crater_slurm.errors import CraterError
from crater_slurm.model.profile import NodeProfile
from crater_slurm.probe.bench.target import target
from crater_slurm.probe.health.latency import LatencyProbe
from crater_slurm.probe.health.sampler import Sampler
from crater_slurm.probe.profile import Scan, scan
from crater_slurm.sensor.metrics import Picture
from crater_slurm.slurm import munge, spool
from crater_slurm.store import profile_file
from crater_slurm.store.codec import profile_to_dict
from crater_slurm.store.health import health_to_dict
from crater_slurm.store.merge import merge

_log = logging.getLogger("crater.probe")
_PATH = "/node/v1/reports"


class Sensor:
    """The loop's state. ``turn`` does what is due; nothing in it raises for what the node does."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        *,
        read: Callable[[str, Path], Scan] = scan,
        deliver: Callable[[str, bytes, str], int] = spool.post,
        credential: Callable[[str], str] = munge.encode,
    ) -> None:
        self._settings = settings
        self._name = name
        self._read = read
        self._url = settings.scheduler.url.rstrip("/") + _PATH
        self._cache_drive = _cache_drive(settings.node.cache.mount_point)
        latency = LatencyProbe(settings.node.cache.mount_point) if self._cache_drive else None
        self._sampler = Sampler(latency=latency if settings.probe.watch_latency else None)
        self._spool = spool.Spool(
            settings.probe.state_dir / "spool",
            self._url,
            credential=credential,
            deliver=deliver,
        )
        self._sent = settings.probe.state_dir / "sent"
        self._due = {"scan": 0.0, "sample": 0.0, "publish": 0.0}
        self._profile: NodeProfile | None = None
        self._told: dict[str, frozenset[str]] = {}
        self._away = False
        self.picture: Picture | None = None
        self.rescan = threading.Event()

    def start(self) -> None:
        """Make the folders. Raises CraterError when they can't be made."""
        try:
            self._settings.probe.state_dir.mkdir(parents=True, exist_ok=True)
            if self._settings.probe.publish:
                self._spool.start()
        except OSError as error:
            where = self._settings.probe.state_dir
            raise CraterError(f"can't write below {where}: {error.strerror}") from error

    def stop(self) -> None:
        if self._settings.probe.publish:
            self._spool.stop()
        self._sampler.close()

    def turn(self) -> float:
        """Do what is due; seconds until the next thing is."""
        if self.rescan.is_set():
            self.rescan.clear()
            self._due["scan"] = 0.0
        probe = self._settings.probe
        self._when("scan", probe.scan_seconds, self._scan)
        self._when("sample", probe.sample_seconds, self._sample)
        if probe.publish:
            self._when("publish", probe.publish_seconds, self._publish)
        return max(0.05, min(self._due.values()) - time.monotonic())

    def _when(self, what: str, seconds: float, work: Callable[[], None]) -> None:
        if time.monotonic() < self._due[what]:
            return
        self._due[what] = time.monotonic() + seconds
        try:
            work()
        except CraterError as error:
            _log.error("%s: %s", what, error)
        except Exception:
            # A probe that ends is a node that nobody sees; a fault of one round is told instead.
            _log.exception("%s failed", what)

    def _scan(self) -> None:
        found = self._read(self._name, Path("/"))
        file = self._settings.node.profile

        def over(old: NodeProfile | None) -> NodeProfile:
            # Another node's file, from an image that was cloned, is no memory of this one.
            return merge(old if old and old.name == self._name else None, found.profile)

        try:
            self._profile = profile_file.update(file, over)
        except CraterError as error:
            _log.error("%s; measured values of this node are not kept", error)
            self._profile = found.profile
        self._tell("scan", found.notes)
        self._offer(self._profile)

    def _offer(self, profile: NodeProfile) -> None:
        """Spool the profile unless its like was spooled before, whatever the time of reading."""
        data = profile_to_dict(profile)
        timeless = {key: value for key, value in data.items() if key != "source"}
        digest = hashlib.sha256(json.dumps(timeless, sort_keys=True).encode()).hexdigest()
        stamp = f"{digest} {int(time.time()) // _REFRESH_SECONDS}"
        if not self._settings.probe.publish or _text(self._sent) == stamp:
            return
        self._spool.send({"node": self._name, "profile": data})
        try:
            self._sent.write_text(stamp)
        except OSError as error:
            _log.warning("can't note what was reported: %s", error)

    def _sample(self) -> None:
        if self._profile is None:
            return
        health = self._sampler.sample(self._profile, self._cache_drive)
        problems = self._sampler.problems
        self.picture = Picture(self._profile, health, problems)
        self._tell("sample", problems)

    def _publish(self) -> None:
        if self.picture is None:
            return
        problem = self._spool.now(
            {"node": self._name, "health": health_to_dict(self.picture.health)}
        )
        if problem and not self._away:
            _log.warning("health can't be reported to %s: %s", self._url, problem)
        self._away = bool(problem)

    def _tell(self, source: str, sentences: tuple[str, ...]) -> None:
        """Each sentence of a source once, until it is gone and comes again."""
        for sentence in sentences:
            if sentence not in self._told.get(source, ()):
                _log.info("%s", sentence)
        self._told[source] = frozenset(sentences)


#: A profile is reported again after a day, so that a store that was lost fills by itself.
_REFRESH_SECONDS = 86_400


def _cache_drive(folder: Path) -> str | None:
    """The drive that carries the cache, where it is one local drive."""
    try:
        drives = target(folder).drives
    except (CraterError, OSError):
        return None
    return drives[0] if len(drives) == 1 else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
