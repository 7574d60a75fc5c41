"""A task as a batch script: which program, in what, with which options. Submits nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from crater_slurm import __version__
from crater_slurm.alldata import templates
from crater_slurm.alldata.blocks import Container
from crater_slurm.alldata.options import said
from crater_slurm.alldata.quoting import Quoted
from crater_slurm.alldata.request import directive_lines, request_of
from crater_slurm.alldata.task import Task
from crater_slurm.config.submit import Submit
from crater_slurm.errors import UsageError
from crater_slurm.model.request import Request

#: Options that say how many GPUs or cores; where a user gives one, the task's are left out.
_GPU_OPTIONS = frozenset(
    {
        *("--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"),
        *("--tres-per-task",),
    }
)
_CORE_OPTIONS = frozenset(
    {
        *("--cpus-per-task", "-c", "--cpus-per-gpu", "--ntasks", "-n", "--ntasks-per-node"),
        *("--threads-per-core", "--hint", "--mincpus", "--exclusive", "-B", "--extra-node-info"),
        *("--cores-per-socket", "--tres-per-task"),
    }
)


@dataclass(frozen=True, slots=True)
class Program:
    """What runs: the words behind the launcher; ``python`` when the first of them is a script
    that python3 or torchrun has to run."""

    words: tuple[str, ...] = ()
    python: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """A script, ready to be given to sbatch; ``notes`` are for the user."""

    script: str
    template: str
    notes: tuple[str, ...] = ()


def render(
    task: Task,
    settings: Submit,
    *,
    words: Sequence[str] = (),
    options: Sequence[str] = (),
    template: str | None = None,
    enforced: bool = False,
) -> Batch:
    """The script of a task. ``words`` are a program that is used instead of the task's own,
    ``options`` sbatch's, which win over the task's; ``enforced`` says that crater's filter will
    ask for what the directives say. UsageError when it can't be made."""
    notes = []
    program = program_of(task, settings, words)
    if not program.words:
        if settings.without_program == "refuse":
            raise UsageError(
                f"task {task.task_id}: no program is known; name one in /run_config/script or "
                f"/run_config/command, or the site one for {task.task_type} in submit.programs"
            )
        notes.append(
            "the task names no program: the job will only report what it was given; name one in "
            "/run_config/script or /run_config/command, or behind --"
        )
    chosen = templates.find(template or task.task_type, settings.templates)
    alone = settings.slurm_options == "all" or (settings.slurm_options == "auto" and not enforced)
    values = values_of(task, program, options, alone) | {"template": chosen.name}
    return Batch(templates.render(chosen, values, settings.templates), chosen.name, tuple(notes))


def program_of(task: Task, settings: Submit, words: Sequence[str] = ()) -> Program:
    """The program: the words given, else the task's, else the site's for such tasks."""
    run = task.run_config
    if words:
        if words[0].startswith("-") or not words[0]:
            raise UsageError(f"{words[0]!r} behind -- is no program; write -- program arguments")
        return _script(words[0], words[1:])
    if run and run.script:
        return _script(run.script, run.arguments or ())
    if run and run.command:
        return Program((*run.command, *(run.arguments or ())))
    site = settings.programs.get(task.task_type, ())
    return _script(site[0], site[1:]) if site else Program()


def _script(name: str, arguments: Sequence[str]) -> Program:
    if name.endswith(".sh"):
        return Program(("bash", name, *arguments))
    return Program((name, *arguments), python=name.endswith(".py"))


def values_of(
    task: Task, program: Program, options: Sequence[str] = (), alone: bool = True
) -> dict[str, Any]:
    """What a template can write; nothing else is known to it."""
    request = request_of(task)
    container = task.run_config.container if task.run_config else None
    return {
        "version": __version__,
        "task": _filled(type(task), task),
        "sbatch": sbatch_options(task, request, options, alone),
        "directives": [Quoted(line) for line in directive_lines(request)],
        "variables": list(variables(task, request).items()),
        "program": program.words,
        "python": program.python,
        "nodes": _nodes(task),
        "gpus": request.gpus or 0,
        "container": container.model_dump() if container else None,
        "pyxis": container is not None and container.runtime == "pyxis",
        "mounts": _mounts(container),
    }


def _nodes(task: Task) -> int:
    return (task.scheduling_config and task.scheduling_config.nodes) or 1


def _mounts(container: Container | None) -> tuple[str, ...]:
    return (container.mounts or ()) if container else ()


def _filled(block: type[BaseModel], value: BaseModel | None) -> dict[str, Any]:
    """The document with every field, so that a template may name each without asking first."""
    found: dict[str, Any] = {}
    for name, field in block.model_fields.items():
        inner = getattr(value, name, None)
        kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
        below = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        found[field.alias or name] = _filled(below, inner) if below else inner
    return found


def sbatch_options(
    task: Task, request: Request, options: Sequence[str] = (), alone: bool = True
) -> list[str]:
    """Options for #SBATCH lines; an option family that the user gave too is left out.

    ``alone``: Slurm itself is asked for GPUs and cores.
    """
    scheduling, run = task.scheduling_config, task.run_config
    own = said(options)
    found: dict[str, str | None] = {"--job-name": (run and run.name) or task.task_id}
    if scheduling:
        found |= {
            "--partition": scheduling.partition,
            "--account": scheduling.account,
            "--qos": scheduling.qos,
            "--reservation": scheduling.reservation,
            "--time": _clock(scheduling.time_limit_seconds),
            "--nodes": str(scheduling.nodes) if scheduling.nodes else None,
        }
    if run:
        found |= {"--chdir": run.working_directory, "--output": run.output}
    lines = [f"{name}={value}" for name, value in found.items() if value]
    whole = request.gpus and not (request.mig or request.gpu_sharing)
    if alone and whole and not own & _GPU_OPTIONS:
        lines.append(f"--gres=gpu:{request.gpus}")
    if alone and request.cpus and not own & _CORE_OPTIONS:
        lines.append(f"--cpus-per-task={request.cpus}")
        if request.physical_cores is not False:
            lines.append("--threads-per-core=1")
    return lines


def _clock(seconds: int | None) -> str | None:
    """Slurm's D-HH:MM:SS."""
    if seconds is None:
        return None
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"


#: Variables of the request: where in the task each comes from.
_VARIABLES: Mapping[str, tuple[str, str]] = {
    "TASK_TRAIN_DATASET": ("data_config", "train_dataset"),
    "TASK_VAL_DATASET": ("data_config", "val_dataset"),
    "TASK_DATASET_SIZE_GB": ("data_config", "dataset_size_gb"),
    "TASK_MEAN_SAMPLE_TOKENS": ("data_config", "mean_sample_tokens"),
    "TASK_STAGE": ("training_config", "stage"),
    "TASK_LORA_ALPHA": ("training_config", "lora_alpha"),
}
_REQUEST_VARIABLES = (
    *("model", "precision", "quantization", "method", "framework", "optimizer", "lora_rank"),
    *("micro_batch", "sequence_length", "sharding", "tensor_parallel", "pipeline_parallel"),
    *("activation_checkpointing", "io_pattern"),
)


def variables(task: Task, request: Request) -> dict[str, str]:
    """The TASK_ variables of a job: what was asked for, where no CRATER_ variable tells it."""
    found: dict[str, Any] = {"TASK_ID": task.task_id, "TASK_TYPE": task.task_type}
    for name in _REQUEST_VARIABLES:
        found[f"TASK_{name.upper()}"] = getattr(request, name)
    for name, (block, field) in _VARIABLES.items():
        found[name] = getattr(getattr(task, block), field, None)
    return {name: _text(value) for name, value in found.items() if value is not None}


def _text(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def command_line(argv: Sequence[str]) -> str:
    """A command line for people to read and to repeat."""
    return shlex.join(argv)
