"""``crater estimate``: what a workload will need, before it is submitted, and where it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crater_slurm.errors import UsageError, nearest
from crater_slurm.model.request import REQUIREMENTS, Request, Requirement

if TYPE_CHECKING:
    from crater_slurm.model.workload import Workload

#: The directives that say what the work is; each is an option of the same name.
_ABOUT = frozenset(
    {
        *("task", "model", "model_params", "method", "framework", "precision", "quantization"),
        *("optimizer", "lora_rank", "micro_batch", "sequence_length", "activation_checkpointing"),
        *("sharding", "tensor_parallel", "pipeline_parallel", "gpus", "io_pattern"),
        "traced_memory_mib",
    }
)


def _value(requirement: Requirement) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def parsed(ctx: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        if text is None:
            return None
        try:
            return requirement.parse(text)
        except ValueError as error:
            raise UsageError(f"--{requirement.key}={text}: {error}") from None

    return parsed


def _workload_options(command: Callable[..., None]) -> Callable[..., None]:
    for requirement in reversed([r for r in REQUIREMENTS if r.attribute in _ABOUT]):
        command = click.option(
            f"--{requirement.key}",
            requirement.attribute,
            metavar=requirement.example,
            callback=_value(requirement),
            help=requirement.meaning,
        )(command)
    return command


@click.command()
@click.argument("script", required=False, type=click.Path(path_type=Path))
@_workload_options
@click.option("--job-nodes", type=click.IntRange(1, 100_000), default=1, metavar="N",
              help="Nodes of the job; --gpus counts those of one node.")  # fmt: skip
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE",
              help="What crater_slurm.job.trace_memory wrote, for --traced-memory.")  # fmt: skip
@click.option("--on", "card", metavar="CARD", help="A GPU model: does it fit, else what would?")
@click.option("--nodes", metavar="HOSTLIST", help="Cards of these nodes of the store, or 'all'.")
@click.option("--headroom", type=click.IntRange(0, 90), default=0, metavar="PERCENT",
              help="Part of each card that is to stay free.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Terms, interval and fits as JSON.")
def estimate(
    script: Path | None,
    job_nodes: int,
    trace: Path | None,
    card: str | None,
    nodes: str | None,
    headroom: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict the GPU memory of a workload, and its host's memory, cores and SSD.

    The work is described by options, or by the #CRATER lines of SCRIPT, which options overrule.
    """
    from crater_slurm.cli import estimate_view as view
    from crater_slurm.model.workload import workload_of

    if trace is not None:
        options["traced_memory_mib"] = _traced(trace)
    request = _request(script, options)
    workload = workload_of(request, (request.gpus or 1) * job_nodes)
    if workload is None:
        raise UsageError("no model is named; say --model Llama-3-8B or --model-params 8.03B")
    answer = view.answer(
        _checked(workload),
        cards=_cards(nodes),
        on=_card(card) if card else None,
        headroom=headroom / 100,
        io_pattern=request.io_pattern or "random",
    )
    if as_json:
        from crater_slurm.cli.output import print_json

        print_json(view.document(answer))
    else:
        view.show(answer)


def _traced(file: Path) -> int:
    """MiB of the peak that a trace tells. Raises UsageError for a file that is none."""
    from crater_slurm.model.memory_trace import TEXT_LIMIT, read_memory_trace

    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            text = opened.read(TEXT_LIMIT + 1)
    except OSError as error:
        raise UsageError(f"can't read trace {file}: {error.strerror}") from error
    return -(-read_memory_trace(text).peak_bytes // 2**20)


def _request(script: Path | None, options: dict[str, Any]) -> Request:
    given = {name: value for name, value in options.items() if value is not None}
    if script is None:
        return Request(**given)
    from crater_slurm.model.directives import parse_script

    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"can't read script {script}: {error.strerror}") from error
    read = parse_script(text)
    for note in read.notes:
        click.echo(f"crater: {note}", err=True)
    said = read.request.given() if read else {}
    return Request(**{**{f.name: None for f in fields(Request)}, **said, **given})


def _checked(workload: Workload) -> Workload:
    """``workload`` when its model's size can be told."""
    from crater_slurm.catalogue import llms

    if llms.describe(workload) is None:
        close = llms.nearest_models(workload.model or "")
        hint = f"; near to it are {', '.join(close)}" if close else ""
        raise UsageError(
            f"model {workload.model!r} is not in the catalogue and its name tells no size{hint}; "
            "add --model-params 8.03B"
        )
    share = workload.tensor_parallel * workload.pipeline_parallel
    if workload.gpus % share:
        raise UsageError(
            f"tensor-parallel x pipeline-parallel is {share}, which does not divide the "
            f"{workload.gpus} GPU{'s' if workload.gpus > 1 else ''} of the job; "
            f"say --gpus {share} or a multiple"
        )
    return workload


def _card(name: str) -> tuple[str, int]:
    """A card of the catalogue, and its memory in MiB as its driver shows it."""
    from crater_slurm.catalogue import gpu_models, lookup

    if model := lookup(name):
        return model.id, model.driver_memory_mib
    starting = [m for m in gpu_models() if m.startswith(name.lower())]
    if len(starting) == 1:
        return starting[0], gpu_models()[starting[0]].driver_memory_mib
    close = ", ".join(starting[:6]) or nearest(name.lower(), list(gpu_models()))
    hint = f"; did you mean {close}?" if close else "; 'crater estimate' without --on lists all"
    raise UsageError(f"the catalogue has no card {name!r}{hint}")


def _cards(nodes: str | None) -> list[tuple[str, int]]:
    """Cards with their memory in MiB: those of the named nodes, or the catalogue's."""
    if nodes is None:
        from crater_slurm.catalogue import gpu_models

        return [(model.id, model.driver_memory_mib) for model in gpu_models().values()]
    from crater_slurm.cli.profiles import expanded, open_store, stored

    store = open_store()
    names = tuple(store.names()) if nodes == "all" else expanded([nodes])
    found: dict[tuple[str, int], list[str]] = {}
    for profile in stored(store, names):
        for gpu in profile.gpus:
            if gpu.memory_mib is not None:
                on = found.setdefault((gpu.model, gpu.memory_mib), [])
                if profile.name not in on:
                    on.append(profile.name)
    if not found:
        raise UsageError(f"no GPU with a known memory on {nodes}; 'crater nodes show' tells why")
    return [
        (f"{model} ({on[0]}{f' and {len(on) - 1} more' if len(on) > 1 else ''})", memory)
        for (model, memory), on in found.items()
    ]
