"""Staging: copies of datasets in the node's cache, made in the background while the job starts.

A copy has a hidden name until it is whole, so a job reads the original or a whole copy, never half
of one. All is done with the user's own rights. What does not fit is left where it is, and told.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crater_slurm.checkpoint import stage_copy, stage_s3
from crater_slurm.checkpoint.counters import Counters
from crater_slurm.checkpoint.remote.store import Limiter, RemoteError, StoppedError, Unlimited
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.checkpoint.stage_copy import StageError

WAITING, COPYING, READY, FAILED = "waiting", "copying", "ready", "failed"
_FLOOR_BYTES = 1 << 30


@dataclass(slots=True)
class Item:
    """One path or URL to stage, and how far it is."""

    source: str
    local: str
    state: str = WAITING
    bytes: int = 0
    done: int = 0
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The item for status answers."""
        return {
            "path": self.source,
            "state": self.state,
            "bytes": self.bytes,
            "done": self.done,
            "local": self.local if self.state == READY else "",
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Staged:
    """Where to read: ``local`` is the copy, empty while there is none; ``error`` says why."""

    path: str
    local: str
    error: str


class Stager:
    """Stages one job's data on one node, in a thread of its own.

    ``limit_bytes`` 0 is no limit; ``floor_bytes`` stay free on the cache's file system.
    """

    def __init__(
        self,
        spec: Spec,
        on_change: Callable[[Item], None],
        log: Callable[[str, str], None],
        *,
        limiter: Limiter | None = None,
        counters: Counters | None = None,
        limit_bytes: int = 0,
        floor_bytes: int = _FLOOR_BYTES,
    ) -> None:
        self._spec = spec
        self._on_change = on_change
        self._log = log
        self._limiter = limiter or Unlimited()
        self._counters = counters or Counters()
        self._limit = limit_bytes
        self._floor = floor_bytes
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._items = [
            Item(source, os.path.join(spec.dataset_folder, local_name(source)))
            for source in dict.fromkeys(_plain(s) for s in spec.stage)
        ]

    def start(self) -> None:
        """Begin; returns at once."""
        if self._items and self._spec.dataset_folder:
            self._thread = threading.Thread(target=self.run, name="crater-stage", daemon=True)
            self._thread.start()

    def stop(self, seconds: float | None = None) -> None:
        """Break off; what is copied so far serves a later start."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def run(self) -> None:
        """Stage everything, one after the other."""
        for item in self._items:
            if self._stop.is_set():
                return
            self._one(item)

    def state(self) -> list[dict[str, Any]]:
        """Each item's state, in the order they were given."""
        return [item.as_dict() for item in self._items]

    @property
    def counters(self) -> dict[str, int]:
        """How many questions for a path were answered with a copy."""
        return self._counters.as_dict()

    @property
    def idle(self) -> bool:
        """Whether nothing is copied any more, nor will be."""
        if self._thread is None or self._stop.is_set():
            return True
        return all(item.state in (READY, FAILED) for item in self._items)

    def lookup(self, path: str) -> Staged:
        """The answer to ``stage``: the copy of a staged path or of something below it."""
        asked = _plain(path)
        answer = Staged(path, "", "It is not among the data that this job stages.")
        for item in self._items:
            below = asked[len(item.source) :]
            if asked == item.source or (asked.startswith(item.source) and below[0] == "/"):
                answer = self._answer(path, item, below.strip("/"))
                break
        self._counters.served(local=bool(answer.local))
        return answer

    def _answer(self, path: str, item: Item, below: str) -> Staged:
        if item.state == READY and ".." not in below.split("/"):
            local = f"{item.local}/{below}" if below else item.local
            return Staged(path, local, "")
        waiting = f"It is still being copied: {item.done} of {item.bytes} bytes."
        return Staged(path, "", item.error or waiting)

    def _one(self, item: Item) -> None:
        self._set(item, COPYING)

        def progress(count: int) -> None:
            item.done += count

        def fits(size: int) -> None:
            item.bytes = size
            self._room(item, size)

        way = stage_copy.Way(self._stop, self._limiter, progress, fits)
        try:
            if item.source.startswith("s3://"):
                stage_s3.stage(self._spec, item.source, item.local, way)
            elif item.source.startswith("/"):
                stage_copy.stage(item.source, item.local, way)
            else:
                raise StageError("only absolute paths and s3:// URLs can be staged")
        except StoppedError:
            item.state = WAITING
            return
        except (StageError, RemoteError, OSError) as error:
            item.error = f"{item.source} is not staged, so it is read in its place: {_said(error)}."
            self._log("warning", item.error)
            self._set(item, FAILED)
            return
        item.done = item.bytes
        self._log("info", f"{item.source} is staged: {item.bytes} bytes at {item.local}.")
        self._set(item, READY)

    def _room(self, item: Item, size: int) -> None:
        """Raise StageError unless so many bytes may still come into the cache."""
        taken = sum(other.bytes for other in self._items if other.state == READY)
        if self._limit and taken + size > self._limit:
            raise StageError(f"it has {size} bytes, of the limit {self._limit} {taken} are taken")
        status = os.statvfs(self._spec.dataset_folder)
        free = status.f_bavail * status.f_frsize
        if size + self._floor > free:
            raise StageError(
                f"{size} bytes are to come, {free} are free there and {self._floor} stay so"
            )

    def _set(self, item: Item, state: str) -> None:
        item.state = state
        self._on_change(item)


def local_name(source: str) -> str:
    """Name of a source's copy: two sources of one name don't meet."""
    plain = _plain(source)
    last = plain.rpartition("/")[2][:100] or "data"
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in last)
    return f"{hashlib.sha256(os.fsencode(plain)).hexdigest()[:10]}-{safe}"


def _plain(source: str) -> str:
    return source if "://" in source else os.path.normpath(source) if source else source


def _said(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'it'}: {error.strerror}"
    return str(error).rstrip(".")
