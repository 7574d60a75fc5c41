"""What is remembered of a running lab: the processes that hold it, safe against reused numbers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from crater_slurm.errors import LabError


@dataclass(frozen=True, slots=True)
class Runtime:
    """The file ``runtime.json`` of a lab.

    ``starter`` is the process that makes the lab, ``unshare`` holds its namespaces and ``init`` is
    its pid 1; each is known by its number and the time at which it was created.
    """

    file: Path

    def facts(self) -> dict[str, Any]:
        """Everything noted; empty when nothing is, or when it can't be read."""
        try:
            return dict(json.loads(self.file.read_text()))
        except (OSError, ValueError):
            return {}

    def note(self, **facts: Any) -> None:
        """Replace what is noted."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps(facts))
        fresh.replace(self.file)

    def pid(self, role: str) -> int | None:
        """Number of the process in that role, if it still runs."""
        facts = self.facts()
        if role not in facts:
            return None
        number, created = facts[role]
        return int(number) if _alive(number, created) else None

    def end(self, seconds: float = 15) -> None:
        """End the lab's processes and wait until none is left; LabError when one stays."""
        holder = self.pid("unshare")
        if holder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder, signal.SIGKILL)
        deadline = time.monotonic() + seconds
        while (left := self.pid("init")) is not None:
            if time.monotonic() > deadline:
                raise LabError(f"process {left} of the lab does not end; is a job stuck in I/O?")
            time.sleep(0.01)


def identity(process: psutil.Process) -> tuple[int, float]:
    """What tells a process from a later one with the same number."""
    return process.pid, process.create_time()


def _alive(number: int, created: float) -> bool:
    """Whether that very process runs. A zombie does not: its parent may take its time."""
    try:
        process = psutil.Process(number)
        same = abs(process.create_time() - created) < 1
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
