"""``crater simulate``: what a policy makes of a trace, before it is switched on."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crater_slurm.cli.output import print_table

if TYPE_CHECKING:
    from crater_slurm.simulate.study import Plan, Requests, Run
    from crater_slurm.simulate.trace import Trace

_file = click.Path(path_type=Path)
_FIRST_SEED = 42


@click.command()
@click.argument("trace", required=False, type=_file)
@click.option("--from-sacct", type=_file, metavar="FILE", help="Replay what sacct printed.")
@click.option("--from-jobcomp", type=_file, metavar="FILE", help="Replay a jobcomp/filetxt file.")
@click.option("--nodes", metavar="INVENTORY", help="CSV, profiles, or a lab's inventory.")
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="May be repeated.")
@click.option("--fill", type=click.FloatRange(0.01, 10), help="Fill up to this arrived load: 1.3.")
@click.option("--load", "loads", multiple=True, metavar="LOAD", help="0.9 or 90%; repeatable.")
@click.option("--seeds", default="1", show_default=True, help="42-51, 1,2,5, or how many from 42.")
@click.option(
    "--requests",
    type=click.Choice(["shares", "whole", "both"]),
    default="shares",
    show_default=True,
    help="As traced, or whole GPUs as on a stock cluster.",
)
@click.option("--cpus-per-gpu", type=click.FloatRange(0.001, 1024), help="For --requests whole.")
@click.option("--jobs", type=click.IntRange(1, 10**8), help="How many to draw.")
@click.option("--arrivals", type=click.Choice(["recorded", "drawn"]), help="With --load.")
@click.option("--longest", metavar="TIME", help="Cut run times: 7d, 12h; 'none' for no cut.")
@click.option("--every", type=click.IntRange(1), default=1, help="Keep each N-th node only.")
@click.option("--shards-per-gpu", type=click.IntRange(1, 1000), default=100, show_default=True)
@click.option("--depth", type=click.IntRange(1), default=500, show_default=True, help="Backfill's.")
@click.option("--warm-up", type=click.FloatRange(0, 0.9), help="Share of the arrivals not counted.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--csv", "csv_file", type=_file, metavar="FILE", help="Write the curves.")
@click.option("--plot", "plot_folder", type=_file, metavar="FOLDER", help="Write PNG and SVG.")
def simulate(
    trace: Path | None, from_sacct: Path | None, from_jobcomp: Path | None, nodes: str | None,
    as_json: bool, csv_file: Path | None, plot_folder: Path | None, every: int,
    shards_per_gpu: int, **asked: Any,
) -> None:  # fmt: skip
    """Replay the jobs of TRACE on nodes in memory, under one policy or several.

    With --fill, jobs arrive until the cluster is full and none ends. Otherwise jobs arrive, wait,
    run and end: as recorded, or so that --load is offered.
    """
    from crater_slurm.cli import simulate_nodes
    from crater_slurm.errors import UsageError
    from crater_slurm.simulate import results
    from crater_slurm.simulate.study import read_trace, study

    given = [file for file in (trace, from_sacct, from_jobcomp) if file]
    if len(given) != 1:
        raise UsageError("give one trace: TRACE, --from-sacct FILE or --from-jobcomp FILE")
    plan = _plan(**asked)
    if plot_folder:
        from crater_slurm.simulate import plots

        plots.require()
    cluster = (simulate_nodes.read(nodes) if nodes else simulate_nodes.stored()).every(every)
    opened = read_trace(given[0], cluster, shards=shards_per_gpu)
    if given[0] != trace and opened.format != "slurm":
        raise UsageError(f"{given[0]} is no history of Slurm, but of the form {opened.format}")
    if every > 1:
        opened.notes.say(f"nodes: each {every}-th of the inventory, {len(cluster.names)} of them")
    with _progress(as_json) as tick:
        runs = study(opened, cluster, _completed(plan, opened, asked["longest"] is None), tick)
    found = results.as_json(given[0].name, opened, cluster, plan, runs)
    if csv_file:
        _write(csv_file, lambda: results.write_csv(csv_file, runs))
    written: list[Path] = []
    if plot_folder:
        _write(plot_folder, lambda: written.extend(plots.write(plot_folder, cluster, plan, runs)))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found, opened, plan, runs)
        for file in written:
            click.echo(f"wrote {file}")


def _plan(
    *, policies: tuple[str, ...], fill: float | None, loads: tuple[str, ...],
    seeds: str, requests: str, cpus_per_gpu: float | None, jobs: int | None,
    arrivals: str | None, longest: str | None, depth: int, warm_up: float | None,
) -> Plan:  # fmt: skip
    """What is asked, or UsageError."""
    from crater_slurm.errors import UsageError
    from crater_slurm.simulate.replay import Rules
    from crater_slurm.simulate.study import Plan

    if fill is not None and loads:
        raise UsageError("--fill and --load exclude each other: in a fill-up no job ends")
    if (jobs or arrivals) and not loads:
        raise UsageError("--jobs and --arrivals are about made-up arrivals; they need --load")
    if jobs and arrivals == "recorded":
        raise UsageError("--jobs draws jobs, so it can't go with --arrivals recorded")
    both: tuple[Requests, ...] = ("shares", "whole")
    kinds = both if requests == "both" else tuple(r for r in both if r == requests)
    return Plan(
        policies=tuple(dict.fromkeys(_policy(name) for name in policies or ("crater",))),
        seeds=_seeds(seeds),
        fill=fill,
        loads=tuple(_load(load) for load in loads),
        requests=kinds,
        cpu_milli_per_gpu=None if cpus_per_gpu is None else round(cpus_per_gpu * 1000),
        jobs=jobs,
        drawn=True if jobs else None if arrivals is None else arrivals == "drawn",
        longest=_longest(longest),
        rules=Rules(
            depth=depth,
            warm_up=warm_up if warm_up is not None else 0.2 if loads else 0.0,
        ),
    )


def _completed(plan: Plan, trace: Trace, uncut: bool) -> Plan:
    """With what depends on the trace: one without times of its own must be given a load.

    ``uncut``: nothing was said of the longest run time.
    """
    from dataclasses import replace

    from crater_slurm.errors import UsageError
    from crater_slurm.simulate.workload import LONGEST

    if plan.fill is None and not plan.loads and not trace.recorded:
        raise UsageError(
            f"the times of a trace of the form {trace.format} are not those of a whole cluster; "
            "say --load 0.9 (or --fill 1.3)"
        )
    if plan.loads and uncut and not trace.recorded:
        return replace(plan, longest=LONGEST)
    return plan


def _policy(name: str) -> str:
    from crater_slurm.errors import UsageError, nearest
    from crater_slurm.simulate.policies import POLICIES

    if name not in POLICIES:
        close = nearest(name, list(POLICIES))
        hint = f"did you mean {close}? " if close else ""
        raise UsageError(f"there is no policy {name!r}; {hint}known are {', '.join(POLICIES)}")
    return name


def _load(text: str) -> float:
    from crater_slurm.errors import UsageError

    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,6})?%?", text):
        raise UsageError(f"--load is {text!r}; it should be like 0.9 or 90%")
    value = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    if not 0.01 <= value <= 10:
        raise UsageError(f"--load is {text!r}; it is a share of the cluster, from 0.01 to 10")
    return value


def _seeds(text: str) -> tuple[int, ...]:
    """``42-51`` and ``1,2,5`` are seeds, a single number says how many, from 42 on."""
    from crater_slurm.errors import UsageError

    if re.fullmatch(r"[0-9]{1,4}", text) and int(text):
        return tuple(range(_FIRST_SEED, _FIRST_SEED + int(text)))
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not 0 <= high - low < 10_000:
            raise UsageError(f"--seeds is {text!r}; it should be like 42-51, 1,2,5 or 10")
        found += range(low, high + 1)
    return tuple(dict.fromkeys(found))


def _longest(text: str | None) -> float | None:
    from crater_slurm.errors import UsageError
    from crater_slurm.model.units import parse_seconds

    if text is None or text == "none":
        return None
    try:
        return float(parse_seconds(text)) or None
    except ValueError as error:
        raise UsageError(f"--longest: {error}") from error


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda text, share: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("reading", total=1.0)
        yield lambda text, share: progress.update(bar, description=text, completed=share)


def _write(path: Path, writer: Callable[[], object]) -> None:
    from crater_slurm.errors import UsageError

    try:
        writer()
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from error


def _show(found: dict[str, Any], trace: Trace, plan: Plan, runs: list[Run]) -> None:
    from crater_slurm.simulate import results

    nodes = found["nodes"]
    what = f"fill-up to {plan.fill:.0%}" if plan.fill else "replay"
    seeds = f"{len(plan.seeds)} seeds" if len(plan.seeds) > 1 else f"seed {plan.seeds[0]}"
    click.echo(
        f"{found['trace']} ({trace.format}) on {nodes['count']} nodes with {nodes['gpus']} GPUs: "
        f"{what}, {seeds}"
    )
    print_table(*results.table(runs, plan))
    for line in found["assumed"]:
        click.echo(f"assumed: {line}")
