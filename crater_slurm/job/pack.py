"""A state as a safetensors file: first the plan, which says where each byte goes, then the bytes.

The plan depends on shapes, types, strides and shared storages alone; it is kept from save to
save and made again when one of them changes. docs/checkpoint-format.md describes the file.
"""

from __future__ import annotations

import json
import struct

from crater_slurm.job import leaf
from crater_slurm.job.copying import Image, Segment, pointer_of
from crater_slurm.job.tree import Leaves, dumps, unique_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SKELETON = "crater.skeleton"
FORMAT = "1"
#: The header is padded so that the first tensor lies at a multiple of this.
_ALIGN = 64
#: No type has elements of more bytes.
_WIDEST = 16


class Entry:
    """One tensor of the file: bytes ``low`` to ``high`` of what ``owner`` (a leaf's number) lies
    in, or that leaf's values in order where ``flat`` is false."""

    __slots__ = ("dtype", "flat", "high", "low", "name", "owner", "shape", "width")

    def __init__(self, owner: int, fact: leaf.Fact) -> None:
        self.owner = owner
        self.flat = False
        self.low, self.high = 0, fact.nbytes
        self.dtype, self.shape, self.width = fact.entry_dtype, fact.entry_shape, fact.width
        self.name = ""

    def make_flat(self, low: int, high: int) -> None:
        """Let the entry be a stretch of memory that several leaves are views of."""
        self.flat, self.low, self.high = True, low, high
        self.dtype, self.shape, self.width = "U8", [high - low], _WIDEST

    @property
    def nbytes(self) -> int:
        return int(self.high - self.low)


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


class Packer:
    """Makes images of states; remembers the last plan."""

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def pack(self, state: Any, metadata: dict[str, str]) -> Image:
        """The file's bytes, still lying in the state's own memory. Raises StateError; copies
        nothing, so the state must not change before the image has been copied."""
        import pickle

        leaves = Leaves()
        leaves.walk(state)
        rest = dumps(state, leaves)
        sources = [leaf.source(value) for value in leaves.objects]
        facts = leaf.facts(sources)
        plan = self._plan
        if plan is None or plan.key != (facts, leaves.paths):
            plan = self._plan = Plan(facts, leaves.paths)
        skeleton = pickle.dumps(plan.table, protocol=5) + rest
        header = _header(plan, {"crater": FORMAT, **metadata}, len(skeleton))
        return Image(_segments(plan, sources, header, skeleton))


def _header(plan: Plan, metadata: dict[str, str], skeleton: int) -> bytes:
    parts = [f'"__metadata__":{json.dumps(metadata)}']
    if plan.header:
        parts.append(plan.header)
    parts.append(f'"{SKELETON}":{_described("U8", [skeleton], plan.nbytes, skeleton)}')
    text = ("{" + ",".join(parts) + "}").encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    return struct.pack("<Q", len(text)) + text


def _segments(plan: Plan, sources: list[Any], header: bytes, skeleton: bytes) -> list[Segment]:
    base = len(header)
    segments = [Segment(0, base, pointer_of(header), header)]
    for entry, at in zip(plan.entries, plan.offsets):  # noqa: B905
        if entry.nbytes:
            source = sources[entry.owner]
            span = (entry.low, entry.high) if entry.flat else None
            segments.append(leaf.segment(source, base + at, entry.nbytes, span))
    end = base + plan.nbytes
    segments.append(Segment(end, len(skeleton), pointer_of(skeleton), skeleton))
    return segments
