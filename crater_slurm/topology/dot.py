"""The physical graph for Graphviz: clusters for what contains, edges for what data crosses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

from crater_slurm.model.profile import NodeProfile
from crater_slurm.topology.devices import devices
from crater_slurm.topology.links import LinkGroup, link_groups
from crater_slurm.topology.scene import LEAVES, Box, Shape, scene

_COLOURS = {
    Shape.MACHINE: "#f6f7f9",
    Shape.PACKAGE: "#e9edf2",
    Shape.NUMA: "#dbe4ee",
    Shape.L3: "#f3efe2",
    Shape.ROOT: "#ffffff",
    Shape.SWITCH: "#f0f0f0",
    Shape.ELSEWHERE: "#fbeeee",
    Shape.GPU: "#cfe8c9",
    Shape.NIC: "#cfe0f5",
    Shape.NVME: "#f7dfc0",
    Shape.NVLINK: "#cfe8c9",
}
_HEAD = """graph "{name}" {{
  graph [rankdir=LR, fontname="sans-serif", fontsize=12, compound=true, nodesep=0.15]
  node [shape=box, style="rounded,filled", fontname="sans-serif", fontsize=10, height=0.3]
  edge [color="#667788", fontname="sans-serif", fontsize=9]
"""


@dataclass(slots=True)
class _Writer:
    """Lines so far, and the node that stands for each GPU."""

    lines: list[str] = field(default_factory=list)
    gpus: dict[int, str] = field(default_factory=dict)
    count: int = 0

    def name(self, box: Box) -> str:
        self.count += 1
        return f"{box.shape}{self.count}"


def draw(profile: NodeProfile) -> str:
    """DOT text of a node; ``dot -Tsvg`` draws it."""
    writer = _Writer()
    picture = scene(profile)
    _cluster(writer, picture, None, 1)
    for group in link_groups(devices(profile)):
        writer.lines += _nvlink(writer, group)
    return _HEAD.format(name=_escape(picture.title)) + "\n".join(writer.lines) + "\n}\n"


def _cluster(writer: _Writer, box: Box, above: str | None, depth: int) -> None:
    """A box as a cluster; its own node (memory, port) is what edges of its children lead to."""
    pad = "  " * depth
    name = writer.name(box)
    # Only a stop on the way of data has a node of its own; others have their facts in the label.
    stop = box.shape in (Shape.NUMA, Shape.ROOT, Shape.SWITCH)
    label = _label((box.title,) if stop else (box.title, *box.lines))
    writer.lines += [
        f"{pad}subgraph cluster_{name} {{",
        f'{pad}  label="{label}"; labeljust=l; style="rounded,filled"',
        f'{pad}  color="#8899aa"; fillcolor="{_COLOURS[box.shape]}"',
    ]
    if stop:
        inside = _label(box.lines or (box.title,))
        writer.lines.append(f'{pad}  {name} [label="{inside}", fillcolor="white"]')
        if above:
            writer.lines.append(f"{pad}  {above} -- {name}")
    anchor = name if stop else above
    for child in box.children:
        if child.shape in LEAVES or child.shape is Shape.L3:
            _leaf(writer, child, anchor, pad + "  ")
        else:
            _cluster(writer, child, anchor, depth + 1)
    writer.lines.append(f"{pad}}}")


def _leaf(writer: _Writer, box: Box, above: str | None, pad: str) -> None:
    if box.shape is Shape.NVLINK:
        return  # drawn as edges
    name = writer.name(box)
    if box.shape is Shape.GPU:
        writer.gpus |= dict.fromkeys(box.numbers, name)
    mark = ', color="#bb3322", penwidth=2' if box.warn else ""
    label = _label((box.title, *box.lines))
    writer.lines.append(f'{pad}{name} [label="{label}", fillcolor="{_COLOURS[box.shape]}"{mark}]')
    if above:
        writer.lines.append(f"{pad}{above} -- {name}")


def _nvlink(writer: _Writer, group: LinkGroup) -> Iterator[str]:
    """A hub for GPUs that all reach each other, else an edge for each pair."""
    look = 'color="#4b8b3b", penwidth=2, constraint=false'
    who = sorted({writer.gpus[n] for n in group.gpus if n in writer.gpus})
    if group.complete and len(group.gpus) > 2:
        writer.count += 1
        hub = f"nvlink{writer.count}"
        colour = _COLOURS[Shape.NVLINK]
        yield f'  {hub} [label="NVLink {group.name}", shape=ellipse, fillcolor="{colour}"]'
        yield from (f"  {gpu} -- {hub} [{look}]" for gpu in who)
        return
    joined = {
        (writer.gpus[a], writer.gpus[b])
        for a, b in group.pairs
        if a in writer.gpus and b in writer.gpus
    }
    for a, b in combinations(who, 2):
        if (a, b) in joined or (b, a) in joined:
            yield f'  {a} -- {b} [label="{group.name}", {look}]'


def _label(lines: tuple[str, ...]) -> str:
    return "\\n".join(_escape(line) for line in lines)


def _escape(text: str) -> str:
    r"""For a quoted DOT string: ``\N`` and the like would be replaced by Graphviz."""
    return text.replace("\\", "\\\\").replace('"', '\\"')
