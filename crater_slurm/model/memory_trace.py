"""The record of a traced training step, read from the JSON that ``trace_memory`` writes.

The file comes from a user, so nothing in it is believed: its size, every key, every type and every
bound is checked, and the sums must agree. Reading the file itself is the caller's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from crater_slurm.errors import UsageError, nearest

VERSION = 1
#: A real record has some 500 characters.
TEXT_LIMIT = 8192
#: 1 PiB: no process has more memory on its GPU, and sums stay exact as floats too.
BYTES_LIMIT = 2**50
STEPS_LIMIT = 100

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "temporaries",
    "buffers",
    "inputs",
    "other",
)
PHASES = ("forward", "backward", "optimizer")
DEVICES = ("cuda", "cpu")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrace:
    """Live bytes of one process's tensors at the peak of ``steps`` steps.

    ``by_category`` adds up to ``peak_bytes``; ``by_phase`` has the highest total of each phase.
    What a GPU needs beyond tensors (context, libraries' workspaces, fragments) is not in it.
    """

    peak_bytes: int
    by_category: dict[str, int]
    by_phase: dict[str, int]
    torch: str
    precision: str
    device: str
    steps: int


def read_memory_trace(text: str) -> MemoryTrace:
    """The record in ``text``; UsageError says what is wrong with it."""
    if len(text) > TEXT_LIMIT:
        raise UsageError(
            f"the memory trace has {len(text)} characters, more than {TEXT_LIMIT}; "
            "give the file that trace_memory wrote"
        )
    fields = _object(_parsed(text), "the memory trace")
    version = fields.get("version")
    if type(version) is not int or version != VERSION:
        raise UsageError(
            f"the memory trace's version is {_shown(fields.get('version'))}, this crater reads "
            f"{VERSION}; trace again with the crater_slurm of this version"
        )
    known = ("version", *MemoryTrace.__dataclass_fields__)
    _keys(fields, known, "the memory trace")
    trace = MemoryTrace(
        peak_bytes=_whole(fields["peak_bytes"], "peak_bytes", 1, BYTES_LIMIT),
        by_category=_sizes(fields["by_category"], "by_category", CATEGORIES),
        by_phase=_sizes(fields["by_phase"], "by_phase", PHASES),
        torch=_word(fields["torch"], "torch"),
        precision=_word(fields["precision"], "precision"),
        device=_device(fields["device"]),
        steps=_whole(fields["steps"], "steps", 1, STEPS_LIMIT),
    )
    _agree(trace)
    return trace


def _agree(trace: MemoryTrace) -> None:
    total = sum(trace.by_category.values())
    if total != trace.peak_bytes:
        raise UsageError(f"by_category adds up to {total}, but peak_bytes is {trace.peak_bytes}")
    highest = max(trace.by_phase.values())
    if highest != trace.peak_bytes:
        raise UsageError(f"by_phase's highest is {highest}, but peak_bytes is {trace.peak_bytes}")


def _parsed(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the memory trace is no valid JSON: {_shown(str(error))}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{name} is {_shown(value)}, not a JSON object")
    return value


def _keys(found: dict[str, Any], known: tuple[str, ...], name: str) -> None:
    for key in found:
        if key not in known:
            near = nearest(key[:64], known)
            hint = f"; {near} is near" if near else ""
            raise UsageError(f"{name} has an unknown key {_shown(key)}{hint}")
    missing = [key for key in known if key not in found]
    if missing:
        raise UsageError(f"{name} lacks {', '.join(missing)}")


def _whole(value: object, name: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name}: {_shown(value)} is not a whole number from {low} to {high}")
    return value


def _sizes(value: object, name: str, known: tuple[str, ...]) -> dict[str, int]:
    sizes = _object(value, name)
    _keys(sizes, known, name)
    return {key: _whole(sizes[key], f"{name}.{key}", 0, BYTES_LIMIT) for key in known}


def _word(value: object, name: str) -> str:
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise UsageError(f"{name}: {_shown(value)} is not a word of at most 32 characters")
    return value


def _device(value: object) -> str:
    if not isinstance(value, str) or value not in DEVICES:
        raise UsageError(f"device: {_shown(value)} is none of {', '.join(DEVICES)}")
    return value


def _shown(value: object) -> str:
    """A value as a message quotes it. Never longer than a line; a huge number can't be printed."""
    if isinstance(value, int) and abs(value) > BYTES_LIMIT * BYTES_LIMIT:
        return "a number far too large"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
