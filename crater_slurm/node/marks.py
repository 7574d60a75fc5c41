"""Marks in /run that let the hooks' shell scripts skip Python for jobs that crater has not touched.

``jobs/<job id>`` stands for a job that was prepared here, ``jobs/all`` for a site that wants
every job prepared. ``ended/<job id>`` is written by the Epilog of a job when no daemon answered.
The folders are root's; their content says nothing about a job but that it exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

_ALL = "all"


class Marks:
    """The folder ``jobs`` beside the daemon's socket, and ``ended`` beside that."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ended = folder.with_name("ended")

    def reset(self, job_ids: Iterable[str], *, everything: bool) -> None:
        """Show exactly these jobs: /run is empty after a boot and stale after a crash."""
        for folder in (self._folder, self._ended):
            folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        wanted = {*job_ids, *([_ALL] if everything else [])}
        for path in self._folder.iterdir():
            if path.name not in wanted:
                path.unlink(missing_ok=True)
        for name in wanted:
            self.set(name)

    def set(self, job_id: str) -> None:
        """Mark a job; without the mark its TaskProlog would say nothing, so errors are raised."""
        self.take_ended(job_id)  # that of an earlier run, before a requeue
        (self._folder / job_id).touch(mode=0o644)

    def clear(self, job_id: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / job_id).unlink(missing_ok=True)

    def ended(self) -> list[str]:
        """Jobs whose Epilog found no daemon that answered."""
        try:
            return sorted(path.name for path in self._ended.iterdir())
        except OSError:
            return []

    def take_ended(self, job_id: str) -> None:
        with contextlib.suppress(OSError):
            (self._ended / job_id).unlink(missing_ok=True)
