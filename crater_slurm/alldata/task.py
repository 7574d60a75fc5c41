"""A task as AllData sends it: one strict document, checked as a whole before anything is done.

Every mistake is told at once, with its JSON pointer, what is there and what is valid. Nothing is
guessed or corrected silently, and a document of another schema version is refused by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from crater_slurm.alldata.blocks import (
    Block,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ResourceRequirements,
    RunConfig,
    SchedulingConfig,
    Sla,
    TopologyAwareness,
    TrainingConfig,
)
from crater_slurm.alldata.document import (
    Problem,
    TaskError,
    key_for_people,
    pointer,
    read,
    shown,
)
from crater_slurm.alldata.rules import Directive, Number, Text
from crater_slurm.errors import nearest

SCHEMA_VERSION = 1
#: What other documents of the source text call a block.
_OTHER_NAMES = {"task_sla": "sla", "id": "task_id", "type": "task_type", "model": "model_config"}


class Task(Block):
    """One task. ``settings`` is the document's ``model_config``, a name that pydantic needs."""

    model_config = ConfigDict(title="crater task", extra="forbid", frozen=True)

    schema_version: Annotated[
        int,
        Number(
            minimum=SCHEMA_VERSION,
            maximum=SCHEMA_VERSION,
            nullable=False,
            meaning="Version of this schema.",
        ),
    ] = SCHEMA_VERSION
    task_id: Annotated[
        str,
        Text(
            # No separator of a comment, a file's or a job's name.
            pattern=r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}",
            form="letters, digits and . _ : -, beginning with a letter or digit, at most 128",
            meaning="The platform's own name of the task; one name is one job.",
            example="task-20260101-001",
            longest=128,
            nullable=False,
        ),
    ]
    task_type: Annotated[str, Directive(key="task", nullable=False)]
    settings: ModelConfig | None = Field(alias="model_config")
    data_config: DataConfig | None
    resource_requirements: ResourceRequirements
    sla: Sla | None
    training_config: TrainingConfig | None = None
    topology_awareness: TopologyAwareness | None = None
    checkpoint_config: CheckpointConfig | None = None
    scheduling_config: SchedulingConfig | None = None
    run_config: RunConfig | None = None


def parse(data: bytes | str) -> Task:
    """The task in a JSON text. Raises TaskError with every mistake in it."""
    document, problems = read(data)
    known = {problem.pointer for problem in problems}
    task: Task | None = None
    try:
        task = Task.model_validate(document)
    except ValidationError as error:
        # What can't be read was told already: whether it is also out of range says nothing.
        problems += [p for p in _problems(error) if p.pointer not in known]
    if task is not None:
        problems += _contradictions(task)
    if problems or task is None:
        raise TaskError(problems)
    return task


def fingerprint(task: Task, *beside: Any) -> str:
    """Twelve hex digits that are the same for two spellings of one task, and for no other.

    ``beside`` is what else decides about the job, such as options of a command line.
    """
    said = task.model_dump(mode="json", by_alias=True, exclude_none=True)
    canonical = json.dumps([said, *beside] if any(beside) else said, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def json_schema() -> dict[str, Any]:
    """JSON Schema of a task (draft 2020-12)."""
    schema = Task.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def _problems(error: ValidationError) -> Iterator[Problem]:
    for found in error.errors(include_url=False, include_context=False):
        path = found["loc"]
        kind = found["type"]
        if kind == "missing":
            yield _missing(path)
        elif kind == "extra_forbidden":
            yield _unknown(path, found["input"])
        elif kind in ("model_type", "model_attributes_type", "dict_type"):
            words = "must be an object" + ("" if _required_block(path) else ", or null")
            yield Problem(pointer(*path), "type", shown(found["input"]), words)
        else:
            code = kind if kind in ("type", "value") else "value"
            yield Problem(pointer(*path), code, shown(found["input"]), found["msg"])


def _required_block(path: tuple[str | int, ...]) -> bool:
    return not path or path[-1] in ("resource_requirements", "gpu", "cpu")


def _missing(path: tuple[str | int, ...]) -> Problem:
    names = _fields(path[:-1])
    rule = next((r for r in getattr(names.get(str(path[-1])), "metadata", [])), None)
    words = "is missing"
    if isinstance(rule, Directive):
        words += f": {_lower(rule.requirement.meaning)}"
    elif rule is not None and rule.meaning:
        words += f": {_lower(rule.meaning)}"
    if rule.nullable if rule is not None else not _required_block(path):
        words += "; null says that there is no wish"
    return Problem(pointer(*path), "missing", None, words)


def _lower(sentence: str) -> str:
    """A sentence as a part of another; words such as GPU stay."""
    first = sentence if sentence[1:2].isupper() else sentence[:1].lower() + sentence[1:]
    return first.removesuffix(".")


def _unknown(path: tuple[str | int, ...], value: Any) -> Problem:
    names = list(_fields(path[:-1]))
    key = str(path[-1])
    close = _OTHER_NAMES.get(key) if len(path) == 1 else None
    close = close or nearest(key[:128], names)
    home = next((f for f in _everywhere(Task) if f.endswith(f"/{key}")), None)
    meant = f"it belongs to {home}. " if home else f"did you mean {close}? " if close else ""
    where = pointer(*(key_for_people(part) for part in path))
    return Problem(
        where, "unknown", shown(value), f"is unknown; {meant}Valid here are {', '.join(names)}"
    )


def _fields(path: tuple[str | int, ...]) -> dict[str, Any]:
    """The fields of the block at a path, by the names they have in the document."""
    block: type[BaseModel] = Task
    for part in path:
        field = _by_name(block).get(str(part))
        below = _block_of(field.annotation) if field is not None else None
        if below is None:
            return {}
        block = below
    return _by_name(block)


def _everywhere(block: type[BaseModel], above: str = "") -> Iterator[str]:
    """Pointers of all fields that there are."""
    for name, field in _by_name(block).items():
        yield f"{above}/{name}"
        if below := _block_of(field.annotation):
            yield from _everywhere(below, f"{above}/{name}")


def _by_name(block: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in block.model_fields.items()}


def _block_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _names_a_program(command: tuple[str, ...]) -> bool:
    return bool(command and command[0] and not command[0].startswith("-"))


def _contradictions(task: Task) -> Iterator[Problem]:
    """What no single field can know."""
    yield from _of_topology(task.topology_awareness)
    yield from _of_run(task.run_config)
    gpu = task.resource_requirements.gpu
    for name in ("memory_mb", "type", "mig") if gpu.count == 0 else ():
        if getattr(gpu, name) is not None:
            yield Problem(
                f"/resource_requirements/gpu/{name}",
                "contradiction",
                shown(getattr(gpu, name)),
                "says something of GPUs, and count is 0; make it null or count at least 1",
            )


def _of_topology(topology: TopologyAwareness | None) -> Iterator[Problem]:
    if topology is None or topology.enable_numa_binding is None:
        return
    at = "/topology_awareness/numa_binding_policy"
    policy = topology.numa_binding_policy
    if topology.enable_numa_binding and policy is None:
        words = "is needed with enable_numa_binding: strict or best_effort"
        yield Problem(at, "missing", None, words)
    if not topology.enable_numa_binding and policy is not None:
        words = "contradicts enable_numa_binding, false"
        yield Problem(at, "contradiction", shown(policy), words)


def _of_run(run: RunConfig | None) -> Iterator[Problem]:
    if run is None:
        return
    if run.command and run.script:
        words = "is given beside command; keep one of them"
        yield Problem("/run_config/script", "contradiction", shown(run.script), words)
    if run.command is not None and not _names_a_program(run.command):
        words = "names no program: the first word must be one, and not begin with -"
        yield Problem("/run_config/command", "value", shown(run.command), words)
    if run.arguments and not (run.command or run.script):
        words = "belong to no program; give script or command too"
        yield Problem("/run_config/arguments", "contradiction", shown(run.arguments), words)
