"""A state as a safetensors file: first the plan, which says where each byte goes, then the bytes.

The plan depends on shapes, types, strides and shared storages alone; it is kept from save to
save and made again when one of them changes. docs/checkpoint-format.md describes the file.
"""

from __future__ import annotations

import contextlib
import gc
import json
import pickle
import struct

from crater_slurm.job import leaf
from crater_slurm.job.copying import Image, Segment, pointer_of
from crater_slurm.job.tree import Leaves, dumps, unique_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

SKELETON = "crater.skeleton"
FORMAT = "1"
#: The header is padded so that the first tensor lies at a multiple of this.
_ALIGN = 64
_PAGE = 4096
#: Tensors from which the place in the page is looked at.
_LARGE = 16 << 20
#: No type has elements of more bytes.
_WIDEST = 16


class Entry:
    """One tensor of the file: the values of a leaf (its number is ``owner``) in order or, where it
    is ``flat``, ``nbytes`` from ``low`` of what that leaf lies in."""

    __slots__ = ("dtype", "flat", "low", "name", "nbytes", "owner", "shape", "width")

    def __init__(self, owner: int, fact: leaf.Fact) -> None:
        self.owner = owner
        self.flat = False
        self.low, self.nbytes = 0, fact.nbytes
        self.dtype, self.shape, self.width = fact.entry_dtype, fact.entry_shape, fact.width
        self.name = ""

    def make_flat(self, low: int, high: int) -> None:
        """Let the entry be a stretch of memory that several leaves are views of."""
        self.flat, self.low, self.nbytes = True, low, high - low
        self.dtype, self.shape, self.width = "U8", [high - low], _WIDEST


class Plan:
    """Where the leaves of one kind of state go. ``table`` is what the file says of them."""

    def __init__(self, facts: list[leaf.Fact], paths: list[str]) -> None:
        self.key = (facts, paths)
        self.entries: list[Entry] = []
        self.table: list[tuple[Any, ...]] = [()] * len(facts)
        for numbers in leaf.shared(facts):
            self._place(numbers, facts)
        order = sorted(range(len(self.entries)), key=lambda n: (-self.entries[n].width, n))
        where = {old: new for new, old in enumerate(order)}
        self.entries = [self.entries[old] for old in order]
        self.table = [(where[row[0]], *row[1:]) for row in self.table]
        names = unique_names([paths[entry.owner] for entry in self.entries], _TAKEN)
        parts, self.offsets, at = [], [], 0
        for entry, name in zip(self.entries, names):  # noqa: B905  (Python 3.9 has no strict)
            entry.name = name
            self.offsets.append(at)
            parts.append(
                f"{json.dumps(name)}:{_described(entry.dtype, entry.shape, at, entry.nbytes)}"
            )
            at += entry.nbytes
        self.nbytes = at
        self.header = ",".join(parts)

    def _place(self, numbers: list[int], facts: list[leaf.Fact]) -> None:
        """Give leaves that share memory, or one alone, an entry of the file."""
        low = min(facts[n].low for n in numbers)
        high = max(facts[n].high for n in numbers)
        even = all((facts[n].low - low) % facts[n].itemsize == 0 for n in numbers)
        whole = [n for n in numbers if facts[n].is_whole and facts[n].nbytes == high - low]
        owner = whole[0] if whole and even else numbers[0]
        entry = Entry(owner, facts[owner])
        alone = len(numbers) == 1 and high - low >= facts[owner].nbytes
        if not (alone or (whole and even)):
            low -= low % _WIDEST
            entry.make_flat(low, high)
        index = len(self.entries)
        self.entries.append(entry)
        for n in numbers:
            self.table[n] = (index, *facts[n].row(0 if alone else facts[n].low - low, alone))


_TAKEN = {SKELETON, "__metadata__"}


def _described(dtype: str, shape: list[int], at: int, nbytes: int) -> str:
    whole = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
    return json.dumps(whole, separators=(",", ":"))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector: thousands of small objects that all stay would have it look
    through the whole of the training's memory several times."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Packer:
    """Makes images of states; remembers the last plan."""

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def pack(self, state: Any, metadata: dict[str, str]) -> Image:
        """The file's bytes, still lying in the state's own memory. Raises StateError; copies
        nothing, so the state must not change before the image has been copied."""
        with _no_collection():
            return self._packed(state, metadata)

    def _packed(self, state: Any, metadata: dict[str, str]) -> Image:
        leaves = Leaves()
        leaves.walk(state)
        rest = dumps(state, leaves)
        facts, sources = leaf.look(leaves.objects)
        plan = self._plan
        if plan is None or plan.key != (facts, leaves.paths):
            plan = self._plan = Plan(facts, leaves.paths)
        skeleton = pickle.dumps(plan.table, protocol=5) + rest
        described = {"crater": FORMAT, **metadata}
        if any(fact.kind == "torch" for fact in facts):
            described.setdefault("format", "pt")  # transformers reads no file without it
        header = _header(plan, described, len(skeleton), _residue(plan, sources))
        return Image(_segments(plan, sources, header, skeleton))


def _header(plan: Plan, metadata: dict[str, str], skeleton: int, residue: int | None) -> bytes:
    """The header, padded with spaces as safetensors allows: to a multiple of _ALIGN, or so that
    the first tensor lies ``residue`` bytes after the beginning of a page."""
    parts = [f'"__metadata__":{json.dumps(metadata)}']
    if plan.header:
        parts.append(plan.header)
    parts.append(f'"{SKELETON}":{_described("U8", [skeleton], plan.nbytes, skeleton)}')
    text = ("{" + ",".join(parts) + "}").encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    if residue is not None:
        text += b" " * ((residue - len(text) - 8) % _PAGE)
    return struct.pack("<Q", len(text)) + text


def _residue(plan: Plan, sources: list[leaf.Source]) -> int | None:
    """Where in a page the tensors should begin. A target a little further into its page than the
    source is into its own makes the processor wait for its own stores: 2 GB/s instead of 9. None
    where it does not matter."""
    cost: dict[int, int] = {}
    for entry, at in zip(plan.entries, plan.offsets):  # noqa: B905
        if entry.nbytes >= _LARGE:
            pointer = leaf.segment(sources[entry.owner], 0, entry.nbytes, _span(entry)).pointer
            if pointer:
                middle = (pointer - at + _PAGE // 2) % _PAGE // _ALIGN * _ALIGN
                cost[middle] = cost.get(middle, 0) + entry.nbytes
    return max(cost, key=lambda residue: cost[residue]) if cost else None


def _span(entry: Entry) -> tuple[int, int] | None:
    return (entry.low, entry.low + entry.nbytes) if entry.flat else None


def _segments(
    plan: Plan, sources: list[leaf.Source], header: bytes, skeleton: bytes
) -> list[Segment]:
    base = len(header)
    segments = [Segment(0, base, pointer_of(header), header)]
    for entry, at in zip(plan.entries, plan.offsets):  # noqa: B905
        if entry.nbytes:
            source = sources[entry.owner]
            segments.append(leaf.segment(source, base + at, entry.nbytes, _span(entry)))
    end = base + plan.nbytes
    segments.append(Segment(end, len(skeleton), pointer_of(skeleton), skeleton))
    return segments
