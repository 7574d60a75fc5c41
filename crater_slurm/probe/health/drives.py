"""What each NVMe drive is doing, from /proc/diskstats.

The kernel's await holds the time in the queue: a drive under load shows more than it would alone,
so it is never compared with a latency that was measured at queue depth 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crater_slurm.model.health import DriveHealth
from crater_slurm.model.profile import NodeProfile
from crater_slurm.probe import files

_SECTOR = 512
_FIELDS = 11  # of the kernel's documentation (iostats): 1 reads ... 10 ms with I/O, 11 weighted


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters since boot of one drive, and when they were read."""

    time: float
    reads: int
    read_sectors: int
    read_ms: int
    writes: int
    write_sectors: int
    write_ms: int
    busy_ms: int


@dataclass(slots=True)
class DriveSampler:
    """Remembers the counters of the sample before."""

    root: Path = Path("/")
    _before: dict[str, _Counts] = field(default_factory=dict)

    def sample(self, profile: NodeProfile, now: float) -> tuple[DriveHealth, ...]:
        """Each drive's rates since the last sample; the first sample has none."""
        counts = self._read({drive.name for drive in profile.nvmes}, now)
        found = []
        for drive in profile.nvmes:
            before, current = self._before.get(drive.name), counts.get(drive.name)
            rates = _rates(before, current) if before and current else {}
            found.append(DriveHealth(name=drive.name, stable_id=drive.stable_id, **rates))
        self._before = counts
        return tuple(found)

    def _read(self, names: set[str], now: float) -> dict[str, _Counts]:
        found = {}
        for line in (files.read(self.root / "proc/diskstats") or "").splitlines():
            words = line.split()
            if len(words) < 3 + _FIELDS or words[2] not in names:
                continue
            values = [files.number(word) for word in words[3 : 3 + _FIELDS]]
            whole = [value for value in values if value is not None]
            if len(whole) == _FIELDS:
                reads, _, read_sectors, read_ms, writes, _, write_sectors, write_ms, *rest = whole
                found[words[2]] = _Counts(
                    now, reads, read_sectors, read_ms, writes, write_sectors, write_ms, rest[1]
                )
        return found


def _rates(before: _Counts, now: _Counts) -> dict[str, Any]:
    seconds = now.time - before.time
    reads, writes = now.reads - before.reads, now.writes - before.writes
    if seconds <= 0 or reads < 0 or writes < 0:  # the drive was replaced meanwhile
        return {}
    rates = {
        "read_iops": reads / seconds,
        "write_iops": writes / seconds,
        "read_mb_s": (now.read_sectors - before.read_sectors) * _SECTOR / seconds / 1e6,
        "write_mb_s": (now.write_sectors - before.write_sectors) * _SECTOR / seconds / 1e6,
        "busy_percent": min(100.0, (now.busy_ms - before.busy_ms) / seconds / 10),
    }
    if reads:
        rates["read_await_ms"] = (now.read_ms - before.read_ms) / reads
    if writes:
        rates["write_await_ms"] = (now.write_ms - before.write_ms) / writes
    return {name: round(value, 3) for name, value in rates.items() if value >= 0}
