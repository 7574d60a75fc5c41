"""Bytes that jobs read from and write to this machine's drives, between one look and the next.

``io.stat`` of the job's cgroup tells it where the io controller is on. Slurm itself does not
switch it on, and its part of the tree is not ours to change, so otherwise the counters of the
job's processes are summed: those of processes that ended in between are lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.files import read_text

#: Of a job with more processes or cgroups than this, the others' share is not seen.
_MOST_PROCESSES, _MOST_FOLDERS = 4096, 1024


@dataclass(frozen=True, slots=True)
class Io:
    """Bytes and operations since the last look; operations are None where nobody counts them."""

    read_bytes: int
    written_bytes: int
    operations: int | None = None


_Counters = tuple[int, int, int | None]


class IoMeter:
    """Remembers each job's counters. Used from one thread."""

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._proc = proc
        self._sys = sys
        self._stacked: dict[str, bool] = {}
        self._before: dict[str, dict[str, _Counters]] = {}

    def advance(self, job_id: str, folder: Path, *, first: bool) -> Io | None:
        """What a job did since the last look; since its start at its ``first`` one.

        None when nothing is told, and at the first look after a restart of the daemon.
        """
        now = self._by_device(folder)
        if now is None:
            now = self._by_process(processes(folder))
        if now is None:
            return None
        before = self._before.get(job_id)
        self._before[job_id] = now
        if before is None:
            if not first:
                return None
            before = {}
        steps = [_step(before.get(name, (0, 0, 0)), counters) for name, counters in now.items()]
        operations = [step[2] for step in steps if step[2] is not None]
        return Io(
            sum(step[0] for step in steps),
            sum(step[1] for step in steps),
            sum(operations) if operations else None,
        )

    def keep(self, job_ids: Iterable[str]) -> None:
        """Forget all jobs but these."""
        wanted = set(job_ids)
        self._before = {name: seen for name, seen in self._before.items() if name in wanted}

    def _by_device(self, folder: Path) -> dict[str, _Counters] | None:
        text = read_text(folder / "io.stat")
        if text is None:
            return None
        found: dict[str, _Counters] = {}
        for line in text.splitlines():
            device, *words = line.split()
            values = {k: int(v) for k, _, v in (w.partition("=") for w in words) if v.isdigit()}
            if not self._is_stacked(device):
                operations = values.get("rios", 0) + values.get("wios", 0)
                found[device] = (values.get("rbytes", 0), values.get("wbytes", 0), operations)
        return found

    def _is_stacked(self, device: str) -> bool:
        """Whether a device (``259:0``) lies on others, which count the same bytes again."""
        known = self._stacked.get(device)
        if known is None:
            folder = self._sys / "dev/block" / device
            try:
                known = (folder / "loop").exists() or any((folder / "slaves").iterdir())
            except OSError:
                known = False
            self._stacked[device] = known
        return known

    def _by_process(self, pids: list[int]) -> dict[str, _Counters] | None:
        found: dict[str, _Counters] = {}
        for pid in pids:
            text = read_text(self._proc / str(pid) / "io")
            if text is not None:
                pairs = (line.partition(": ") for line in text.splitlines())
                values = {name: int(value) for name, _, value in pairs if value.isdigit()}
                counters = (values.get("read_bytes", 0), values.get("write_bytes", 0), None)
                found[str(pid)] = counters
        return found or None


def _step(before: _Counters, now: _Counters) -> _Counters:
    """From one look to the next; a counter that went back belongs to another process by now."""
    if now[0] < before[0] or now[1] < before[1]:
        before = (0, 0, 0)
    operations = None if now[2] is None else max(0, now[2] - (before[2] or 0))
    return now[0] - before[0], now[1] - before[1], operations


def processes(folder: Path) -> list[int]:
    """Processes in a cgroup and all below it, up to a limit."""
    pids: list[int] = []
    waiting, seen = [str(folder)], 0
    while waiting and len(pids) < _MOST_PROCESSES and seen < _MOST_FOLDERS:
        place = waiting.pop()
        seen += 1
        text = read_text(f"{place}/cgroup.procs") or ""
        pids += [int(word) for word in text.split() if word.isdigit() and word != "0"]
        try:
            with os.scandir(place) as entries:
                waiting += [e.path for e in entries if e.is_dir(follow_symlinks=False)]
        except OSError:
            continue
    return pids[:_MOST_PROCESSES]
