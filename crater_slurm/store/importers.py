"""Reads files of profiles, and applies files of values to profiles.

Two kinds of file are told apart by their keys. A profile has ``numa_nodes`` (and ``name``); a
file holds one, a list, several documents, or ``nodes:`` with a list or a mapping by name. The
others are the sections ``gpu:``, ``cpu:`` and ``ssd:`` of gpu_topology.yaml, cpu_topology.yaml and
probe-config.yaml, which add to profiles that exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crater_slurm.catalogue import complete_profile, model_id
from crater_slurm.errors import UsageError
from crater_slurm.model.profile import Method, NodeProfile
from crater_slurm.store import strict
from crater_slurm.store.codec import profile_from_dict
from crater_slurm.store.documents import load_documents
from crater_slurm.store.overlay import SECTIONS, Overlay, apply_overlay, parse_overlay

_PROFILE_MARKS = {"numa_nodes", "name", "gpus", "nvmes"}
_GPU_MARKS = {"sm_count", "tensor_core_support", "memory_bandwidth_gbps"}


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds: profiles with a name, profiles without, and overlays."""

    file: Path
    profiles: tuple[NodeProfile, ...] = ()
    nameless: tuple[Mapping[str, Any], ...] = ()
    overlays: tuple[Overlay, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """What an import makes of one node; ``old`` is None for a new one."""

    old: NodeProfile | None
    new: NodeProfile
    warnings: tuple[str, ...] = ()


def read_file(file: Path) -> Contents:
    """Profiles and overlays of a file. Raises UsageError with file, path and value."""
    profiles: list[NodeProfile] = []
    nameless: list[Mapping[str, Any]] = []
    overlays: list[Overlay] = []
    documents = load_documents(file)
    if not documents:
        raise UsageError(f"{file} is empty")
    for document in documents:
        for entry in _entries(document, file):
            if _PROFILE_MARKS & entry.keys():
                if "name" in entry:
                    profiles.append(_profile(entry, file))
                else:
                    nameless.append(entry)
            else:
                overlays.append(parse_overlay(_sections(entry), f"{file}:"))
    names = [profile.name for profile in profiles]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{file} has the node {name} twice")
    return Contents(file, tuple(profiles), tuple(nameless), tuple(overlays))


def plan_import(
    contents: list[Contents], present: Mapping[str, NodeProfile], nodes: tuple[str, ...] = ()
) -> list[Change]:
    """What the files make of the nodes: files in their order, later ones see the earlier ones.

    ``nodes`` names the nodes that nameless profiles and sections are for. ``gpu:`` sections alone
    need none: they apply to every node with that model. Pure: nothing is stored.
    """
    old = dict(present)
    new: dict[str, NodeProfile] = {}
    warnings: dict[str, list[str]] = {}
    for content in contents:
        for profile in _named(content, nodes):
            told = warnings.setdefault(profile.name, [])
            told += _replaced((old | new).get(profile.name), profile)
            new[profile.name] = complete_profile(profile)
        for overlay in content.overlays:
            for name in _targets(overlay, content.file, old | new, nodes):
                new[name], found = apply_overlay(overlay, new.get(name) or old[name])
                warnings.setdefault(name, []).extend(found)
    return [
        Change(old.get(name), profile, tuple(dict.fromkeys(warnings[name])))
        for name, profile in new.items()
    ]


def _replaced(old: NodeProfile | None, new: NodeProfile) -> list[str]:
    trusted = (Method.MEASURED, Method.DERIVED)
    if old is None or old.source.method not in trusted or new.source.method in trusted:
        return []
    return [
        f"{new.name}: a whole profile that is {new.source.method} replaces one that was "
        f"{old.source.method} on the machine"
    ]


def _entries(document: object, file: Path) -> list[Mapping[str, Any]]:
    if isinstance(document, list):
        return [strict.mapping(item, f"{file}: [{i}]") for i, item in enumerate(document)]
    entry = strict.mapping(document, f"{file}: the document")
    if "nodes" not in entry:
        return [entry]
    strict.check_keys(entry, ("nodes",), f"{file}:")
    nodes = entry["nodes"]
    if isinstance(nodes, list):
        return [strict.mapping(item, f"{file}: nodes[{i}]") for i, item in enumerate(nodes)]
    return [
        {"name": name, **strict.mapping(item, f"{file}: nodes.{name}")}
        for name, item in strict.mapping(nodes, f"{file}: nodes").items()
    ]


def _sections(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """A gpu_topology.yaml may hold the models at its top, without ``gpu:`` around them."""
    values = list(entry.values())
    bare = values and all(isinstance(v, Mapping) and _GPU_MARKS & v.keys() for v in values)
    return {"gpu": entry} if bare and not set(SECTIONS) & entry.keys() else entry


def _profile(entry: Mapping[str, Any], file: Path, name: str | None = None) -> NodeProfile:
    try:
        return profile_from_dict(entry, name)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from error


def _named(content: Contents, nodes: tuple[str, ...]) -> list[NodeProfile]:
    if content.nameless and not nodes:
        raise UsageError(f"{content.file} has a profile without a name; say whose with --node")
    if len(content.nameless) > 1:
        raise UsageError(f"{content.file} has several profiles without a name; name them")
    return [
        *content.profiles,
        *(_profile(entry, content.file, name) for entry in content.nameless for name in nodes),
    ]


def _targets(
    overlay: Overlay, file: Path, profiles: Mapping[str, NodeProfile], nodes: tuple[str, ...]
) -> list[str]:
    if not nodes and overlay.of_one_node:
        raise UsageError(f"{file} holds values of one node; say which with --node")
    for name in nodes:
        if name not in profiles:
            raise UsageError(
                f"{file} adds values to {name}, which has no profile yet: run crater-probe there "
                "or import a profile first"
            )
    if nodes:
        return list(nodes)
    wanted = {model_id(entry.key) for entry in overlay.gpus}
    found = [
        name
        for name, profile in profiles.items()
        if any(model_id(gpu.model) in wanted for gpu in profile.gpus)
    ]
    if not found:
        raise UsageError(f"{file}: no node has a GPU of the models {', '.join(sorted(wanted))}")
    return found
