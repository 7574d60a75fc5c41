"""Reads a cluster's own history: ``sacct --parsable2``, ``sacct --json``, ``jobcomp/filetxt``.

All three become records, and one function makes a task of a record. Steps are left out, each task
of an array is a job of its own, and a job of several nodes takes the same of each of them. What
never ran is left out and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from crater_slurm.errors import UsageError
from crater_slurm.model.units import parse_seconds
from crater_slurm.placement.packing.kernels import WHOLE
from crater_slurm.simulate import sacct_json
from crater_slurm.simulate.record import Record
from crater_slurm.simulate.trace import Nodes, Notes, Task

_NEVER = ("", "unknown", "none", "n/a", "invalid", "(null)", "not set")
_NO_LIMIT = (*_NEVER, "unlimited", "partition_limit", "infinite", "no_val")
_MIB = {"K": 2**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20, "P": 2.0**30, "": 1.0}
_REQ_MEM = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([KMGTP]?)([nc]?)")
_AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([KMGTP]?)")
#: Larger numbers of seconds than this are no time (the year 5138).
_LATEST = 1e11


def tasks(file: Path, nodes: Nodes, notes: Notes, *, shards: int = 100) -> Iterator[Task]:
    """Tasks of a dump in any of the three forms; ``shards`` is how many a GPU is cut into."""
    known = frozenset(nodes.model_names)
    gpus = False
    for where, record in records(file):
        if record is None:
            notes.count("steps of jobs left out")
            continue
        gpus = gpus or any(name.startswith("gres/") for name in record.tres)
        task = _task(record, nodes, known, notes, shards, where)
        if task is not None:
            yield task
    if not gpus:
        notes.say("GPUs: none recorded; Slurm records them with AccountingStorageTRES=gres/gpu")


def records(file: Path) -> Iterator[tuple[str, Record | None]]:
    """Place and record of each row (None for a step). UsageError with file, line and value."""
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            first = opened.read(1)
            while first.isspace():
                first = opened.read(1)
            opened.seek(0)
            if first == "{":
                yield from sacct_json.records(opened, file)
            elif _starts_with_job(opened):
                yield from _completed(opened, file)
            else:
                yield from _parsable(opened, file)
    except OSError as error:
        raise UsageError(f"can't read {file}: {error.strerror}") from error


def _task(
    record: Record, nodes: Nodes, known: frozenset[str], notes: Notes, shards: int, where: str
) -> Task | None:
    """The task of a record; None, with a note, for a job that never ran."""
    state = record.state.split()[0].upper() if record.state.split() else ""
    if record.elapsed is None or record.eligible is None:
        notes.count("jobs that never ran left out")
        return None
    if record.elapsed == 0 and state in {"PENDING", "CANCELLED", "REQUEUED", "RESV_DEL_HOLD"}:
        notes.count("jobs that never ran left out")
        return None
    if state in {"RUNNING", "SUSPENDED", "COMPLETING"}:
        notes.count("jobs still running taken to end when the dump was made")
    per_node = {name: -(-value // record.nodes) for name, value in record.tres.items()}
    cpus = int(per_node.get("cpu", 0)) or 1
    models = [name.partition(":")[2] for name in per_node if name.startswith("gres/gpu:")]
    unknown = [model for model in models if model not in known]
    if unknown:
        notes.count(f"GPU type {unknown[0]} is of no node, any GPU is taken")
    gpus, milli = _gpus(per_node, shards, where)
    if record.nodes > 1:
        notes.count("several nodes that start together, each with the same share, rounded up")
    if not record.tres.get("mem"):
        notes.count("memory: not recorded, none is taken")
    return Task(
        name=record.job,
        need=nodes.need(
            cpu_milli=cpus * 1000,
            memory_mib=int(-(-per_node.get("mem", 0) // 1)),
            gpus=gpus,
            gpu_milli=milli,
            models=[] if unknown else models,
        ),
        arrival=record.eligible,
        duration=record.elapsed,
        limit=record.limit,
        nodes=record.nodes,
    )


def _gpus(tres: Mapping[str, float], shards: int, where: str) -> tuple[int, int]:
    """GPUs and milli-GPU of each on one node; shards are a part of one GPU, or whole ones."""
    typed = sum(value for name, value in tres.items() if name.startswith("gres/gpu:"))
    count = int(max(tres.get("gres/gpu", 0), typed))
    part = int(tres.get("gres/shard", 0))
    if count > 64 or part > 64 * shards:
        raise UsageError(f"{where}: the job has {count or part} GPUs or shards a node; at most 64")
    if count or not part:
        return count, WHOLE
    if part >= shards:
        return -(-part // shards), WHOLE
    return 1, -(-part * WHOLE // shards)


def _parsable(opened: TextIO, file: Path) -> Iterator[tuple[str, Record | None]]:
    """Rows of ``sacct --parsable2`` (or ``--parsable``) with its header."""
    header = [name.strip().lower() for name in opened.readline().rstrip("\n").split("|")]
    _require(header, file)
    for number, line in enumerate(opened, 2):
        text = line.rstrip("\n")
        if not text.strip():
            continue
        where = f"{file}:{number}"
        values = text.split("|")
        if len(values) != len(header):
            raise UsageError(
                f"{where}: {len(values)} fields, but the header has {len(header)}; leave out "
                "fields that users write (JobName, Comment) or use sacct --json"
            )
        row = {name: value.strip() for name, value in zip(header, values, strict=True)}
        yield where, None if "." in row["jobid"] else _row(row, where)


def _require(header: list[str], file: Path) -> None:
    ways = (
        ("jobid",), ("eligible", "submit"), ("elapsedraw", "elapsed", "end"),
        ("reqtres", "alloctres", "reqcpus", "alloccpus", "ncpus"),
    )  # fmt: skip
    for names in ways:
        if not set(names) & set(header):
            raise UsageError(
                f"{file} has no column {' or '.join(names)}; make it with sacct --allusers "
                "--parsable2 --format=JobID,Submit,Eligible,Start,End,ElapsedRaw,ReqTRES,AllocTRES,"
                "NNodes,TimelimitRaw,Partition,State"
            )


def _row(row: Mapping[str, str], where: str) -> Record:
    nodes = int(_number(row.get("nnodes") or "1", "NNodes", where)) or 1
    tres = _tres(row.get("reqtres", ""), where) or _tres(row.get("alloctres", ""), where)
    if "cpu" not in tres:
        cpus = next((row[name] for name in ("reqcpus", "alloccpus", "ncpus") if row.get(name)), "1")
        tres["cpu"] = _number(cpus, "CPUs", where)
    if "mem" not in tres:
        tres["mem"] = _req_mem(row.get("reqmem", ""), tres["cpu"], nodes, where)
    eligible = _time(row.get("eligible", ""), "Eligible", where)
    return Record(
        job=row["jobid"],
        eligible=eligible
        if eligible is not None
        else _time(row.get("submit", ""), "Submit", where),
        elapsed=_elapsed(row, where),
        nodes=nodes,
        tres=tres,
        limit=_limit(row, where),
        state=row.get("state", ""),
    )


def _elapsed(row: Mapping[str, str], where: str) -> float | None:
    if row.get("elapsedraw"):
        return _number(row["elapsedraw"], "ElapsedRaw", where)
    if row.get("elapsed"):
        return _span(row["elapsed"], "Elapsed", where)
    start = _time(row.get("start", ""), "Start", where)
    end = _time(row.get("end", ""), "End", where)
    return None if start is None or end is None else max(0.0, end - start)


def _limit(row: Mapping[str, str], where: str) -> float | None:
    minutes, clock = row.get("timelimitraw", ""), row.get("timelimit", "")
    if minutes.lower() not in _NO_LIMIT:
        return _number(minutes, "TimelimitRaw", where) * 60
    return None if clock.lower() in _NO_LIMIT else _span(clock, "Timelimit", where)


def _starts_with_job(opened: TextIO) -> bool:
    start = opened.read(6)
    opened.seek(0)
    return start == "JobId="


#: The fields in the order in which Slurm writes them. The job's name comes before and the working
#: directory after, and both may hold anything, so the fields are found as two runs of them.
_COMPLETED = re.compile(
    r"^JobId=(?P<job>\S+) .* ?JobState=(?P<state>\S+) Partition=\S* TimeLimit=(?P<limit>\S+) "
    r"StartTime=(?P<start>\S+) EndTime=(?P<end>\S+) NodeList=\S* NodeCnt=(?P<nodes>\S+) "
    r"ProcCnt=(?P<cpus>\S+) WorkDir=.*? (?:.* )?Tres=(?P<tres>\S*) .*"
    r"SubmitTime=(?P<submit>\S+) EligibleTime=(?P<eligible>\S+) "
)


def _completed(opened: TextIO, file: Path) -> Iterator[tuple[str, Record | None]]:
    """Lines of ``JobCompType=jobcomp/filetxt``."""
    for number, line in enumerate(opened, 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        found = _COMPLETED.match(line)
        if not found:
            raise UsageError(
                f"{where}: no line of jobcomp/filetxt (JobId= ... JobState= ... Tres= ... "
                f"EligibleTime=): {line.strip()[:80]!r}"
            )
        limit = found["limit"]
        row = {
            "jobid": found["job"],
            "state": found["state"],
            "timelimitraw": limit if limit.isdecimal() else "",
            "timelimit": "" if limit.isdecimal() else limit,
            "start": found["start"],
            "end": found["end"],
            "nnodes": found["nodes"],
            "alloccpus": found["cpus"],
            "alloctres": found["tres"],
            "submit": found["submit"],
            "eligible": found["eligible"],
        }
        yield where, _row(row, where)


def _tres(text: str, where: str) -> dict[str, float]:
    """``cpu=4,mem=16G,gres/gpu:a100=2`` as numbers, memory in MiB."""
    found: dict[str, float] = {}
    for item in text.split(",") if text.strip() else ():
        name, equals, amount = item.partition("=")
        match = _AMOUNT.fullmatch(amount)
        if not equals or not match:
            raise UsageError(f"{where}: TRES {item!r} is not NAME=AMOUNT with K, M, G, T or P")
        unit = match[2] if name == "mem" else ""
        found[name] = float(match[1]) * (_MIB[unit] if unit or name == "mem" else 1)
        if match[2] and name != "mem":
            found[name] *= {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[match[2]]
    return found


def _req_mem(text: str, cpus: float, nodes: int, where: str) -> float:
    """MiB of the whole job: ``4G``, and before 21.08 ``4Gn`` (a node) and ``4000Mc`` (a CPU)."""
    if not text or text == "0":
        return 0.0
    match = _REQ_MEM.fullmatch(text)
    if not match:
        raise UsageError(f"{where}: ReqMem is {text!r}; it should be like 16G, 16Gn or 4000Mc")
    return float(match[1]) * _MIB[match[2]] * {"": 1, "n": nodes, "c": cpus}[match[3]]


def _number(text: str, name: str, where: str) -> float:
    match = _AMOUNT.fullmatch(text.strip())
    if not match or match[2] not in {"", "K", "M"}:
        raise UsageError(f"{where}: {name} is {text!r}, which is no number from 0")
    return float(match[1]) * {"": 1, "K": 1000, "M": 1e6}[match[2]]


def _span(text: str, name: str, where: str) -> float:
    try:
        return float(parse_seconds(text.partition(".")[0]))
    except ValueError as error:
        raise UsageError(f"{where}: {name} is {text!r}; it should be like 1-02:03:04") from error


def _time(text: str, name: str, where: str) -> float | None:
    """A time as sacct prints it, taken as it stands (clock changes are not undone)."""
    if text.lower() in _NEVER:
        return None
    try:
        if text.isascii() and text.isdigit() and len(text) < 12:
            return float(text)
        value = datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{where}: {name} is {text!r}; it should be like 2025-01-31T08:00:00 (unset "
            "SLURM_TIME_FORMAT)"
        ) from error
    if not 0 <= value < _LATEST:
        raise UsageError(f"{where}: {name} is {text!r}, which is before 1970 or too far off")
    return value
