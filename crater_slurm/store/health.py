"""Health as JSON data, and back. What other machines send is read strictly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from crater_slurm.model.health import DriveHealth, GpuHealth, NodeHealth, NumaHealth
from crater_slurm.store import strict
from crater_slurm.store.codec import plain

#: Readers by the annotation of a field, so that a new field needs no line here.
_BY_TYPE: dict[str, strict.Reader] = {
    "str": strict.text,
    "str | None": strict.text,
    "int": strict.whole(0, 1023),
    "int | None": strict.whole(0, 10**15),
    "float": strict.number(0, 10**15),
    "float | None": strict.number(0, 10**15),
    "tuple[str, ...]": strict.sequence(strict.text),
}


def health_to_dict(health: NodeHealth) -> dict[str, Any]:
    """The health as JSON data, without what is unknown."""
    return cast("dict[str, Any]", plain(health))


def health_from_dict(data: Mapping[str, Any], node: str) -> NodeHealth:
    """The health of such data, under the node's name. Raises UsageError for what is no health."""
    entries = dict(strict.mapping(data, "health")) | {"node": node}
    return strict.build(NodeHealth, _readers(NodeHealth), entries, "health:")


@cache
def _readers(kind: type) -> dict[str, strict.Reader]:
    return {entry.name: _reader(str(entry.type)) for entry in dataclasses.fields(kind)}


def _reader(annotation: str) -> strict.Reader:
    for part in (NumaHealth, GpuHealth, DriveHealth):
        if annotation == f"tuple[{part.__name__}, ...]":
            return strict.sequence(_part(part))
    return _BY_TYPE[annotation]


def _part(kind: type) -> strict.Reader:
    def read(value: object, path: str) -> object:
        return strict.build(kind, _readers(kind), value, path)

    return read
