"""Tells when something changes in Slurm's cgroup tree that matters to memory binding.

Slurm's own write of ``step_X/user/cpuset.mems`` comes before the step's tasks exist, so acting on
it reaches every step, also the extern step and tasks that evade their TaskProlog. Lost events
(queue overflow) lead to a new scan, and without inotify the tree is looked at every second.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from crater_slurm.node import inotify

_log = logging.getLogger("crater.node.watch")

#: Files whose change may change a decision.
_FILES = {"cpuset.mems", "cpuset.cpus", "memory.max"}
_POLL_SECONDS = 1.0
_RESCAN_SECONDS = 30.0


def _wanted(depth: int, name: str) -> bool:
    """Whether a folder at this depth below the root is watched: slice, scope, job, step, user."""
    if depth == 0:
        return name.endswith(".slice")
    if depth == 1:
        return name.endswith("slurmstepd.scope")
    if depth == 2:
        return name != "system"
    if depth == 3:
        return name.startswith("step_")
    return depth == 4 and name == "user"


class Watcher:
    """Calls ``changed`` from its own thread after each burst of relevant changes."""

    def __init__(self, root: Path, changed: Callable[[], None]) -> None:
        self._root = root
        self._changed = changed
        self._stop = threading.Event()
        self._paths: dict[int, tuple[Path, int]] = {}
        self._notify: inotify.Inotify | None = None
        self._complete = True
        self._thread = threading.Thread(target=self._run, name="cgroup-watch", daemon=True)

    def start(self) -> None:
        """Set the watches, look once, and go on in the background."""
        self._begin()
        self._call()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            if self._notify:
                self._notify.wake()
        self._thread.join(timeout=5)

    def _begin(self) -> None:
        """A fresh instance with watches on everything there is now."""
        if self._notify:
            self._notify.close()
        self._paths.clear()
        self._complete = True
        try:
            self._notify = inotify.Inotify()
        except OSError as error:
            self._notify = None
            _log.warning("watch: couldn't use inotify: %s; looking every second", error)
            return
        self._add(self._root, 0)

    def _add(self, folder: Path, depth: int) -> None:
        assert self._notify
        try:
            self._paths[self._notify.add(folder)] = (folder, depth)
            # Only now look inside: what was created before the watch raised no event.
            children = [child for child in folder.iterdir() if _wanted(depth, child.name)]
        except FileNotFoundError:
            return
        except OSError as error:
            if self._complete:
                _log.warning("watch: couldn't watch %s: %s; looking every second", folder, error)
            self._complete = False
            return
        for child in children:
            if child.is_dir() and not child.is_symlink():
                self._add(child, depth + 1)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._notify is None:
                self._stop.wait(_POLL_SECONDS)
                self._call()
                continue
            events = self._notify.read(_RESCAN_SECONDS if self._complete else _POLL_SECONDS)
            if self._stop.is_set():
                break
            if self._take(events) or not self._complete:
                self._call()

    def _take(self, events: list[inotify.Event]) -> bool:
        """Keep the watches in step with the tree; whether anything relevant happened."""
        relevant = False
        for event in events:
            if event.mask & inotify.Q_OVERFLOW:
                _log.warning("watch: the kernel dropped events; scanning the whole tree again")
                self._begin()
                return True
            if event.mask & inotify.IGNORED:
                self._paths.pop(event.watch, None)
                continue
            folder, depth = self._paths.get(event.watch, (None, 0))
            if folder is None:
                continue
            if event.mask & inotify.ISDIR:
                relevant = relevant or depth >= 1
                if event.mask & (inotify.CREATE | inotify.MOVED_TO) and _wanted(depth, event.name):
                    self._add(folder / event.name, depth + 1)
            elif event.name in _FILES:
                relevant = True
        return relevant

    def _call(self) -> None:
        try:
            self._changed()
        except Exception:
            # The thread must outlive a surprise in the tree; the next event tries again.
            _log.exception("watch: couldn't act on a change in the cgroup tree")
