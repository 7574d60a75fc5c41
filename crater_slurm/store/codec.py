"""Profiles as plain YAML or JSON data, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from typing import Any, cast

from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import NodeProfile
from crater_slurm.store import strict
from crater_slurm.store.check import check_profile
from crater_slurm.store.readers import NODE_NAME, READERS, node_name

#: Fields that are CPU numbers, written as the kernel's lists.
_CPU_LISTS = ("cpus", "local_cpus")


def profile_to_dict(profile: NodeProfile) -> dict[str, Any]:
    """The profile as YAML or JSON data: unknown values left out, CPUs as kernel lists."""
    data = cast("dict[str, Any]", plain(profile))
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
    where = f"{label}:" if isinstance(label, str) and NODE_NAME.fullmatch(label) else "profile:"
    if where == "profile:":
        node_name(label, "profile: name")
    profile = strict.build(NodeProfile, READERS[NodeProfile], entries, where)
    check_profile(profile)
    return profile


def plain(item: object) -> object:
    """Dataclasses, sets, tuples, enums and times as JSON knows them; None and () fields go."""
    if item is None or type(item) in (str, int, float, bool):
        return item
    if isinstance(item, Enum):
        return item.value
    if isinstance(item, tuple | list):
        return [plain(value) for value in item]
    if isinstance(item, Mapping):
        return {str(key): plain(value) for key, value in item.items()}
    if isinstance(item, frozenset | set):
        return sorted(plain(value) for value in item)  # type: ignore[type-var]
    if isinstance(item, datetime):
        return iso(item)
    if dataclasses.is_dataclass(item):
        return dict(_entries(item))
    return str(item)


def _entries(item: Any) -> Iterator[tuple[str, object]]:
    """Known fields. A NUMA node without CPUs says so; else what is empty is left out."""
    for name in field_names(type(item)):  # type: ignore[arg-type]
        value = getattr(item, name)
        if name == "override" and not value:
            continue
        if name in _CPU_LISTS and isinstance(value, tuple):
            if value or name == "cpus":
                yield name, format_cpulist(value)
        elif value is not None and value != () and (told := plain(value)) != {}:
            yield name, told


@cache
def field_names(kind: type) -> tuple[str, ...]:
    return tuple(entry.name for entry in dataclasses.fields(kind))


def iso(time: datetime) -> str:
    """ISO 8601 in UTC with a Z; a time without zone is UTC."""
    zoned = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    return zoned.isoformat().replace("+00:00", "Z")
