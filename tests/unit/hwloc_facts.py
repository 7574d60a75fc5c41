"""Facts of hwloc's expected outputs: lstopo's verbose text and its XML, as plain sets.

Only what our readers know as well is taken. Objects are named by the CPUs they hold, since the
logical numbers of hwloc mean nothing to the kernel.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as Xml
from dataclasses import dataclass, field
from pathlib import Path

#: Sizes of the text are rounded to these units.
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 2**10, "MB": 2**20}
UNITS |= {"GB": 2**30, "TB": 2**40}


@dataclass
class Thing:
    """An object of either format: its kind (PU, Core, NUMANode ...), number and attributes."""

    kind: str
    index: int | None = None
    cpus: frozenset[int] = frozenset()
    attributes: dict[str, str] = field(default_factory=dict)
    parent: Thing | None = None
    children: list[Thing] = field(default_factory=list)

    def below(self) -> list[Thing]:
        return [t for child in self.children for t in (child, *child.below())]

    def above(self) -> list[Thing]:
        return [self.parent, *self.parent.above()] if self.parent else []


@dataclass(frozen=True)
class Memory:
    """A NUMA node's memory; in the text it is rounded to ``unit`` bytes."""

    size: int
    unit: int = 1


@dataclass(frozen=True)
class Pci:
    """A PCI device, the CPUs of the object that its host bridge hangs on, and the bridges."""

    class_id: int
    cpus: frozenset[int]
    bridges: tuple[str, ...]
    host: str | None
    link_gb_s: float | None
    names: frozenset[str]


@dataclass
class Facts:
    """What hwloc says of a machine; distances and attributes are by kernel numbers."""

    root: Thing
    pus: set[int]
    packages: set[frozenset[int]]
    cores: set[frozenset[int]]
    l3: dict[frozenset[int], int]
    nodes: dict[int, Thing]
    memory: dict[int, Memory]
    pci: dict[str, Pci]
    distances: dict[int, dict[int, int]] = field(default_factory=dict)
    attributes: dict[str, dict[int, int]] = field(default_factory=dict)
    machine: str = ""

    def count(self) -> int:
        """How many facts there are to hold against."""
        rows = sum(len(row) for row in self.distances.values())
        firmware = sum(len(values) for values in self.attributes.values())
        return (
            sum(map(len, (self.pus, self.packages, self.cores, self.l3, self.nodes, self.memory)))
            + rows
            + firmware
            + 4 * len(self.pci)
        )


def read_facts(path: Path) -> Facts:
    return _from_xml(path) if path.suffix == ".xml" else _from_text(path)


# --- XML


def bitmap(text: str) -> frozenset[int]:
    """``0x1,0xffffffff``: words of 32 bits, the highest first."""
    bits = 0
    for word in text.split(","):
        bits = bits << 32 | (int(word, 16) if word else 0)
    return frozenset(i for i in range(bits.bit_length()) if bits >> i & 1)


def _from_xml(path: Path) -> Facts:
    tree = Xml.fromstring(path.read_text())
    (top,) = tree.findall("object")
    facts = _facts(_xml_thing(top, None))
    facts.machine = _xml_info(tree, "Architecture") or _xml_info(top, "Architecture") or ""
    for node, thing in facts.nodes.items():
        if size := thing.attributes.get("local_memory"):
            facts.memory[node] = Memory(int(size))
    for matrix in tree.findall("distances2"):
        if matrix.get("type") == "NUMANode" and matrix.get("name", "NUMALatency") == "NUMALatency":
            ids = _numbers(matrix.findall("indexes"))
            values = iter(_numbers(matrix.findall("u64values")))
            facts.distances = {a: {b: next(values) for b in ids} for a in ids}
    by_gp_index = {t.attributes.get("gp_index", ""): node for node, t in facts.nodes.items()}
    for attribute in tree.findall("memattr"):
        values_of = facts.attributes.setdefault(attribute.get("name", ""), {})
        for value in attribute.findall("memattr_value"):
            # Without gp_index on the objects (hwloc's tests strip it) nothing can be told.
            node = by_gp_index.get(value.get("target_obj_gp_index"))
            if node is not None and value.get("initiator_cpuset"):
                values_of[node] = int(value.get("value", "0"))
    return facts


def _numbers(elements: list[Xml.Element]) -> list[int]:
    return [int(word) for element in elements for word in (element.text or "").split()]


def _xml_info(element: Xml.Element, name: str) -> str | None:
    found = (i.get("value") for i in element.findall("info") if i.get("name") == name)
    return next(found, None)


def _xml_thing(element: Xml.Element, parent: Thing | None) -> Thing:
    attributes = dict(element.attrib)
    kind = attributes.get("type", "")
    if kind == "Bridge":
        kind = "HostBridge" if attributes.get("bridge_type", "").startswith("0") else "PCIBridge"
    index = attributes.get("os_index")
    thing = Thing(
        kind=kind,
        index=int(index) if index else None,
        cpus=bitmap(attributes["cpuset"]) if "cpuset" in attributes else frozenset(),
        attributes=attributes,
        parent=parent,
    )
    thing.children = [_xml_thing(child, thing) for child in element.findall("object")]
    return thing


# --- text


def _from_text(path: Path) -> Facts:
    text = path.read_text()
    top: Thing | None = None
    stack: list[tuple[int, Thing]] = []
    for line in text.splitlines():
        if line.startswith("depth "):
            break
        depth = len(line) - len(line.lstrip())
        while stack and stack[-1][0] >= depth:
            stack.pop()
        thing = _text_thing(line.strip(), stack[-1][1] if stack else None)
        top = top or thing
        stack.append((depth, thing))
    assert top is not None, f"{path} holds no objects"
    _add_cpus(top)
    facts = _facts(top)
    _text_tables(facts, text)
    for node, thing in facts.nodes.items():
        if match := re.fullmatch(r"(\d+)([KMGT]i?B)", thing.attributes.get("local", "")):
            unit = UNITS[match[2]]
            facts.memory[node] = Memory(int(match[1]) * unit, unit)
    return facts


def _text_thing(line: str, parent: Thing | None) -> Thing:
    kind = re.match(r"[A-Za-z]\w*", line)
    inside = re.search(r"\((.*)\)", re.sub(r"^\S*\([^)]*\)(?= L#)", "", line))
    attributes = dict(
        re.findall(r"([\w#]+)=((?:\"[^\"]*\"|[^\s()]+)?)", inside[1] if inside else "")
    )
    logical = re.search(r" L#(\d+)", line)
    attributes["logical"] = logical[1] if logical else ""
    name = re.search(r'"([^"]*)"$', line)
    attributes["name"] = name[1] if name else ""
    attributes["class_text"] = inside[1] if inside else ""
    index = re.search(r"\(P#(\d+)", line)
    thing = Thing(
        kind=(kind[0] if kind else "").replace("PCI", "PCIDev")
        if line.startswith("PCI ")
        else kind[0]
        if kind
        else "",
        index=int(index[1]) if index else None,
        attributes=attributes,
        parent=parent,
    )
    if parent:
        parent.children.append(thing)
    return thing


#: These hang on an object and have its CPUs.
_GUESTS = ("NUMANode", "MemCache", "HostBridge", "PCIBridge", "PCIDev", "OSDev", "Misc", "Block")


def _add_cpus(thing: Thing) -> frozenset[int]:
    for child in thing.children:
        _add_cpus(child)
    if thing.kind == "PU" and thing.index is not None:
        thing.cpus = frozenset({thing.index})
    else:
        own = (c.cpus for c in thing.children if c.kind not in _GUESTS)
        thing.cpus = frozenset().union(*own)
    for child in thing.children:
        if child.kind in _GUESTS:
            for guest in (child, *child.below()):
                if guest.kind in _GUESTS:
                    guest.cpus = thing.cpus
    return thing.cpus


def _text_tables(facts: Facts, text: str) -> None:
    """The distance matrix and memory attributes, whose numbers are hwloc's own."""
    ids = {thing.attributes["logical"]: node for node, thing in facts.nodes.items()}
    matrix = re.search(
        r"^Relative latency matrix \(name NUMALatency.* between \d+ NUMANodes.*\n"
        r" *index +(.*)\n((?: +\d+ .*\n)*)",
        text,
        re.MULTILINE,
    )
    if matrix:
        columns = matrix[1].split()
        for line in matrix[2].splitlines():
            row, *values = line.split()
            facts.distances[ids[row]] = {
                ids[c]: int(v) for c, v in zip(columns, values, strict=True)
            }
    for name, block in re.findall(
        r"^Memory attribute #\d+ name `(\w+)'.*\n((?:  .*\n)*)", text, re.MULTILINE
    ):
        for logical, value in re.findall(r"NUMANode L#(\d+) = (\d+) from cpuset", block):
            facts.attributes.setdefault(name, {})[ids[logical]] = int(value)
    if machine := re.search(r"\bArchitecture=(\S+)", text):
        facts.machine = machine[1]


# --- both


def _facts(root: Thing) -> Facts:
    things = [root, *root.below()]
    nodes = {t.index: t for t in things if t.kind == "NUMANode" and t.index is not None}
    return Facts(
        root=root,
        pus={t.index for t in things if t.kind == "PU" and t.index is not None},
        # With --disallowed or by a cgroup's memory nodes, objects without CPUs may be left.
        packages={t.cpus for t in things if t.kind == "Package" and t.cpus},
        cores={t.cpus for t in things if t.kind == "Core" and t.cpus},
        l3={t.cpus: _cache_kib(t) for t in things if t.kind in ("L3Cache", "L3") and t.cpus},
        nodes=nodes,
        memory={},
        pci={_busid(t): _pci(t) for t in things if t.kind == "PCIDev"},
    )


def _cache_kib(thing: Thing) -> int:
    if size := thing.attributes.get("cache_size"):
        return int(size) // 1024
    match = re.fullmatch(r"(\d+)([KMG]i?B)", thing.attributes.get("size", ""))
    return int(match[1]) * UNITS[match[2]] // 1024 if match else 0


def _busid(thing: Thing) -> str:
    return thing.attributes.get("pci_busid") or thing.attributes.get("busid") or ""


def _pci(thing: Thing) -> Pci:
    above = thing.above()
    place = next(t for t in above if t.kind not in _GUESTS)
    host = next((t for t in above if t.kind == "HostBridge"), None)
    buses = host and (host.attributes.get("bridge_pci") or host.attributes.get("buses") or "")
    root = re.match(r"([0-9a-f]+):\[([0-9a-f]+)-", buses or "")
    stated = thing.attributes.get("pci_type") or thing.attributes.get("class") or "0"
    speed = re.match(
        r"[0-9.]+", thing.attributes.get("pci_link_speed") or thing.attributes.get("link") or ""
    )
    return Pci(
        class_id=int(re.match(r"[0-9a-f]+", stated)[0], 16),  # type: ignore[index]
        cpus=place.cpus,
        bridges=tuple(_busid(t) for t in reversed(above) if t.kind == "PCIBridge"),
        host=f"pci{root[1]}:{root[2]}" if root else None,
        link_gb_s=float(speed[0]) if speed and float(speed[0]) > 0 else None,
        names=frozenset(t.attributes["name"] for t in thing.children if t.kind == "OSDev"),
    )
