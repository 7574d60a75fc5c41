"""Profiles and decisions as plain YAML or JSON data, and back.

Profiles are read strictly, since people write them: an unknown key, a wrong type, a CPU in two
NUMA nodes or an absurd number is refused with its path. Decisions are read tolerantly, since only
crater writes them, and an older ``crater explain`` must show what a newer scheduler decided.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from typing import Any, cast

from crater_slurm.errors import StoreError, UsageError
from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.plan import Condition, Decision, Mode, Plan, Verdict
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
from crater_slurm.store import strict

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8", "int4")
_PATH_PART = re.compile(r"([a-z_]+)(?:\[(\d{1,4})\])?")
_NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def _node_name(value: object, path: str) -> str:
    if not isinstance(value, str) or not _NODE_NAME.fullmatch(value):
        raise strict.refuse(path, value, "a node name such as gn01")
    return value


def _method(value: object, path: str) -> Method:
    if value not in list(Method):
        raise strict.refuse(path, value, f"one of {', '.join(Method)}")
    return Method(cast(str, value))


def _provenance(value: object, path: str) -> Provenance:
    return strict.build(Provenance, _PROVENANCE, value, path)


def _nvlink(value: object, path: str) -> NvLink:
    return strict.build(NvLink, _NVLINK, value, path)


def _gpu(value: object, path: str) -> Gpu:
    return strict.build(Gpu, _GPU, value, path)


def _numa_node(value: object, path: str) -> NumaNode:
    return strict.build(NumaNode, _NUMA_NODE, value, path)


def _cpu(value: object, path: str) -> Cpu:
    return strict.build(Cpu, _CPU, value, path)


def _nvme(value: object, path: str) -> Nvme:
    return strict.build(Nvme, _NVME, value, path)


def _paths(value: object, path: str) -> dict[str, Provenance]:
    return {
        key: _provenance(entry, f"{path}.{key}")
        for key, entry in strict.mapping(value, path).items()
    }


# The upper bounds are a few times above any hardware: they catch a wrong unit, not a new product.
_NUMA_ID = strict.whole(0, 1023, "(leave it out when it is not known)")
_GPU_INDEX = strict.whole(0, 1023)
_IOPS = strict.whole(0, 10**9, "IOPS")
_PROVENANCE: dict[str, strict.Reader] = {"method": _method, "time": strict.moment}
_NVLINK: dict[str, strict.Reader] = {
    "peer": _GPU_INDEX,
    "bandwidth_gb_s": strict.number(0, 100_000, "GB/s"),
}
_GPU: dict[str, strict.Reader] = {
    "index": _GPU_INDEX,
    "model": strict.text,
    "gres_type": strict.text,
    "uuid": strict.text,
    "pci_bus_id": strict.text,
    "numa_node": _NUMA_ID,
    "sm_count": strict.whole(1, 10_000),
    "tensor_cores": strict.flag,
    "memory_mib": strict.whole(1, 2**24, "MiB"),
    "memory_bandwidth_gb_s": strict.number(0, 100_000, "GB/s", above=True),
    "precisions": strict.words(PRECISIONS),
    "compute_capability": strict.text,
    "nvlinks": strict.sequence(_nvlink),
    "mig_capable": strict.flag,
    "mig_instances": strict.sequence(strict.text),
}
_NUMA_NODE: dict[str, strict.Reader] = {
    "id": strict.whole(0, 1023),
    "cpus": strict.cpulist,
    "socket": strict.whole(0, 1023),
    "memory_mib": strict.whole(0, 2**31, "MiB"),
    "memory_bandwidth_gb_s": strict.number(0, 20_000, "GB/s", above=True),
    "distances": strict.sequence(strict.whole(0, 255)),
}
_CPU: dict[str, strict.Reader] = {
    "model": strict.text,
    "arch": strict.text,
    "sockets": strict.whole(1, 1024),
    "cores_per_socket": strict.whole(1, 8192),
    "threads_per_core": strict.whole(1, 16),
    "avx": strict.words(),
}
_NVME: dict[str, strict.Reader] = {
    "name": strict.text,
    "stable_id": strict.text,
    "model": strict.text,
    "size_gb": strict.whole(0, 10**6, "GB"),
    "numa_node": _NUMA_ID,
    "random_read_iops": _IOPS,
    "random_write_iops": _IOPS,
    "read_latency_us": strict.number(0, 10**7, "µs", above=True),
    "iops_stability_ratio": strict.number(0, 1),
    "sequential_write_mb_s": strict.number(0, 10**6, "MB/s"),
}
_PROFILE: dict[str, strict.Reader] = {
    "name": _node_name,
    "cpu": _cpu,
    "numa_nodes": strict.sequence(_numa_node),
    "gpus": strict.sequence(_gpu),
    "nvmes": strict.sequence(_nvme),
    "memory_mib": strict.whole(1, 2**31, "MiB"),
    "cache_gb": strict.whole(0, 10**7, "GB"),
    "source": _provenance,
    "provenance": _paths,
}
#: The readers of each class: one entry per field.
READERS: dict[type, dict[str, strict.Reader]] = {
    Provenance: _PROVENANCE,
    NvLink: _NVLINK,
    Gpu: _GPU,
    NumaNode: _NUMA_NODE,
    Cpu: _CPU,
    Nvme: _NVME,
    NodeProfile: _PROFILE,
}


def profile_to_dict(profile: NodeProfile) -> dict[str, Any]:
    """The profile as YAML or JSON data: unknown values left out, CPUs as kernel lists."""
    data = cast("dict[str, Any]", _plain(profile))
    for entry, node in zip(data.get("numa_nodes", ()), profile.numa_nodes, strict=False):
        entry["cpus"] = format_cpulist(node.cpus)
    data.setdefault("numa_nodes", [])
    return data


def profile_from_dict(data: Mapping[str, Any], name: str | None = None) -> NodeProfile:
    """The profile of such data; ``name`` wins over the data's own.

    Raises UsageError with node, path and value for anything that is unknown, of the wrong type,
    out of bounds or in contradiction with the rest.
    """
    entries = dict(strict.mapping(data, "profile"))
    if name is not None:
        entries["name"] = name
    label = entries.get("name")
    where = f"{label}:" if isinstance(label, str) and _NODE_NAME.fullmatch(label) else "profile:"
    if where == "profile:":
        _node_name(label, "profile: name")
    profile = strict.build(NodeProfile, _PROFILE, entries, where)
    check_profile(profile)
    return profile


def check_profile(profile: NodeProfile) -> None:
    """UsageError when the parts of a profile contradict each other."""
    where = f"{profile.name}:"
    ids = [node.id for node in profile.numa_nodes]
    _unique(ids, f"{where} numa_nodes", "id")
    _unique([gpu.index for gpu in profile.gpus], f"{where} gpus", "index")
    _unique([nvme.name for nvme in profile.nvmes], f"{where} nvmes", "name")
    _check_cpus(profile, where)
    devices = [(f"gpus[{i}]", gpu.numa_node) for i, gpu in enumerate(profile.gpus)]
    devices += [(f"nvmes[{i}]", nvme.numa_node) for i, nvme in enumerate(profile.nvmes)]
    for path, numa in devices:
        if numa is not None and numa not in ids:
            raise UsageError(f"{where} {path}.numa_node: {numa} is not in numa_nodes {ids}")
    _check_nvlinks(profile, where)
    if profile.provenance:
        _check_paths(profile, where)


def _unique(values: Iterable[object], path: str, key: str) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise UsageError(f"{path}: {key} {value!r} is there twice")
        seen.add(value)


def _check_cpus(profile: NodeProfile, where: str) -> None:
    owner: dict[int, int] = {}
    for node in profile.numa_nodes:
        twice = [cpu for cpu in node.cpus if cpu in owner]
        if twice:
            raise UsageError(
                f"{where} numa_nodes: CPUs {format_cpulist(twice)} are in node "
                f"{owner[twice[0]]} and in node {node.id}; each CPU has one NUMA node"
            )
        owner.update(dict.fromkeys(node.cpus, node.id))
    cpu = profile.cpu
    threads = cpu.cores * cpu.threads_per_core
    if len(owner) > threads:
        raise UsageError(
            f"{where} numa_nodes list {len(owner)} CPUs, but cpu has only {threads} "
            f"({cpu.sockets} sockets x {cpu.cores_per_socket} cores x {cpu.threads_per_core} "
            "threads)"
        )


def _check_nvlinks(profile: NodeProfile, where: str) -> None:
    indices = [gpu.index for gpu in profile.gpus]
    for i, gpu in enumerate(profile.gpus):
        _unique((link.peer for link in gpu.nvlinks), f"{where} gpus[{i}].nvlinks", "peer")
        for link in gpu.nvlinks:
            if link.peer == gpu.index or link.peer not in indices:
                raise UsageError(
                    f"{where} gpus[{i}].nvlinks: peer {link.peer} is not another GPU of {indices}"
                )


def _check_paths(profile: NodeProfile, where: str) -> None:
    for path in profile.provenance:
        if not _has_path(profile, path):
            raise UsageError(f"{where} provenance.{path}: the profile has no value of that path")


def _has_path(profile: NodeProfile, path: str) -> bool:
    """Whether ``gpus[0].memory_mib`` or a part such as ``gpus[0]`` is in the profile."""
    item: object = profile
    for part in path.split("."):
        match = _PATH_PART.fullmatch(part)
        if match is None or match.group(1) not in READERS.get(type(item), {}):
            return False
        if item is profile and match.group(1) in ("name", "source", "provenance"):
            return False
        item = getattr(item, match.group(1))
        if match.group(2) is not None:
            if not isinstance(item, tuple) or int(match.group(2)) >= len(item):
                return False
            item = item[int(match.group(2))]
    return True


def _plain(item: object) -> object:
    """Dataclasses, sets, tuples, enums and times as JSON knows them; None and () fields go."""
    if item is None or type(item) in (str, int, float, bool):
        return item
    if isinstance(item, Enum):
        return item.value
    if isinstance(item, tuple | list):
        return [_plain(value) for value in item]
    if isinstance(item, Mapping):
        return {str(key): _plain(value) for key, value in item.items()}
    if isinstance(item, frozenset | set):
        return sorted(_plain(value) for value in item)  # type: ignore[type-var]
    if isinstance(item, datetime):
        return iso(item)
    if dataclasses.is_dataclass(item):
        return {
            name: _plain(value)
            for name in _field_names(type(item))  # type: ignore[arg-type]
            if (value := getattr(item, name)) is not None and value != () and value != {}
        }
    return str(item)


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(entry.name for entry in dataclasses.fields(kind))


def iso(time: datetime) -> str:
    """ISO 8601 in UTC with a Z; a time without zone is UTC."""
    zoned = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    return zoned.isoformat().replace("+00:00", "Z")


def decision_to_dict(decision: Decision) -> dict[str, Any]:
    """The decision as JSON data, complete."""
    return cast("dict[str, Any]", _plain(decision))


def decision_from_dict(data: Mapping[str, Any]) -> Decision:
    """The decision of such data; keys that this version doesn't know are left out.

    Raises StoreError when what makes a decision is missing or of a kind unknown here.
    """
    fields = _known(Decision, data)
    try:
        fields["verdict"] = Verdict(fields["verdict"])
        fields["mode"] = Mode(fields["mode"])
        fields["conditions"] = tuple(
            Condition(
                **{**entry, "failed_examples": tuple(entry.get("failed_examples", ()))},
            )
            for entry in (_known(Condition, item) for item in fields.get("conditions", ()))
        )
        fields["excluded"] = tuple(
            (str(nodes), int(count), str(reason))
            for nodes, count, reason, *_ in fields.get("excluded", ())
        )
        for name in ("smallest_change", "messages"):
            fields[name] = tuple(fields.get(name, ()))
        if fields.get("plan") is not None:
            fields["plan"] = Plan(**_known(Plan, fields["plan"]))
        return Decision(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"can't read the decision {data.get('id', '?')}: {error}; it may come from a newer "
            "crater-slurm"
        ) from error


def _known(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    names = _field_names(kind)
    return {key: value for key, value in data.items() if key in names}
