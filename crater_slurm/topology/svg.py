"""The drawing as one SVG file: no scripts, no fonts or images from elsewhere, the same each time.

Names come from hardware and users, so all text is escaped. Colours follow the reader's choice of
light or dark; a link below its maximum is marked by its frame and by a sign, not by colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from crater_slurm.model.profile import NodeProfile
from crater_slurm.topology.layout import LINE_HEIGHT, PAD, TITLE_HEIGHT, Placed, place
from crater_slurm.topology.scene import LEAVES, Shape, scene, walk
from crater_slurm.topology.words import BELOW_MEANS

_MARGIN = 16
_FOOT = 26
#: Fill and frame in light, then in dark.
_COLOURS: dict[Shape, tuple[str, str, str, str]] = {
    Shape.MACHINE: ("#ffffff", "#aab4c0", "#14181d", "#4a5561"),
    Shape.PACKAGE: ("#f1f4f8", "#b9c3cf", "#1b2128", "#47525e"),
    Shape.NUMA: ("#e2eaf3", "#8fa5bd", "#232d38", "#5b7088"),
    Shape.ELSEWHERE: ("#f7f1f1", "#c7b3b3", "#2a2222", "#6b5555"),
    Shape.L3: ("#faf6e6", "#cdbf85", "#35301c", "#7d713f"),
    Shape.ROOT: ("#f9fbfd", "#9aa9b8", "#1a222a", "#566370"),
    Shape.SWITCH: ("#eceff3", "#8895a3", "#2a333c", "#66737f"),
    Shape.GPU: ("#d6efcd", "#5c9a49", "#20401a", "#6fae5c"),
    Shape.NIC: ("#d5e5fa", "#4a7ec2", "#1a3357", "#6a9bdc"),
    Shape.NVME: ("#fce4c4", "#c98a2f", "#4a3210", "#d9a04a"),
    Shape.NVLINK: ("#e9f7e4", "#5c9a49", "#1a3015", "#6fae5c"),
}
_STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;fill:#1d252d}
.t{font-size:12.5px;font-weight:600}.l{font-size:11.5px}.m{font-size:11.5px;font-weight:600}
.paper{fill:#f5f6f8}
"""
_DARK = "text{fill:#e4e9ee}.paper{fill:#0d1013}"
#: After the colours of shapes, which it overrides.
_BELOW = ".below{{stroke:{};stroke-width:2.5;stroke-dasharray:6 3}}"


def draw(profile: NodeProfile) -> str:
    """A stand-alone SVG document of a node."""
    picture = scene(profile)
    placed = place(picture)
    warned = any(box.warn for box in walk(picture))
    width = placed.width + 2 * _MARGIN
    height = placed.height + 2 * _MARGIN + (_FOOT if warned else 0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        f"<title>{escape(picture.title)}: GPUs, NICs and NVMe drives by NUMA node</title>",
        f"<style>{_STYLE}{_rules(0)}{_BELOW.format('#c0331f')}",
        "@media (prefers-color-scheme:dark){",
        f"{_DARK}{_rules(2)}{_BELOW.format('#ff7a63')}}}</style>",
        '<rect class="paper" width="100%" height="100%"/>',
        *_box(placed, _MARGIN, _MARGIN),
    ]
    if warned:
        lines.append(_text("l", _MARGIN + PAD, height - _FOOT + 10, BELOW_MEANS))
    return "\n".join((*lines, "</svg>", ""))


def _rules(first: int) -> str:
    return "".join(
        f".{shape}{{fill:{colours[first]};stroke:{colours[first + 1]}}}"
        for shape, colours in _COLOURS.items()
    )


def _box(placed: Placed, x: float, y: float) -> Iterator[str]:
    """The box at these coordinates of the page, with what is in it."""
    box = placed.box
    whole = "\n".join((box.title, *box.lines))
    yield "<g>"
    yield f"<title>{escape(whole)}</title>"
    frame = f"{box.shape} below" if box.warn else box.shape
    radius = 5 if box.shape in LEAVES else 8
    yield (
        f'<rect class="{frame}" x="{x:.1f}" y="{y:.1f}" width="{placed.width:.1f}" '
        f'height="{placed.height:.1f}" rx="{radius}"/>'
    )
    base = y + (PAD if placed.children or box.shape not in LEAVES | {Shape.L3} else 4) + 12
    yield _text("t", x + PAD, base, placed.title)
    for i, line in enumerate(placed.lines):
        # Memory and its bandwidth are what a NUMA node is looked at for.
        look = "m" if box.shape is Shape.NUMA and i == 0 else "l"
        yield _text(look, x + PAD, base + TITLE_HEIGHT - 2 + i * LINE_HEIGHT, line)
    for child in placed.children:
        yield from _box(child, x + child.x, y + child.y)
    yield "</g>"


def _text(look: str, x: float, y: float, text: str) -> str:
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
