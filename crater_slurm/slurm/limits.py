"""Reads partitions' limits and reservations from ``scontrol``'s one-line records.

The text is the same from 22.05 to 26.05. What can't be read is no limit: only Slurm's own refusal
would then tell of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

from crater_slurm.errors import UsageError
from crater_slurm.model.cluster import Partition, Reservation
from crater_slurm.slurm import hostlist
from crater_slurm.slurm.records import parse_record

_NONE = {"", "(null)", "UNLIMITED", "NONE", "INFINITE", "Unknown", "n/a"}
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_MEMORY = re.compile(r"(\d+)([KMGT]?)")
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}


def partitions(text: str) -> tuple[Partition, ...]:
    """Partitions of ``scontrol -o show partition``."""
    return tuple(
        Partition(
            name=record["PartitionName"],
            state=record.get("State", "UP"),
            min_nodes=_number(record.get("MinNodes")) or 0,
            max_nodes=_number(record.get("MaxNodes")),
            max_time_minutes=_minutes(record.get("MaxTime")),
            default_time_minutes=_minutes(record.get("DefaultTime")),
            max_cpus_per_node=_number(record.get("MaxCPUsPerNode")),
            max_memory_per_node_mib=_mib(record.get("MaxMemPerNode")),
        )
        for record in _records(text, "PartitionName")
    )


def reservations(text: str) -> tuple[Reservation, ...]:
    """Reservations of ``scontrol -o show reservation`` that hold nodes."""
    found = []
    for record in _records(text, "ReservationName"):
        start, end = _epoch(record.get("StartTime")), _epoch(record.get("EndTime"))
        try:
            nodes = frozenset(hostlist.expand(_text(record.get("Nodes"))))
        except UsageError:
            continue
        if start is None or end is None or not nodes:
            continue
        found.append(
            Reservation(
                name=record["ReservationName"],
                start=start,
                end=end,
                nodes=nodes,
                flags=frozenset(filter(None, _text(record.get("Flags")).split(","))),
                whole_nodes="CoreIDs" not in record,
            )
        )
    return tuple(found)


def _records(text: str, key: str) -> Iterator[dict[str, str]]:
    for line in text.splitlines():
        record = parse_record(line)
        if record.get(key):
            yield record


def _text(value: str | None) -> str:
    return "" if value is None or value in _NONE else value


def _number(value: str | None) -> int | None:
    return int(value) if value and value.isascii() and value.isdigit() else None


def _minutes(value: str | None) -> int | None:
    """``1-02:00:00``, ``02:00:00`` or ``30:00`` as Slurm prints times, rounded up to minutes."""
    found = _TIME.fullmatch(_text(value))
    if found is None:
        return None
    days, *parts = (int(part) if part else None for part in found.groups())
    known = [part for part in parts if part is not None]
    if days is None and len(known) == 2:
        known.insert(0, 0)  # minutes and seconds
    hours, minutes, seconds = (*known, 0, 0)[:3]
    return ((days or 0) * 24 + hours) * 60 + minutes + (seconds > 0)


def _mib(value: str | None) -> int | None:
    found = _MEMORY.fullmatch(_text(value))
    return int(int(found.group(1)) * _MIB[found.group(2)]) if found else None


def _epoch(value: str | None) -> float | None:
    try:
        return datetime.fromisoformat(_text(value)).timestamp()
    except (ValueError, OverflowError):
        return None
