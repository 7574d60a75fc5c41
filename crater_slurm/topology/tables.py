"""The tables below a drawing: distance matrix, its legend, NUMA distances, nearest pairs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import NodeProfile
from crater_slurm.topology.devices import Device, Kind, devices, of_kind
from crater_slurm.topology.graph import (
    CLASSES,
    NVLINK,
    SYS,
    UNKNOWN,
    kernel_distance,
    matrix,
    nearest,
    same_numa_node,
)
from crater_slurm.topology.words import clean

#: More equally near devices than this are counted, not named.
_NAMED = 4
#: The column beside the matrix, as nvidia-smi has it.
_NUMA_COLUMN = "NUMA"


def tables(profile: NodeProfile, width: int) -> list[list[str]]:
    """All tables that have something to say, as lines."""
    found = devices(profile)
    blocks = list(_matrix(found, width)) if found else []
    if found:
        blocks.append(_legend(found, width))
    blocks += [_distances(profile), _nearest(profile, found)]
    return [block for block in blocks if block]


def pair_words(how: str, near: bool) -> str:
    """A class for a sentence; ``near``: both are known to be on one NUMA node."""
    return "same NUMA node" if how == UNKNOWN and near else how


def best(profile: NodeProfile, gpu: Device, kind: Kind) -> tuple[list[Device], str]:
    """The nearest devices of a kind, all that are equally near, and how near; ("", none)."""
    found = nearest(profile, gpu, kind)
    if not found:
        return [], ""
    first, how = found[0]
    if how == UNKNOWN and not same_numa_node(gpu, first):
        return [], UNKNOWN
    far = kernel_distance(profile, gpu, first)
    equal = [
        device
        for device, own in found
        if own == how
        and kernel_distance(profile, gpu, device) == far
        and (how != UNKNOWN or same_numa_node(gpu, device))
    ]
    text = f"{SYS}, distance {far}" if how == SYS and far is not None else how
    return equal, pair_words(text, how == UNKNOWN)


def _matrix(found: tuple[Device, ...], width: int) -> Iterator[list[str]]:
    """The matrix, in blocks of columns where it is wider than the paper."""
    rows = matrix(found)
    columns = [[device.id, *(row[i] for row in rows)] for i, device in enumerate(found)]
    nodes = ["-" if d.numa_node is None else str(d.numa_node) for d in found]
    columns.append([_NUMA_COLUMN, *nodes])
    heads = ["", *(device.id for device in found)]
    head_width = max(map(len, heads))
    block: list[list[str]] = []
    used = head_width
    for column in columns:
        wide = 2 + max(map(len, column))
        if block and used + wide > width:
            yield _side_by_side([heads, *block])
            block, used = [], head_width
        block.append(column)
        used += wide
    yield _side_by_side([heads, *block])


def _side_by_side(columns: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]


def _legend(found: tuple[Device, ...], width: int) -> list[str]:
    """The classes that the matrix has, and the system's names of what it numbers."""
    seen = {how if not how.startswith(NVLINK) else NVLINK for row in matrix(found) for how in row}
    lines = [
        f"{name + '#' if name == NVLINK else name:<4} = {meaning}"
        for name, meaning in CLASSES.items()
        if name in seen
    ]
    named = "; ".join(f"{d.id} = {name}" for d in found if (name := _system_name(d)))
    return lines + textwrap.wrap(named, width, break_on_hyphens=False)


def _system_name(device: Device) -> str:
    """What the system calls a device whose number is ours; an address where it has no name."""
    counted = device.kind is not Kind.GPU or device.part is None
    names = " ".join(device.names) or (device.pci.address if device.pci else "")
    return clean(names) if counted else ""


def _distances(profile: NodeProfile) -> list[str]:
    """The kernel's table; nothing for one node, or when a row is missing."""
    nodes = profile.numa_nodes
    if len(nodes) < 2 or any(len(node.distances) != len(nodes) for node in nodes):
        return []
    heads = [f"NUMA{node.id}" for node in nodes]
    columns = [[head, *(str(node.distances[i]) for node in nodes)] for i, head in enumerate(heads)]
    return ["NUMA distances (10 is local)", *_side_by_side([["", *heads], *columns])]


def _nearest(profile: NodeProfile, found: tuple[Device, ...]) -> list[str]:
    """The nearest NIC and drive of each GPU; GPUs with equal answers share a line."""
    answers: dict[tuple[str, ...], list[int]] = {}
    for gpu in of_kind(found, Kind.GPU):
        if gpu.part is not None:
            said = tuple(_said(profile, gpu, kind) for kind in (Kind.NIC, Kind.NVME))
            answers.setdefault(said, []).append(gpu.number)
    rows = [(f"GPU {format_cpulist(who)}", *said) for said, who in answers.items() if any(said)]
    if not rows:
        return []
    columns = [column for column in zip(*rows, strict=True) if any(column)]
    return ["Nearest", *_side_by_side(columns)]


def _said(profile: NodeProfile, gpu: Device, kind: Kind) -> str:
    equal, how = best(profile, gpu, kind)
    if not how:
        return ""
    if not equal:
        return f"{kind}: not known"
    names = [clean(device.names[0], 16) if device.names else device.id for device in equal]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more} ({how})"
