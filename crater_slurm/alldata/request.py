"""A task as a request: what ``#CRATER`` lines say, said in JSON, becomes the very same thing.

The table is in the task's fields themselves, each of which names its directive.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from pydantic import BaseModel

from crater_slurm.alldata.rules import Directive
from crater_slurm.alldata.task import Task
from crater_slurm.model.request import REQUIREMENTS, Request, Requirement

#: Stages that are a method; supervised fine-tuning may be one of several.
_METHODS = {
    "pretrain": "pretrain",
    "lora": "lora",
    "rlhf": "rlhf",
    "dpo": "dpo",
    "inference": "inference",
}
_LONGEST_LINE = 100


def counterparts(block: type[BaseModel] = Task, above: str = "") -> dict[str, str]:
    """JSON pointer of each directive that a task can say, by the directive's key."""
    found: dict[str, str] = {}
    for name, field in block.model_fields.items():
        here = f"{above}/{field.alias or name}"
        for rule in field.metadata:
            if isinstance(rule, Directive):
                found[rule.key] = here
        for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                found |= counterparts(candidate, here)
    return found


def request_of(task: Task) -> Request:
    """The request that a task makes."""
    values = dict(_values(task))
    training = task.training_config
    if training and training.stage and "method" not in values and training.stage in _METHODS:
        values["method"] = _METHODS[training.stage]
    return Request(**values)


def _values(block: BaseModel) -> Iterator[tuple[str, Any]]:
    for name, field in type(block).model_fields.items():
        value = getattr(block, name)
        if isinstance(value, BaseModel):
            yield from _values(value)
        for rule in field.metadata:
            if isinstance(rule, Directive) and value is not None:
                yield rule.requirement.attribute, value


def directive_lines(request: Request) -> list[str]:
    """``#CRATER`` lines that are read back as exactly this request."""
    lines: list[str] = []
    for requirement in REQUIREMENTS:
        value = getattr(request, requirement.attribute)
        if value is None:
            continue
        word = shlex.quote(_word(requirement, value))
        if lines and len(lines[-1]) + len(word) < _LONGEST_LINE:
            lines[-1] += f" {word}"
        else:
            lines.append(f"#CRATER {word}")
    return lines


def _word(requirement: Requirement, value: Any) -> str:
    """``key=value`` as people write it, or to the last digit where that would lose some."""
    word = requirement.format(value)
    try:
        if requirement.parse(word.partition("=")[2]) == value:
            return word
    except ValueError:
        pass  # such as 1e-09B
    return f"{requirement.key}={Decimal(repr(value)):f}"
