"""The drawing in a terminal: boxes in boxes like lstopo, then the matrix and the nearest pairs.

Every line fits the width that is given. Where the output can't encode box characters, plain
ASCII takes their place.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from crater_slurm.model.profile import NodeProfile
from crater_slurm.topology import tables
from crater_slurm.topology.scene import LEAVES, Box, Shape, scene, walk
from crater_slurm.topology.words import BELOW_MEANS

#: Box characters: corners, then the horizontal and the vertical line.
_UNICODE, _ASCII = "┌┐└┘─│", "++++-|"
#: A wish for width ends here; longer lists of CPUs are wrapped.
_WISH_LIMIT = 38
#: What a frame takes of the width: a line and a blank on both sides.
_FRAME = 4
#: More L3 domains than this share lines instead of having one each.
_L3_LINES = 4
NARROWEST = 40
#: In less than this, boxes in boxes become plain lines: a frame would leave no room for words.
_NARROWEST_BOX = 20


@dataclass(frozen=True, slots=True)
class Paper:
    """What is drawn on: its width in characters, and whether it shows ASCII alone."""

    width: int = 100
    ascii_only: bool = False

    def fit(self, text: str) -> str:
        """The text with one cell for each character, so that frames stay straight."""
        if self.ascii_only:
            return text.replace("…", "~").encode("ascii", "replace").decode("ascii")
        return "".join(c if _one_cell(c) else "?" for c in text)


def draw(profile: NodeProfile, width: int = 100, *, ascii_only: bool = False) -> str:
    """Drawing, matrix and nearest pairs of a node, ending with a newline."""
    paper = Paper(max(width, NARROWEST), ascii_only)
    picture = scene(profile)
    blocks = ["\n".join(_box(paper, picture, paper.width))]
    if any(box.warn for box in walk(picture)):
        blocks[0] += "\n" + "\n".join(textwrap.wrap(BELOW_MEANS, paper.width))
    for table in tables.tables(profile, paper.width):
        blocks.append("\n".join(paper.fit(line)[: paper.width].rstrip() for line in table))
    return "\n\n".join(blocks) + "\n"


def _one_cell(char: str) -> bool:
    return unicodedata.east_asian_width(char) not in "WF" and not unicodedata.combining(char)


def _box(paper: Paper, box: Box, width: int, height: int = 0) -> list[str]:
    """The framed box, each line of exactly the width; at least ``height`` lines."""
    corners = _ASCII if paper.ascii_only else _UNICODE
    body = _body(paper, box, width - _FRAME)
    body += [""] * (height - 2 - len(body))
    title = paper.fit(box.title)
    if len(title) > width - 6:
        title = title[: max(width - 7, 0)] + paper.fit("…")
    top = f"{corners[4]} {title} ".ljust(width - 2, corners[4])[: width - 2]
    side = corners[5]
    return [
        corners[0] + top + corners[1],
        *(f"{side} {line.ljust(width - _FRAME)} {side}" for line in body),
        corners[2] + corners[4] * (width - 2) + corners[3],
    ]


def _body(paper: Paper, box: Box, width: int) -> list[str]:
    lines: list[str] = []
    for text in _paragraphs(box):
        lines += _wrap(paper.fit(text), width)
    for child in box.children:
        if child.shape in LEAVES:
            lines += _device(paper, child, width)
    boxes = [child for child in box.children if child.shape not in LEAVES]
    return lines + _flow(paper, boxes, width)


def _paragraphs(box: Box) -> Sequence[str]:
    """A box's lines. Many L3 domains share lines, or they would be the tallest thing drawn."""
    if box.shape is not Shape.L3 or len(box.lines) <= _L3_LINES:
        return box.lines
    return [" | ".join(line.removeprefix("CPUs ") for line in box.lines)]


def _device(paper: Paper, box: Box, width: int) -> list[str]:
    """A device on one line, or its facts below its title where that is too long."""
    line = paper.fit("  ".join((box.title, *box.lines)))
    if len(line) <= width:
        return [line]
    lines = _wrap(paper.fit(box.title), width)
    for fact in box.lines:
        # The first fact that does not fit begins an indented line; those after it fill it up.
        longer = paper.fit(f"{lines[-1]}  {fact}")
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines += ["  " + part for part in _wrap(paper.fit(fact), width - 2)]
    return lines


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 1), break_on_hyphens=False)


def _wish(paper: Paper, box: Box) -> int:
    """The width at which the box reads well."""
    inside = [0]
    inside += [min(len(paper.fit(text)), _WISH_LIMIT) for text in _paragraphs(box)]
    for child in box.children:
        if child.shape in LEAVES:
            inside += [min(2 + len(paper.fit(fact)), _WISH_LIMIT) for fact in child.lines]
            inside.append(min(len(child.title), _WISH_LIMIT))
        else:
            inside.append(_wish(paper, child))
    return max(max(inside) + _FRAME, len(box.title) + 6)


def _flow(paper: Paper, boxes: Sequence[Box], width: int) -> list[str]:
    """Boxes side by side where they fit, in rows of equal height that fill the width."""
    lines: list[str] = []
    if width < _NARROWEST_BOX:
        for box in boxes:
            lines += [*_wrap(paper.fit(box.title), width), *_body(paper, box, width)]
        return lines
    for row in _rows([(box, min(_wish(paper, box), width)) for box in boxes], width):
        spare = width - sum(wish for _, wish in row) - (len(row) - 1)
        share, more = divmod(spare, len(row))
        sized = [(box, wish + share + (i < more)) for i, (box, wish) in enumerate(row)]
        height = max(len(_box(paper, box, wide)) for box, wide in sized)
        columns = [_box(paper, box, wide, height) for box, wide in sized]
        lines += [" ".join(parts) for parts in zip(*columns, strict=True)]
    return lines


def _rows(boxes: Sequence[tuple[Box, int]], width: int) -> list[list[tuple[Box, int]]]:
    """Boxes in rows that fit, evenly filled: four in rows of three become two and two."""
    rows = _fill(boxes, width, len(boxes))
    if len(rows) > 1:
        even = _fill(boxes, width, -(-len(boxes) // len(rows)))
        if len(even) == len(rows):
            return even
    return rows


def _fill(boxes: Sequence[tuple[Box, int]], width: int, most: int) -> list[list[tuple[Box, int]]]:
    rows: list[list[tuple[Box, int]]] = []
    for box, wish in boxes:
        used = sum(wide + 1 for _, wide in rows[-1]) if rows else width
        if rows and len(rows[-1]) < most and used + wish <= width:
            rows[-1].append((box, wish))
        else:
            rows.append([(box, wish)])
    return rows
