"""Which checkpoints there are, and which of them all ranks can load.

A rank can use a step of which it sees its own file. Without torch.distributed a step also has to
be complete in the folder; with it, the ranks tell each other what they see and take the newest
that all of them do.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

from crater_slurm.job import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


@dataclass
class Found:
    """One step of one run. ``folder`` is empty for one that only the worker can bring."""

    step: int
    run: str
    time: float = 0.0
    folder: str = ""
    parts: list[layout.Manifest] = field(default_factory=list)
    source: str = "folder"

    @property
    def key(self) -> tuple[int, str]:
        return (self.step, self.run)

    @property
    def world_size(self) -> int:
        """How many ranks saved it; 0 while its manifests have not been seen."""
        return self.parts[0].world_size if self.parts else 0

    @property
    def ranks(self) -> set[int]:
        return {rank for part in self.parts for rank in part.ranks}

    def file(self, rank: int) -> layout.FileEntry | None:
        """The file of a rank, from the newest manifest that names one."""
        for part in sorted(self.parts, key=lambda p: -p.time):
            for entry in part.files:
                if entry.rank == rank:
                    return entry
        return None


def scan(folder: str, name: str) -> list[Found]:
    """All steps of a name in a folder, complete or not, by run; empty where there is no folder."""
    try:
        entries = os.listdir(folder)
    except OSError:
        return []
    found = []
    for entry in entries:
        parsed = layout.parse_step_name(entry)
        if parsed is None or parsed[0] != name:
            continue
        found.extend(look(os.path.join(folder, entry), parsed[1], name))
    return found


def look(folder: str, step: int, name: str) -> list[Found]:
    """What a step's folder holds, by run."""
    try:
        parts = layout.read_parts(folder)
    except OSError:
        return []
    by_run: dict[tuple[str, int], Found] = {}
    for part in parts:
        if (part.step, part.name) == (step, name):
            whole = by_run.setdefault(
                (part.run, part.world_size), Found(step, part.run, folder=folder)
            )
            whole.parts.append(part)
            whole.time = max(whole.time, part.time)
    return list(by_run.values())


def newest_first(found: list[Found]) -> list[Found]:
    """By step, then by the manifests' time, then by the run: a later job or restart is newer."""
    return sorted(found, key=lambda f: (f.step, f.time, _age(f.run)), reverse=True)


def _age(run: str) -> tuple[int, ...]:
    return tuple(int(part) for part in run.split(".") if part.isdigit() and len(part) < 19)


def gatherer() -> Callable[[Any], list[Any]] | None:
    """A function that every rank calls with its word and that gives all ranks' words; None where
    this process is alone or torch.distributed does not run."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    world = distributed.get_world_size()
    if world == 1:
        return None

    def gather(word: Any) -> list[Any]:
        words: list[Any] = [None] * world
        distributed.all_gather_object(words, word)
        return words

    return gather


def common(words: list[list[tuple[int, str, float]]]) -> tuple[int, str] | None:
    """The newest (step, run) that all ranks named, by the latest time that one of them gave."""
    if not words:
        return None
    keys = set.intersection(*({(step, run) for step, run, _ in word} for word in words))
    times: dict[tuple[int, str], float] = {}
    for word in words:
        for step, run, when in word:
            times[step, run] = max(when, times.get((step, run), 0.0))
    ordered = newest_first([Found(step, run, times[step, run]) for step, run in keys])
    return ordered[0].key if ordered else None
