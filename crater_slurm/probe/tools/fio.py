"""Reads what fio prints with ``--output-format=json`` and its IOPS logs; it runs nothing.

fio writes its complaints in front of the JSON, or instead of it, and goes on after an error of one
job. Such a run measured nothing that can be trusted, so it is refused with fio's own words.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from crater_slurm.errors import CraterError

#: Factors to microseconds of the keys that fio has used: clat_ns since 3.0, clat in µs before.
_CLAT_US = {"clat_ns": 1e-3, "clat_us": 1.0, "clat_ms": 1e3, "clat": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class FioDirection:
    """The reads or the writes of a job. ``iops`` counts operations, ``bandwidth_mb_s`` 10^6 B/s.

    ``clat_mean_us`` is the mean completion latency, from submission to completion; None when there
    was no operation. ``iops_min`` and ``iops_max`` are of fio's own samples, of one job of a group.
    """

    total_ios: int
    io_bytes: int
    iops: float
    bandwidth_mb_s: float
    clat_mean_us: float | None = None
    iops_min: float | None = None
    iops_max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FioJob:
    """One job, or the sum of a group when fio ran with ``group_reporting``."""

    name: str
    read: FioDirection
    write: FioDirection


@dataclass(frozen=True, slots=True, kw_only=True)
class FioReport:
    """A whole run; ``messages`` is what fio printed in front of the JSON."""

    version: str
    jobs: tuple[FioJob, ...]
    messages: tuple[str, ...] = ()


def parse_report(text: str) -> FioReport:
    """The report of a run in which every job succeeded.

    Raises CraterError, with fio's own words where it gave any, when a job failed, when there is no
    JSON, or when it is cut off or not fio's.
    """
    start = _json_start(text)
    messages = _lines(text[:start])
    if start == len(text):
        raise CraterError(f"fio printed no result: {_quoted(messages)}")
    try:
        data, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise CraterError(
            f"fio's JSON can't be read ({error}); it was cut off or is not fio's"
            + (f"; fio said: {_quoted(messages)}" if messages else "")
        ) from error
    entries = _get(data, "jobs", list)
    if not entries:
        raise CraterError("fio's JSON has no jobs")
    for entry in entries:
        _refuse_failed(entry, messages)
    version = _get(data, "fio version", str)
    return FioReport(version=version, jobs=tuple(map(_job, entries)), messages=messages)


def parse_version(text: str) -> tuple[int, int]:
    """(3, 33) of ``fio-3.33`` or ``fio-3.33-12-gabc``. Raises CraterError when it is none."""
    major, _, rest = text.strip().removeprefix("fio-").partition(".")
    minor = rest.partition("-")[0].partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal() and len(major + minor) < 10):
        raise CraterError(f"{text.strip()[:60]!r} is no version of fio")
    return int(major), int(minor)


def iops_by_second(logs: Iterable[str]) -> tuple[float, ...]:
    """IOPS of each second, jobs and directions added up, from logs of ``log_avg_msec=1000``.

    ``logs`` holds the text of one log per job: ``time in ms, IOPS, direction, ...`` in each line.
    A second that not every job has logged is left out, since its sum would be too low.
    """
    sums: dict[int, float] = defaultdict(float)
    seen: dict[int, int] = defaultdict(int)
    count = 0
    for log in logs:
        count += 1
        seconds = set()
        for line in log.splitlines():
            time_ms, iops = _log_entry(line)
            second = round(time_ms / 1000)
            sums[second] += iops
            seconds.add(second)
        for second in seconds:
            seen[second] += 1
    return tuple(sums[second] for second in sorted(sums) if seen[second] == count)


def _log_entry(line: str) -> tuple[float, float]:
    parts = line.split(",")
    try:
        entry = float(parts[0]), float(parts[1])
    except (ValueError, IndexError) as error:
        raise CraterError(f"{line[:60]!r} is no line of fio's IOPS log") from error
    if not all(map(math.isfinite, entry)):
        raise CraterError(f"{line[:60]!r} is no line of fio's IOPS log")
    return entry


def _json_start(text: str) -> int:
    """Where the line with fio's opening brace begins; the end of the text when there is none."""
    position = 0
    for line in text.splitlines(keepends=True):
        if line.startswith("{"):
            return position
        position += len(line)
    return len(text)


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip()[:300] for line in text.splitlines() if line.strip())


def _quoted(messages: tuple[str, ...]) -> str:
    if not messages:
        return "nothing at all"
    more = f" (and {len(messages) - 3} more lines)" if len(messages) > 3 else ""
    return "; ".join(messages[:3]) + more


def _refuse_failed(entry: object, messages: tuple[str, ...]) -> None:
    error = _number(entry, "error")
    if error:
        said = f": {_quoted(messages)}" if messages else ""
        raise CraterError(f"fio job {_get(entry, 'jobname', str)[:60]} failed, {error=:g}{said}")


def _job(entry: Mapping[str, Any]) -> FioJob:
    return FioJob(
        name=_get(entry, "jobname", str),
        read=_direction(_get(entry, "read", dict)),
        write=_direction(_get(entry, "write", dict)),
    )


def _direction(entry: Mapping[str, Any]) -> FioDirection:
    # bw is KiB/s; bw_bytes, which has no rounding, came with 3.0.
    bytes_per_second = (
        _number(entry, "bw_bytes") if "bw_bytes" in entry else _number(entry, "bw") * 1024
    )
    total_ios = int(_number(entry, "total_ios"))
    return FioDirection(
        total_ios=total_ios,
        io_bytes=int(_number(entry, "io_bytes")),
        iops=_number(entry, "iops"),
        bandwidth_mb_s=bytes_per_second / 1e6,
        clat_mean_us=_clat_mean_us(entry) if total_ios else None,
        iops_min=_number(entry, "iops_min") if "iops_min" in entry else None,
        iops_max=_number(entry, "iops_max") if "iops_max" in entry else None,
    )


def _clat_mean_us(entry: Mapping[str, Any]) -> float | None:
    for key, factor in _CLAT_US.items():
        if key in entry:
            return _number(_get(entry, key, dict), "mean") * factor
    return None


def _get(entry: object, key: str, kind: type) -> Any:
    if not isinstance(entry, Mapping) or key not in entry or not isinstance(entry[key], kind):
        raise CraterError(f"fio's JSON has no {key!r} where fio writes one")
    return entry[key]


def _number(entry: object, key: str) -> float:
    """A finite number that is not negative; fio prints no other."""
    value = _get(entry, key, object)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise CraterError(f"fio's JSON has {value!r:.40} as {key}, which is no sensible number")
    return float(value)
