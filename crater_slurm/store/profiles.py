"""Profiles as rows: a few queries for any number of nodes, never one per node.

A large cluster has thousands of nodes of few makes, so equal parts (a link, a set of precisions,
a provenance) are made once and shared; they are immutable.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from crater_slurm.model.profile import Method, NodeProfile, NvLink, Provenance
from crater_slurm.store import rows as rows_of
from crater_slurm.store.tables import (
    Base,
    DimmRow,
    GpuRow,
    NodeRow,
    NumaNodeRow,
    NvLinkRow,
    NvmeRow,
    PciDeviceRow,
    ProvenanceRow,
)

_PART_TABLES = (NumaNodeRow, GpuRow, NvLinkRow, NvmeRow, PciDeviceRow, DimmRow)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: Names in one IN (...): below every database's limit on parameters.
_CHUNK = 500
_PORTION = 10_000

#: Restricts a query to some nodes, given the column that holds the node's name.
Where = Callable[[Any, Any], Any]


def digest(data: Mapping[str, Any]) -> str:
    """The same for the data of equal profiles, whatever the order of their provenance."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digests(connection: Connection, names: Sequence[str]) -> dict[str, str]:
    """Digests of those of the nodes that are stored."""
    found: dict[str, str] = {}
    for chunk in chunks(names):
        query = select(NodeRow.name, NodeRow.digest).where(NodeRow.name.in_(chunk))
        found.update((name, value) for name, value in connection.execute(query))
    return found


def remove(connection: Connection, names: Sequence[str]) -> int:
    """Deletes the nodes; their parts go with them. Returns how many there were."""
    return sum(
        connection.execute(delete(NodeRow).where(NodeRow.name.in_(chunk))).rowcount
        for chunk in chunks(names)
    )


def write(
    connection: Connection,
    profiles: Mapping[str, NodeProfile],
    sums: Mapping[str, str],
    version: int,
) -> None:
    """Replaces the profiles whole. ``sums`` are their digests, ``version`` the new one."""
    remove(connection, list(profiles))
    rows: dict[type[Base], list[dict[str, Any]]] = defaultdict(list)
    for profile in profiles.values():
        rows[NodeRow].append(_node_row(profile, sums[profile.name], version))
        for kind, row in (*rows_of.part_rows(profile), *_provenance_rows(profile)):
            rows[kind].append({"node": profile.name, **row})
    for table in (NodeRow, *_PART_TABLES, ProvenanceRow):
        if rows[table]:
            connection.execute(insert(table), rows[table])


def read(
    connection: Connection, where: Where = lambda query, _: query, *, topology: bool = True
) -> list[NodeProfile]:
    """The profiles of the nodes that ``where`` leaves, by name.

    Without ``topology`` the PCI devices and memory modules are left out: most of a large cluster's
    rows, and nothing that a decision looks at.
    """
    with _uncollected():
        return _read(connection, where, topology)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: it would look again and again through a million objects
    that all stay, which takes as long as making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read(connection: Connection, where: Where, topology: bool) -> list[NodeProfile]:
    numa = _grouped(connection, rows_of.NUMA_NODE, where)
    links = _read_nvlinks(connection, where)
    gpus = _grouped(connection, rows_of.GPU, where, nvlinks=links)
    nvmes = _grouped(connection, rows_of.NVME, where)
    devices = _grouped(connection, rows_of.PCI_DEVICE, where) if topology else {}
    dimms = _grouped(connection, rows_of.DIMM, where) if topology else {}
    provenance = _read_provenance(connection, where)
    cpu, software = rows_of.CPU, rows_of.SOFTWARE
    names = ("name", "memory_mib", "cache_gb", "source_method", "source_time_us")
    split = len(names) + len(software.columns)
    columns = (*names, *software.columns, *(f"cpu_{name}" for name in cpu.columns))
    query = where(select(*_columns(NodeRow, columns)), NodeRow.name)
    found = []
    for row in _rows(connection, query):
        name, memory_mib, cache_gb, method, time_us = row[: len(names)]
        found.append(
            NodeProfile(
                name=name,
                cpu=cpu.read(row[split:]),
                numa_nodes=tuple(numa.get(name, ())),
                gpus=tuple(gpus.get(name, ())),
                nvmes=tuple(nvmes.get(name, ())),
                pci_devices=tuple(devices.get(name, ())),
                dimms=tuple(dimms.get(name, ())),
                software=software.read(row[len(names) : split]),
                memory_mib=memory_mib,
                cache_gb=cache_gb,
                source=Provenance(Method(method), from_us(time_us)),
                provenance=provenance.get(name, {}),
            )
        )
    return sorted(found, key=lambda profile: profile.name)


def chunks(names: Sequence[str]) -> Iterable[Sequence[str]]:
    """The names in portions that fit one query."""
    for start in range(0, len(names), _CHUNK):
        yield names[start : start + _CHUNK]


def to_us(time: datetime | None) -> int | None:
    """Microseconds since 1970, exactly; a time without zone is UTC."""
    if time is None:
        return None
    zoned = time if time.tzinfo else time.replace(tzinfo=UTC)
    return (zoned - _EPOCH) // _MICROSECOND


def from_us(time_us: int | None) -> datetime | None:
    """The time of so many microseconds since 1970, in UTC."""
    return None if time_us is None else _EPOCH + timedelta(microseconds=time_us)


def _columns(table: type[Base], names: Iterable[str]) -> list[Any]:
    return [getattr(table, name) for name in names]


def _grouped(
    connection: Connection,
    part: rows_of.Part,
    where: Where,
    **more: Mapping[tuple[str, int], Sequence[Any]],
) -> dict[str, list[Any]]:
    """Parts of one kind, by node and in their order. ``more`` are lists that other tables hold."""
    table: Any = part.table
    columns = _columns(table, ("node", "position", *part.columns))
    found: dict[str, list[Any]] = defaultdict(list)
    query = where(select(*columns).order_by(table.position), table.node)
    for row in _rows(connection, query):
        lists = {name: tuple(values.get((row[0], row[1]), ())) for name, values in more.items()}
        found[row[0]].append(part.read(row[2:], **lists))
    return found


def _read_nvlinks(connection: Connection, where: Where) -> dict[tuple[str, int], list[NvLink]]:
    found: dict[tuple[str, int], list[NvLink]] = defaultdict(list)
    columns = (NvLinkRow.node, NvLinkRow.gpu, NvLinkRow.peers, NvLinkRow.bandwidth_gb_s)
    query = where(select(*columns).order_by(NvLinkRow.position), NvLinkRow.node)
    for node, gpu, peers, bandwidth in _rows(connection, query):
        found[node, gpu] += rows_of.nvlinks(peers, bandwidth)
    return found


def _read_provenance(connection: Connection, where: Where) -> dict[str, dict[str, Provenance]]:
    found: dict[str, dict[str, Provenance]] = defaultdict(dict)
    columns = _columns(ProvenanceRow, ("node", "method", "time_us", "is_override", "paths"))
    query = where(select(*columns), ProvenanceRow.node)
    for node, method, time_us, override, paths in _rows(connection, query):
        entry = Provenance(Method(method), from_us(time_us), bool(override))
        found[node].update(dict.fromkeys(_words(paths), entry))
    return found


@lru_cache(maxsize=1024)
def _words(text: str) -> list[str]:
    return text.split(" ")


def _rows(connection: Connection, query: Any) -> Iterator[Sequence[Any]]:
    """The rows of a query, fetched by the thousand: one by one costs three times as much."""
    for portion in connection.execute(query).partitions(_PORTION):
        yield from portion


def _node_row(profile: NodeProfile, sum_: str, version: int) -> dict[str, Any]:
    return {
        "name": profile.name,
        "version": version,
        "digest": sum_,
        "source_method": profile.source.method.value,
        "source_time_us": to_us(profile.source.time),
        "memory_mib": profile.memory_mib,
        "cache_gb": profile.cache_gb,
        **rows_of.SOFTWARE.write(profile.software),
        **{f"cpu_{name}": value for name, value in rows_of.CPU.write(profile.cpu).items()},
    }


def _provenance_rows(profile: NodeProfile) -> Iterable[tuple[type[Base], dict[str, Any]]]:
    moments: dict[Provenance, list[str]] = defaultdict(list)
    for path in sorted(profile.provenance):
        moments[profile.provenance[path]].append(path)
    for i, (entry, paths) in enumerate(moments.items()):
        yield (
            ProvenanceRow,
            {
                "position": i,
                "method": entry.method.value,
                "time_us": to_us(entry.time),
                "paths": " ".join(paths),
                "is_override": entry.override or None,
            },
        )
