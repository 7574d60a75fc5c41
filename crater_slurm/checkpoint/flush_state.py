"""How far a step is on its way to the destination: in memory, and beside the step on disk.

``flush.json`` lies in the step's folder and belongs to the user, so nothing in it is believed but
what a server confirms: it names no key and no place. A changed one costs its owner time, at most
his own checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crater_slurm.checkpoint.remote.store import read_small
from crater_slurm.files import write_atomically
from crater_slurm.job import layout

NAME = "flush.json"
_FORMAT = 1
_MOST_BYTES = 4 << 20

PENDING, RUNNING, FLUSHED, SKIPPED, FAILED = "pending", "running", "flushed", "skipped", "failed"


@dataclass(slots=True)
class Note:
    """The file: what was begun for which run and destination."""

    run: str
    destination: str
    flushed: bool = False
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: str, run: str, destination: str) -> Note:
        """The note beside a step; an empty one when it is absent, damaged or of something else."""
        fresh = cls(run, destination)
        text = read_small(folder, NAME, _MOST_BYTES)
        try:
            data = json.loads(text or "")
        except (ValueError, RecursionError):
            return fresh
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            return fresh
        if (data.get("run"), data.get("destination")) != (run, destination):
            return fresh
        files = data.get("files")
        if isinstance(files, dict):
            fresh.files = {k: dict(v) for k, v in files.items() if isinstance(v, dict)}
        fresh.flushed = data.get("flushed") is True
        return fresh

    def write(self, folder: str) -> None:
        """Write it beside the step, to stay; raises OSError."""
        data = {
            "format": _FORMAT,
            "run": self.run,
            "destination": self.destination,
            "flushed": self.flushed,
            "files": self.files,
        }
        write_atomically(Path(folder) / NAME, json.dumps(data, indent=1))


def mark_flushed(folder: str, run: str, destination: str) -> None:
    """Say that a step is at the destination, such as one that came from there; raises OSError."""
    Note(run, destination, flushed=True).write(folder)


@dataclass(slots=True)
class Step:
    """One step's part and its way. ``done`` counts bytes that are at the destination."""

    folder: str
    manifest: layout.Manifest
    note: Note
    state: str = PENDING
    done: int = 0
    error: str = ""
    since: float = 0.0
    next_try: float = 0.0
    moved: float = 0.0
    urgent: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def key(self) -> tuple[str, int, str]:
        return (self.manifest.name, self.manifest.step, self.manifest.run)

    @property
    def title(self) -> str:
        return layout.step_name(self.manifest.step, self.manifest.name)

    def takes_over(self, older: Step) -> bool:
        """Whether it lies where another start of the training had the same step."""
        same = older.folder == self.folder and older.key[:2] == self.key[:2]
        return same and older.key != self.key

    def progress(self, count: int, now: float) -> None:
        """Count bytes that arrived."""
        with self.lock:
            self.done += count
            self.moved = now

    def as_dict(self) -> dict[str, Any]:
        """The step for status answers."""
        sentence = self.error
        if self.error and self.since:
            sentence += f" So since {_clock(self.since)}"
            sentence += f", next try at {_clock(self.next_try)}." if self.next_try else "."
        return {
            "name": self.manifest.name,
            "step": self.manifest.step,
            "run": self.manifest.run,
            "state": self.state,
            "bytes": self.manifest.size,
            "done": min(self.done, self.manifest.size),
            "error": sentence,
            "since": self.since,
            "next_try": self.next_try,
            "moved": self.moved,
        }


def parts_of(folder: str, node: str) -> Iterator[tuple[str, layout.Manifest]]:
    """A node's parts that lie in a cache, with the folders that they are in."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError:
        return
    for name in names:
        if layout.parse_step_name(name):
            with contextlib.suppress(OSError):
                for part in layout.read_parts(f"{folder}/{name}"):
                    if part.node == node:
                        yield f"{folder}/{name}", part


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
