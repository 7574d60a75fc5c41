"""Values that an admin's files add to a profile: the ``gpu:``, ``cpu:`` and ``ssd:`` sections.

A file's value is declared unless the file says ``method: measured``. It never replaces a more
trusted value (the order is measured, derived, catalogue, declared) unless it says
``override: true``; what was not taken is told, never dropped in silence. Names ending in ``gbps``
mean GB/s, as the files that use them always did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from crater_slurm import catalogue
from crater_slurm.errors import UsageError
from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import Gpu, Method, NodeProfile, NumaNode, Nvme, Provenance
from crater_slurm.store import strict
from crater_slurm.store.diff import show_value
from crater_slurm.store.readers import READERS

SECTIONS = ("gpu", "cpu", "ssd")
_COMMON = ("method", "time", "override")

#: The files' names for fields of a profile; the fields' own names are accepted as well.
_GPU_NAMES = {
    "sm_count": "sm_count",
    "tensor_core_support": "tensor_cores",
    "tensor_cores": "tensor_cores",
    "memory_bandwidth_gbps": "memory_bandwidth_gb_s",
    "memory_bandwidth_gb_s": "memory_bandwidth_gb_s",
}
_NUMA_NAMES = {
    "id": "id",
    "cores": "cpus",
    "cpus": "cpus",
    "memory_bandwidth_gbps": "memory_bandwidth_gb_s",
    "memory_bandwidth_gb_s": "memory_bandwidth_gb_s",
}
_SSD_NAMES = {
    "latency_us": "read_latency_us",
    "ssd_latency_us": "read_latency_us",
    "read_latency_us": "read_latency_us",
    "iops_stability_ratio": "iops_stability_ratio",
    "ssd_iops_stability_ratio": "iops_stability_ratio",
    "random_read_iops": "random_read_iops",
    "random_write_iops": "random_write_iops",
    "seq_write_mb_s": "sequential_write_mb_s",
    "sequential_write_mb_s": "sequential_write_mb_s",
    "size_gb": "size_gb",
}
#: Switches the prober between io_uring and libaio; it says nothing about the drive.
_PROBE_SETTINGS = ("use_io_uring",)


@dataclass(frozen=True, slots=True)
class Entry:
    """Values for one GPU model, NUMA node or drive; ``key`` names it, ``path`` is in the file."""

    key: str
    path: str
    values: Mapping[str, Any]
    provenance: Provenance
    override: bool


@dataclass(frozen=True, slots=True)
class Overlay:
    """The sections of one file. GPUs apply to every node of the model, the others to one node."""

    gpus: tuple[Entry, ...] = ()
    numa_nodes: tuple[Entry, ...] = ()
    nvmes: tuple[Entry, ...] = ()

    @property
    def of_one_node(self) -> bool:
        return bool(self.numa_nodes or self.nvmes)


@dataclass(slots=True)
class _Patch:
    """A profile in the making: its new provenance, and what a person should know."""

    profile: NodeProfile
    provenance: dict[str, Provenance]
    warnings: list[str] = field(default_factory=list)
    kept: dict[str, list[str]] = field(default_factory=dict)
    """What was not taken, and of which parts: eight equal GPUs are one warning."""


def parse_overlay(data: Mapping[str, Any], where: str) -> Overlay:
    """The sections of a file's document; UsageError with ``where`` and path for what is unknown."""
    strict.check_keys(data, (*SECTIONS, *_COMMON), where)
    common = {key: data[key] for key in _COMMON if key in data}
    gpus, cpu, ssds = (
        strict.mapping(data.get(name) or {}, strict.join(where, name)) for name in SECTIONS
    )
    strict.check_keys(cpu, ("numa_nodes",), strict.join(where, "cpu"))
    nodes = cpu.get("numa_nodes") or []
    path = strict.join(where, "cpu") + ".numa_nodes"
    if not isinstance(nodes, list):
        raise strict.refuse(path, nodes, "a list such as [{id: 0, cores: [0-31]}]")
    overlay = Overlay(
        gpus=tuple(
            _entry(Gpu, _GPU_NAMES, key, value, strict.join(where, f"gpu.{key}"), common)
            for key, value in gpus.items()
        ),
        numa_nodes=tuple(
            _numa_entry(value, f"{path}[{i}]", common) for i, value in enumerate(nodes)
        ),
        nvmes=tuple(
            _entry(Nvme, _SSD_NAMES, key, value, strict.join(where, f"ssd.{key}"), common)
            for key, value in ssds.items()
        ),
    )
    _check_cores(overlay.numa_nodes, path)
    return overlay


def apply_overlay(overlay: Overlay, profile: NodeProfile) -> tuple[NodeProfile, list[str]]:
    """The profile with the overlay's values, and warnings for a person.

    Raises UsageError when the overlay speaks of a NUMA node, CPU or drive that isn't there.
    """
    patch = _Patch(profile, dict(profile.provenance))
    if overlay.gpus:
        _apply_gpus(overlay.gpus, patch)
    if overlay.numa_nodes:
        _apply_numa_nodes(overlay.numa_nodes, patch)
    if overlay.nvmes:
        _apply_nvmes(overlay.nvmes, patch)
    kept = [f"{told} ({', '.join(parts)})" for told, parts in patch.kept.items()]
    done = dataclasses.replace(patch.profile, provenance=patch.provenance)
    return done, patch.warnings + kept


def _entry(
    kind: type, names: Mapping[str, str], key: str, data: object, path: str, common: dict[str, Any]
) -> Entry:
    entries = {**common, **strict.mapping(data, path)}
    strict.check_keys(entries, (*names, *_COMMON, *(_PROBE_SETTINGS if kind is Nvme else ())), path)
    values: dict[str, Any] = {}
    for name, value in entries.items():
        if name in _PROBE_SETTINGS:
            strict.flag(value, f"{path}.{name}")
        if name not in names or value is None:
            continue
        target = names[name]
        if target in values:
            raise UsageError(f"{path}.{name}: {target} is given twice, under two names")
        values[target] = READERS[kind][target](value, f"{path}.{name}")
    source = {"method": Method.DECLARED.value} | {
        name: entries[name] for name in ("method", "time") if entries.get(name) is not None
    }
    provenance = strict.build(Provenance, READERS[Provenance], source, path)
    override = strict.flag(entries.get("override", False), f"{path}.override")
    return Entry(key, path, values, provenance, override)


def _numa_entry(data: object, path: str, common: dict[str, Any]) -> Entry:
    entry = _entry(NumaNode, _NUMA_NAMES, "", data, path, common)
    if "id" not in entry.values:
        raise UsageError(f"{path}: id is missing")
    return dataclasses.replace(entry, key=str(entry.values["id"]))


def _check_cores(entries: tuple[Entry, ...], path: str) -> None:
    owner: dict[int, str] = {}
    ids: set[str] = set()
    for entry in entries:
        if entry.key in ids:
            raise UsageError(f"{path}: id {entry.key} is there twice")
        ids.add(entry.key)
        cpus = entry.values.get("cpus", ())
        twice = [cpu for cpu in cpus if cpu in owner]
        if twice:
            raise UsageError(
                f"{path}: cores {format_cpulist(twice)} are in node {owner[twice[0]]} and in "
                f"node {entry.key}; each CPU has one NUMA node"
            )
        owner.update(dict.fromkeys(cpus, entry.key))


def _apply_gpus(entries: tuple[Entry, ...], patch: _Patch) -> None:
    gpus = list(patch.profile.gpus)
    for entry in entries:
        wanted = catalogue.model_id(entry.key)
        places = [i for i, gpu in enumerate(gpus) if catalogue.model_id(gpu.model) == wanted]
        if not places:
            models = ", ".join(sorted({gpu.model for gpu in gpus})) or "none"
            patch.warnings.append(
                f"{entry.path}: {patch.profile.name} has no such GPU; it has {models}"
            )
        patch.warnings += [
            f"{entry.path}: {doubt}"
            for doubt in catalogue.doubts(
                wanted,
                sm_count=entry.values.get("sm_count"),
                bandwidth_gb_s=entry.values.get("memory_bandwidth_gb_s"),
            )
        ]
        for i in places:
            gpus[i] = _merge(patch, gpus[i], f"gpus[{i}]", entry)
    patch.profile = dataclasses.replace(patch.profile, gpus=tuple(gpus))


def _apply_numa_nodes(entries: tuple[Entry, ...], patch: _Patch) -> None:
    nodes = list(patch.profile.numa_nodes)
    places = {node.id: i for i, node in enumerate(nodes)}
    for entry in entries:
        place = places.get(entry.values["id"])
        if place is None:
            raise UsageError(
                f"{entry.path}: {patch.profile.name} has no NUMA node {entry.key}; it has "
                f"{format_cpulist(places)}"
            )
        node = nodes[place]
        strangers = set(entry.values.get("cpus", ())) - set(node.cpus)
        if strangers:
            raise UsageError(
                f"{entry.path}: CPUs {format_cpulist(strangers)} are not in NUMA node {node.id} "
                f"of {patch.profile.name}, which has {format_cpulist(node.cpus) or 'none'}"
            )
        # A file lists cores, the kernel threads: a subset agrees, and the kernel's list stays.
        bandwidth = "memory_bandwidth_gb_s"
        rest = {bandwidth: entry.values[bandwidth]} if bandwidth in entry.values else {}
        if rest and entry.provenance.method is Method.DECLARED:
            patch.warnings.append(
                f"{entry.path}: the memory bandwidth counts as declared; if somebody measured it, "
                "say 'method: measured'"
            )
        nodes[place] = _merge(
            patch, node, f"numa_nodes[{place}]", dataclasses.replace(entry, values=rest)
        )
    patch.profile = dataclasses.replace(patch.profile, numa_nodes=tuple(nodes))


def _apply_nvmes(entries: tuple[Entry, ...], patch: _Patch) -> None:
    drives = list(patch.profile.nvmes)
    known = [drive.name for drive in patch.profile.nvmes]
    for entry in entries:
        place = next(
            (i for i, d in enumerate(drives) if entry.key in (d.name, d.stable_id)), len(drives)
        )
        if place == len(drives):
            if known:
                raise UsageError(
                    f"{entry.path}: {patch.profile.name} has no such drive; it has "
                    f"{', '.join(known)}"
                )
            drives.append(Nvme(name=READERS[Nvme]["name"](entry.key, entry.path)))
            patch.provenance[f"nvmes[{place}].name"] = entry.provenance
        drives[place] = _merge(patch, drives[place], f"nvmes[{place}]", entry)
    patch.profile = dataclasses.replace(patch.profile, nvmes=tuple(drives))


Part = TypeVar("Part", Gpu, NumaNode, Nvme)


def _merge(patch: _Patch, part: Part, path: str, entry: Entry) -> Part:
    """``part`` with the entry's values, each where it is not less trusted than what is there."""
    taken: dict[str, Any] = {}
    for name, value in entry.values.items():
        place = f"{path}.{name}"
        old = getattr(part, name)
        present = patch.provenance.get(place, patch.profile.source)
        if old is None or entry.override or _rank(entry.provenance) <= _rank(present):
            taken[name] = value
            over = entry.override and old is not None and _rank(entry.provenance) > _rank(present)
            patch.provenance[place] = dataclasses.replace(entry.provenance, override=over)
        elif old != value:
            told = (
                f"{entry.path}: {patch.profile.name} keeps {name} = {show_value(name, old)} "
                f"({present.method}) over the file's {show_value(name, value)} "
                f"({entry.provenance.method}); 'override: true' takes the file's"
            )
            patch.kept.setdefault(told, []).append(path)
    return dataclasses.replace(part, **taken)


def _rank(provenance: Provenance) -> int:
    return list(Method).index(provenance.method)
