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
from itertools import groupby
from typing import Any, TypeVar

from sqlalchemy import Connection, delete, insert, select

from crater_slurm.model.cpuset import format_cpulist, parse_cpulist
from crater_slurm.model.profile import (
    Cpu,
    Gpu,
    Method,
    NodeProfile,
    NumaNode,
    NvLink,
    Nvme,
    Provenance,
)
from crater_slurm.store.tables import (
    Base,
    GpuRow,
    NodeRow,
    NumaNodeRow,
    NvLinkRow,
    NvmeRow,
    ProvenanceRow,
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: Names in one IN (...): below every database's limit on parameters.
_CHUNK = 500
_PORTION = 10_000

# Fields that are one plain column each; the others are converted below.
_CPU = ("model", "arch", "sockets", "cores_per_socket", "threads_per_core")
_NUMA = ("id", "socket", "memory_mib", "memory_bandwidth_gb_s")
_GPU = (
    "index",
    "model",
    "gres_type",
    "uuid",
    "pci_bus_id",
    "numa_node",
    "sm_count",
    "tensor_cores",
    "memory_mib",
    "memory_bandwidth_gb_s",
    "compute_capability",
    "mig_capable",
)
_NVME = (
    "name",
    "stable_id",
    "model",
    "size_gb",
    "numa_node",
    "random_read_iops",
    "random_write_iops",
    "read_latency_us",
    "iops_stability_ratio",
    "sequential_write_mb_s",
)

T = TypeVar("T")
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
        for kind, row in _part_rows(profile):
            rows[kind].append({"node": profile.name, **row})
    for table in (NodeRow, NumaNodeRow, GpuRow, NvLinkRow, NvmeRow, ProvenanceRow):
        if rows[table]:
            connection.execute(insert(table), rows[table])


def read(connection: Connection, where: Where = lambda query, _: query) -> list[NodeProfile]:
    """The profiles of the nodes that ``where`` leaves, by name."""
    with _uncollected():
        return _read(connection, where)


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


def _read(connection: Connection, where: Where) -> list[NodeProfile]:
    numa = _grouped(connection, NumaNodeRow, ("cpus", "distances", *_NUMA), where, _numa_node)
    links = _read_nvlinks(connection, where)

    def make_gpu(node: str, position: int, row: Sequence[Any]) -> Gpu:
        return _gpu(row, tuple(links.get((node, position), ())))

    gpus = _grouped(connection, GpuRow, ("precisions", "mig_instances", *_GPU), where, make_gpu)
    nvmes = _grouped(connection, NvmeRow, _NVME, where, _nvme)
    provenance = _read_provenance(connection, where)
    cpu = (*(f"cpu_{name}" for name in _CPU), "cpu_avx")
    names = ("name", "memory_mib", "cache_gb", "source_method", "source_time_us", *cpu)
    query = where(select(*_columns(NodeRow, names)), NodeRow.name)
    found = []
    for name, memory_mib, cache_gb, method, time_us, *cpu_values, avx in _rows(connection, query):
        found.append(
            NodeProfile(
                name=name,
                cpu=Cpu(**dict(zip(_CPU, cpu_values, strict=True)), avx=_set(avx)),
                numa_nodes=tuple(numa.get(name, ())),
                gpus=tuple(gpus.get(name, ())),
                nvmes=tuple(nvmes.get(name, ())),
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
    table: Any,
    names: Sequence[str],
    where: Where,
    make: Callable[[str, int, Sequence[Any]], T],
) -> dict[str, list[T]]:
    """Objects made from the rows of a table, by node and in their order."""
    columns = _columns(table, ("node", "position", *names))
    found: dict[str, list[T]] = defaultdict(list)
    query = where(select(*columns).order_by(table.position), table.node)
    for row in _rows(connection, query):
        found[row[0]].append(make(row[0], row[1], row[2:]))
    return found


def _numa_node(_node: str, _position: int, row: Sequence[Any]) -> NumaNode:
    cpus, distances, *values = row
    return NumaNode(
        **dict(zip(_NUMA, values, strict=True)),
        cpus=_cpus(cpus),
        distances=tuple(int(part) for part in distances.split(",") if part),
    )


@lru_cache(maxsize=1024)
def _cpus(text: str) -> tuple[int, ...]:
    return parse_cpulist(text)


def _gpu(row: Sequence[Any], nvlinks: tuple[NvLink, ...]) -> Gpu:
    precisions, mig_instances, *values = row
    return Gpu(
        **dict(zip(_GPU, values, strict=True)),
        precisions=_set(precisions),
        mig_instances=tuple(json.loads(mig_instances)) if mig_instances != "[]" else (),
        nvlinks=nvlinks,
    )


def _nvme(_node: str, _position: int, row: Sequence[Any]) -> Nvme:
    return Nvme(**dict(zip(_NVME, row, strict=True)))


def _read_nvlinks(connection: Connection, where: Where) -> dict[tuple[str, int], list[NvLink]]:
    found: dict[tuple[str, int], list[NvLink]] = defaultdict(list)
    columns = (NvLinkRow.node, NvLinkRow.gpu, NvLinkRow.peers, NvLinkRow.bandwidth_gb_s)
    query = where(select(*columns).order_by(NvLinkRow.position), NvLinkRow.node)
    for node, gpu, peers, bandwidth in _rows(connection, query):
        found[node, gpu] += _nvlinks(peers, bandwidth)
    return found


@lru_cache(maxsize=1024)
def _nvlinks(peers: str, bandwidth: float | None) -> tuple[NvLink, ...]:
    return tuple(NvLink(int(peer), bandwidth) for peer in peers.split(","))


def _read_provenance(connection: Connection, where: Where) -> dict[str, dict[str, Provenance]]:
    found: dict[str, dict[str, Provenance]] = defaultdict(dict)
    columns = _columns(ProvenanceRow, ("node", "method", "time_us", "paths"))
    for node, method, time_us, paths in _rows(
        connection, where(select(*columns), ProvenanceRow.node)
    ):
        entry = Provenance(Method(method), from_us(time_us))
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
        **{f"cpu_{name}": getattr(profile.cpu, name) for name in _CPU},
        "cpu_avx": _joined(profile.cpu.avx),
    }


def _part_rows(profile: NodeProfile) -> Iterable[tuple[type[Base], dict[str, Any]]]:
    for i, node in enumerate(profile.numa_nodes):
        yield (
            NumaNodeRow,
            {
                "position": i,
                **_values(node, _NUMA),
                "cpus": format_cpulist(node.cpus),
                "distances": ",".join(map(str, node.distances)),
            },
        )
    for i, gpu in enumerate(profile.gpus):
        yield (
            GpuRow,
            {
                "position": i,
                **_values(gpu, _GPU),
                "precisions": _joined(gpu.precisions),
                "mig_instances": json.dumps(gpu.mig_instances),
            },
        )
        groups = groupby(gpu.nvlinks, key=lambda link: link.bandwidth_gb_s)
        for k, (bandwidth, links) in enumerate(groups):
            peers = ",".join(str(link.peer) for link in links)
            row = {"gpu": i, "position": k, "peers": peers, "bandwidth_gb_s": bandwidth}
            yield NvLinkRow, row
    for i, nvme in enumerate(profile.nvmes):
        yield NvmeRow, {"position": i, **_values(nvme, _NVME)}
    moments: dict[Provenance, list[str]] = defaultdict(list)
    for path in sorted(profile.provenance):
        moments[profile.provenance[path]].append(path)
    for i, (entry, paths) in enumerate(moments.items()):
        row = {"method": entry.method.value, "time_us": to_us(entry.time), "paths": " ".join(paths)}
        yield ProvenanceRow, {"position": i, **row}


def _values(item: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(item, name) for name in names}


def _joined(words: frozenset[str] | None) -> str | None:
    return None if words is None else ",".join(sorted(words))


@lru_cache(maxsize=1024)
def _set(text: str | None) -> frozenset[str] | None:
    return None if text is None else frozenset(word for word in text.split(",") if word)
