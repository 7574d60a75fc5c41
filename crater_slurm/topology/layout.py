"""Where the boxes of a scene lie on a page: sizes from estimated text widths, then places.

Fonts are the reader's, so widths are estimates on the wide side. A NUMA node has its CPUs and
caches on the left and its devices on the right; packages stand side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from crater_slurm.topology.scene import LEAVES, Box, Shape

PAD = 12
GAP = 10
TITLE_HEIGHT = 20
LINE_HEIGHT = 16
#: Widths of an average character at the sizes that svg.py sets.
_TITLE_CHAR, _LINE_CHAR = 7.4, 6.7
#: No box is wider than this for its text alone; longer text is cut.
_TEXT_LIMIT = 330
_TILE_LEAST = 130
#: How wide the rows of boxes inside a box may get.
_ROW_LIMITS = {Shape.MACHINE: 1500, Shape.PACKAGE: 620, Shape.ELSEWHERE: 620}
_DEVICES_LIMIT = 460


@dataclass(frozen=True, slots=True)
class Placed:
    """A box with its place, relative to the box around it, and its text cut to fit."""

    box: Box
    width: float
    height: float
    x: float = 0
    y: float = 0
    title: str = ""
    lines: tuple[str, ...] = ()
    children: tuple[Placed, ...] = ()


def place(box: Box) -> Placed:
    """The box and all in it; x and y of the result are 0."""
    if box.shape in LEAVES or box.shape is Shape.L3:
        return _tile(box)
    top = PAD + TITLE_HEIGHT + LINE_HEIGHT * len(box.lines) + (GAP if box.lines else GAP / 2)
    inside = _inside(box)
    own_width = _text_width(box) + 2 * PAD
    width = max([own_width, *(child.x + child.width + PAD for child in inside)])
    bottom = max((child.y + child.height for child in inside), default=-GAP)
    shifted = tuple(replace(child, y=child.y + top) for child in inside)
    return _cut(Placed(box, width, top + bottom + PAD, children=shifted))


def _tile(box: Box) -> Placed:
    width = max(_text_width(box) + 2 * PAD, _TILE_LEAST)
    height = 8 + TITLE_HEIGHT + LINE_HEIGHT * len(box.lines)
    return _cut(Placed(box, width, height))


def _inside(box: Box) -> list[Placed]:
    """The children, from (PAD, 0) on."""
    if box.shape is not Shape.NUMA:
        links = [place(child) for child in box.children if child.shape is Shape.NVLINK]
        others = [place(child) for child in box.children if child.shape is not Shape.NVLINK]
        upper = _rows(links, PAD, 0, _ROW_LIMITS[Shape.MACHINE])
        below = max((child.y + child.height + GAP for child in upper), default=0.0)
        if box.shape in (Shape.MACHINE, Shape.PACKAGE):
            others = _alike(others)
        return upper + _rows(others, PAD, below, _ROW_LIMITS.get(box.shape, _DEVICES_LIMIT))
    caches = [place(child) for child in box.children if child.shape is Shape.L3]
    left = _rows(caches, PAD, 0, 1)
    edge = max((child.x + child.width + GAP for child in left), default=float(PAD))
    right = [place(child) for child in box.children if child.shape is not Shape.L3]
    return left + _rows(right, edge, 0, _DEVICES_LIMIT)


def _alike(boxes: Sequence[Placed]) -> list[Placed]:
    """Packages and NUMA nodes of one width, so that equal machines look equal."""
    widest = max((box.width for box in boxes), default=0)
    return [replace(box, width=widest) for box in boxes]


def _rows(boxes: Sequence[Placed], x: float, y: float, limit: float) -> list[Placed]:
    """Boxes in rows of at most the limit, at least one in a row; a row has one height."""
    rows: list[list[Placed]] = []
    used = limit
    for box in boxes:
        if not rows or used + box.width > limit:
            rows.append([])
            used = 0
        rows[-1].append(replace(box, x=x + used))
        used += box.width + GAP
    done: list[Placed] = []
    for row in rows:
        height = max(box.height for box in row)
        done += [replace(box, y=y, height=height) for box in row]
        y += height + GAP
    return done


def _text_width(box: Box) -> float:
    lines = (len(line) * _LINE_CHAR for line in box.lines)
    return min(max([len(box.title) * _TITLE_CHAR, *lines]), _limit(box))


def _limit(box: Box) -> float:
    """The machine and its links have the page's width; the others share it."""
    return 3 * _TEXT_LIMIT if box.shape in (Shape.MACHINE, Shape.NVLINK) else _TEXT_LIMIT


def _cut(placed: Placed) -> Placed:
    room = placed.width - 2 * PAD
    return replace(
        placed,
        title=_fit(placed.box.title, room / _TITLE_CHAR),
        lines=tuple(_fit(line, room / _LINE_CHAR) for line in placed.box.lines),
    )


def _fit(text: str, room: float) -> str:
    most = max(round(room + 0.01), 1)
    return text if len(text) <= most else text[: most - 1] + "…"
