"""The sample settings file, written from the settings themselves so that it can't grow stale."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from crater_slurm.config.settings import Settings

_HEAD = """\
# Settings of crater-slurm: /etc/crater/crater.yaml, the same file on every node.
# Every line shows a default; remove the # in front of a value (and of its section) to change it.
# 'crater config show' prints what is in force and where it comes from.
"""


def sample() -> str:
    """The file's text."""
    return _HEAD + "\n".join(_section(Settings(), 0)) + "\n"


def _section(model: BaseModel, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, entry in type(model).model_fields.items():
        value = getattr(model, name)
        yield ""
        if isinstance(value, BaseModel):
            yield f"# {indent}{name}:"
            yield from _section(value, depth + 1)
            continue
        for line in textwrap.wrap(entry.description or "", 92 - len(indent)):
            yield f"# {indent}# {line}"
        yield f"# {indent}{name}: {_yaml(model.model_dump(mode='json')[name])}"


def _yaml(value: Any) -> str:
    return "null" if value is None else json.dumps(value, ensure_ascii=False)


def markdown_table() -> str:
    """Every setting with default and meaning, as the documentation has it."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    rows += _rows(Settings(), "")
    return "\n".join(rows)


def _rows(model: BaseModel, prefix: str) -> Iterator[str]:
    shown = model.model_dump(mode="json")
    for name, entry in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _rows(value, f"{prefix}{name}.")
        else:
            yield f"| `{prefix}{name}` | `{_yaml(shown[name])}` | {entry.description} |"
