"""Tasks that tests begin with and change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CASES = Path(__file__).parent / "tasks"
#: The source text's own task.
LLAMA = CASES / "valid" / "001-llama-3-8b.json"


def llama() -> dict[str, Any]:
    return dict(json.loads(LLAMA.read_text()))


def paths(document: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every field of a document, blocks before what is in them."""
    found = []
    for key, value in document.items():
        found.append((*above, key))
        if isinstance(value, dict):
            found += paths(value, (*above, key))
    return found


def without(document: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    changed = json.loads(json.dumps(document))
    block = changed
    for key in path[:-1]:
        block = block[key]
    del block[path[-1]]
    return dict(changed)


def put(document: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The document with one value changed; blocks that are not there are made."""
    changed = json.loads(json.dumps(document))
    block = changed
    for key in path[:-1]:
        block = block.setdefault(key, {})
    block[path[-1]] = value
    return dict(changed)
