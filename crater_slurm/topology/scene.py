"""What a drawing shows, as boxes in boxes: decided once, for terminal, Graphviz and SVG.

Machine > package > NUMA node > L3 domains, and beside them the PCI tree: host bridge > switch >
devices. A bridge is shown only where it joins devices; what is equal in every fact and place
becomes one entry ("GPU 0-3"). Nothing is placed that the profile does not place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import Cache, NodeProfile, NumaKind
from crater_slurm.model.units import format_mib
from crater_slurm.topology import words
from crater_slurm.topology.devices import Device, Kind, devices
from crater_slurm.topology.links import link_groups

#: Switches behind switches beyond this are drawn flat; real machines have three.
_DEEPEST = 8
_KIND_NAMES = {Kind.GPU: "GPU", Kind.NIC: "NIC", Kind.NVME: "NVMe"}
_MEMORY_NAMES = {NumaKind.MEMORY: ", memory only", NumaKind.GPU_MEMORY: ", GPU memory"}


class Shape(StrEnum):
    """What a box stands for; drawings choose borders and colours by it."""

    MACHINE = "machine"
    PACKAGE = "package"
    NUMA = "numa"
    L3 = "l3"
    ROOT = "root"
    SWITCH = "switch"
    ELSEWHERE = "elsewhere"
    GPU = "gpu"
    NIC = "nic"
    NVME = "nvme"
    NVLINK = "nvlink"


#: Boxes without a frame of their own in a terminal: devices and links, which have no children.
LEAVES = {Shape.GPU, Shape.NIC, Shape.NVME, Shape.NVLINK}


@dataclass(frozen=True, slots=True)
class Box:
    """A title, lines of facts, and boxes inside. ``numbers`` are those of the devices it is."""

    shape: Shape
    title: str
    lines: tuple[str, ...] = ()
    children: tuple[Box, ...] = ()
    numbers: tuple[int, ...] = ()
    warn: bool = False


def scene(profile: NodeProfile) -> Box:
    """The whole node as one box."""
    found = devices(profile)
    nodes = [(node.socket, _numa(profile, i, found)) for i, node in enumerate(profile.numa_nodes)]
    sockets = list(dict.fromkeys(socket for socket, _ in nodes if socket is not None))
    boxes = [
        Box(
            Shape.PACKAGE,
            f"package {socket}",
            children=(
                *(box for own, box in nodes if own == socket),
                *_caches(c for c in profile.cpu.l3_caches if _spans(profile, c) == {socket}),
            ),
        )
        for socket in sorted(sockets)
    ]
    boxes += [box for socket, box in nodes if socket is None]
    ids = {node.id for node in profile.numa_nodes}
    lost = [device for device in found if device.numa_node not in ids]
    if lost:
        boxes.append(Box(Shape.ELSEWHERE, "NUMA node not known", children=_pci(lost)))
    return Box(
        Shape.MACHINE,
        words.clean(profile.name),
        _machine(profile),
        (*_nvlinks(found), *boxes),
    )


def _nvlinks(found: tuple[Device, ...]) -> Iterable[Box]:
    for group in link_groups(found):
        yield Box(Shape.NVLINK, "NVLink", (words.link_group(group),), numbers=group.gpus)


def walk(box: Box) -> Iterable[Box]:
    """The box and everything in it, outer boxes first."""
    yield box
    for child in box.children:
        yield from walk(child)


def _machine(profile: NodeProfile) -> tuple[str, ...]:
    memory = [format_mib(profile.memory_mib)] if profile.memory_mib else []
    return (", ".join([*memory, words.processors(profile.cpu)]),)


def _numa(profile: NodeProfile, index: int, found: Sequence[Device]) -> Box:
    node = profile.numa_nodes[index]
    own = set(node.cpus)
    caches = [c for c in profile.cpu.l3_caches if c.cpus and set(c.cpus) <= own]
    what = _MEMORY_NAMES.get(node.kind, "") if node.kind else ""
    return Box(
        Shape.NUMA,
        f"NUMA node {node.id}{what}",
        words.numa_facts(profile, index),
        (*_caches(caches), *_pci([d for d in found if d.numa_node == node.id])),
    )


def _spans(profile: NodeProfile, cache: Cache) -> set[int | None]:
    """Sockets of a cache that several NUMA nodes share; empty for one within a NUMA node."""
    around = [node for node in profile.numa_nodes if set(cache.cpus) & set(node.cpus)]
    return {node.socket for node in around} if len(around) > 1 else set()


def _caches(caches: Iterable[Cache]) -> tuple[Box, ...]:
    """L3 domains, those of one size as one box with a line for each."""
    by_name: dict[str, list[str]] = {}
    for cache in caches:
        by_name.setdefault(words.cache(cache), []).append(words.cpus(cache.cpus))
    return tuple(
        Box(Shape.L3, f"{len(lines)} x {name}" if len(lines) > 1 else name, tuple(lines))
        for name, lines in by_name.items()
    )


def _pci(found: Sequence[Device]) -> tuple[Box, ...]:
    """Host bridges with what hangs on them; what has no known root stands by itself."""
    roots: dict[str, list[Device]] = {}
    for device in found:
        root = device.pci.root if device.pci else None
        roots.setdefault(root or "", []).append(device)
    boxes = _tree(roots.pop("", []), 0, 0)
    return boxes + tuple(_root(root, own) for root, own in sorted(roots.items()))


def _root(root: str, found: Sequence[Device]) -> Box:
    """A host bridge; where all hangs on one switch, both are one box."""
    title = f"PCI root {words.clean(root.removeprefix('pci'), 20)}"
    inside = _tree(found, 0, 0)
    if len(inside) == 1 and inside[0].shape is Shape.SWITCH:
        return replace(inside[0], shape=Shape.ROOT, title=f"{title}, {inside[0].title}")
    return Box(Shape.ROOT, title, children=inside)


def _tree(found: Sequence[Device], depth: int, level: int) -> tuple[Box, ...]:
    """Boxes for devices that share their first ``depth`` bridges, in ``level`` boxes already."""
    below: dict[str, list[Device]] = {}
    for device in found:
        below.setdefault(_next(device, depth), []).append(device)
    single: list[Device] = []
    cards: list[Box] = []
    switches: list[Box] = []
    for bridge, own in below.items():
        if not bridge or len(own) == 1 or level == _DEEPEST:
            single += own
            continue
        if _one_card(own):
            cards += _leaves(own)
            continue
        last = depth + 1
        while (names := {_next(d, last) for d in own}) != {""} and len(names) == 1:
            last += 1
        name = words.clean(own[0].bridges[last - 1].removeprefix("0000:"), 20)
        switches.append(Box(Shape.SWITCH, f"switch {name}", children=_tree(own, last, level + 1)))
    return (*_leaves(single), *cards, *switches)


def _next(device: Device, depth: int) -> str:
    return device.bridges[depth] if depth < len(device.bridges) else ""


def _one_card(found: Sequence[Device]) -> bool:
    """Whether these are functions of one card, such as the ports of a NIC."""
    return len({d.pci.address.rpartition(".")[0] for d in found if d.pci}) == 1


def _leaves(found: Sequence[Device]) -> tuple[Box, ...]:
    """Device boxes; those of one kind with equal facts are one, with all names."""
    groups: dict[tuple[object, ...], list[Device]] = {}
    for device in found:
        own = device.kind, device.id.rstrip("0123456789"), words.facts(device)
        groups.setdefault(own, []).append(device)
    return tuple(_leaf(own) for own in groups.values())


def _leaf(group: Sequence[Device]) -> Box:
    first = group[0]
    numbers = tuple(sorted(device.number for device in group))
    listed = first.id.startswith(_KIND_NAMES[first.kind])
    kind = _KIND_NAMES[first.kind]
    title = f"{kind} {format_cpulist(numbers)}".replace(",", ", ")
    if not listed:
        many = f"{len(group)} {kind}s" if len(group) > 1 else kind
        title = f"{many} not in Slurm's list"
    names = [words.clean(" ".join(device.names)) for device in group if device.names]
    box = Box(Shape(first.kind.value), title, words.facts(first), (), numbers)
    named = (", ".join(names), *box.lines) if names else box.lines
    warn = any(d.pci and words.below_maximum(d.pci.link, d.pci.max_link) for d in group)
    return replace(box, lines=tuple(line for line in named if line), warn=warn)
