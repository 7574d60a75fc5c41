"""Puts measured values into a profile, with their provenance, and nothing else."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import Method, NodeProfile, Provenance
from crater_slurm.probe.bench.result import Measurement

_PATH = re.compile(r"(numa_nodes|nvmes)\[(\d+)\]\.([a-z_]+)")
#: Fields of whole numbers.
_WHOLE = ("random_read_iops", "random_write_iops")
_MATRIX = "remote_bandwidth_gb_s"
_OWN = "memory_bandwidth_gb_s"


def merged(
    profile: NodeProfile, results: Iterable[Measurement], *, matrix: bool = False
) -> tuple[NodeProfile, tuple[str, ...]]:
    """The profile with what was measured and fit for it, and the paths that changed.

    With ``matrix`` the rows of remote bandwidth are made of the pairs; a row that lacks one is
    left as it was.
    """
    fit = {item.path: item for item in results if item.for_profile and item.path}
    values: dict[str, tuple[object, Provenance]] = {}
    for path, item in fit.items():
        if f".{_MATRIX}[" not in path:
            values[path] = (item.value, Provenance(Method.MEASURED, item.time))
    if matrix:
        values |= _rows(profile, fit)
    for path, (value, _) in values.items():
        profile = _with_value(profile, path, value)
    provenance = dict(profile.provenance) | {path: origin for path, (_, origin) in values.items()}
    return dataclasses.replace(profile, provenance=provenance), tuple(sorted(values))


def check_same_machine(stored: NodeProfile, now: NodeProfile) -> None:
    """CraterError when a stored profile has other NUMA nodes or CPUs than the machine."""
    if [(n.id, n.cpus) for n in stored.numa_nodes] != [(n.id, n.cpus) for n in now.numa_nodes]:
        raise CraterError(
            f"the profile of {stored.name} has other NUMA nodes or CPUs than this machine; write "
            "a new one with 'crater-probe scan' first, or measure with --no-write"
        )


def _rows(
    profile: NodeProfile, fit: dict[str, Measurement]
) -> dict[str, tuple[object, Provenance]]:
    """Whole rows, by path; a NUMA node without memory has bandwidth 0, as nothing is there."""
    found: dict[str, tuple[object, Provenance]] = {}
    for i in range(len(profile.numa_nodes)):
        row, times = [], []
        for j, target in enumerate(profile.numa_nodes):
            name = _OWN if i == j else f"{_MATRIX}[{j}]"
            item = fit.get(f"numa_nodes[{i}].{name}")
            if item is None and target.memory_mib != 0:
                break
            row.append(0.0 if item is None else item.value)
            times += [item.time] if item else []
        if times and len(row) == len(profile.numa_nodes):
            origin = Provenance(Method.MEASURED, max(times))
            found[f"numa_nodes[{i}].{_MATRIX}"] = (tuple(row), origin)
    return found


def _with_value(profile: NodeProfile, path: str, value: Any) -> NodeProfile:
    match = _PATH.fullmatch(path)
    assert match is not None, path
    group, index, name = match.group(1), int(match.group(2)), match.group(3)
    items: list[Any] = list(getattr(profile, group))
    items[index] = dataclasses.replace(
        items[index], **{name: round(value) if name in _WHOLE else value}
    )
    return dataclasses.replace(profile, **{group: tuple(items)})  # type: ignore[arg-type]
