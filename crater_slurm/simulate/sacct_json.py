"""Reads ``sacct --json``, in the forms of Slurm 22.05 and of 24.11 and later."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from crater_slurm.errors import UsageError
from crater_slurm.simulate.record import Record

_CHUNK = 1 << 20
_GAP = re.compile(r"[\s,]*")


def records(opened: TextIO, file: Path) -> Iterator[tuple[str, Record | None]]:
    """Jobs of ``sacct --json``, one at a time: a dump may be larger than memory."""
    for number, job in enumerate(_objects(opened, file)):
        where = f"{file}: jobs[{number}]"
        if not isinstance(job, dict):
            raise UsageError(f"{where} is {type(job).__name__}, not an object")
        yield where, _of_json(job, where)


def _objects(opened: TextIO, file: Path) -> Iterator[Any]:
    """Values of the top list ``jobs``, decoded as they are read."""
    decoder = json.JSONDecoder()
    text, at, begun = "", 0, False
    while True:
        more = opened.read(_CHUNK)
        text, at = text[at:] + more, 0
        if not begun:
            start = re.search(r'"jobs"\s*:\s*\[', text)
            if start:
                at, begun = start.end(), True
            elif not more:
                raise UsageError(f'{file} is JSON without a list "jobs"; sacct --json has one')
            else:
                at = max(0, len(text) - 64)
                continue
        while True:
            gap = _GAP.match(text, at)
            at = gap.end() if gap else at
            if text.startswith("]", at):
                return
            try:
                value, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                if not more:
                    raise UsageError(f"{file} is no whole JSON: {error}") from error
                break
            yield value


def _of_json(job: Mapping[str, Any], where: str) -> Record:
    """A job of either age: plain numbers and words (22.05), or {set, number} and lists (24.11)."""
    time, tres = _mapping(job, "time", where), _mapping(job, "tres", where)
    state = _mapping(job, "state", where).get("current", "")
    nodes = _plain(job.get("allocation_nodes"), "allocation_nodes", where) or 1
    counted: dict[str, float] = {}
    for entry in tres.get("requested") or tres.get("allocated") or ():
        if not isinstance(entry, dict):
            raise UsageError(f"{where}: tres has {entry!r}, which is no object")
        name = "/".join(str(entry[key]) for key in ("type", "name") if entry.get(key))
        counted[name] = _plain(entry.get("count"), f"tres {name}", where) or 0.0
    eligible = _plain(time.get("eligible"), "time.eligible", where)
    minutes = _plain(time.get("limit"), "time.limit", where)
    return Record(
        job=str(job.get("job_id", "")),
        eligible=eligible or _plain(time.get("submission"), "time.submission", where),
        elapsed=_plain(time.get("elapsed"), "time.elapsed", where),
        nodes=int(nodes),
        tres=counted,
        limit=minutes * 60 if minutes else None,
        state=" ".join(map(str, state)) if isinstance(state, list) else str(state),
    )


def _mapping(job: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    found = job.get(name)
    if not isinstance(found, dict):
        raise UsageError(f"{where}: {name} is {found!r}; sacct --json has an object there")
    return found


def _plain(value: Any, name: str, where: str) -> float | None:
    """A number of either age; None when it is not set or infinite."""
    if isinstance(value, dict):
        if not value.get("set") or value.get("infinite"):
            return None
        value = value.get("number")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise UsageError(f"{where}: {name} is {value!r}, which is no number from 0")
    # 22.05 prints Slurm's "no value" as the number that stands for it.
    return None if value in {0xFFFFFFFE, 0xFFFFFFFF} else float(value)
