"""What ``crater-probe bench`` prints: its steps, what it would do, and the results."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from crater_slurm.probe.bench.result import Announce, Measurement, Step


@contextmanager
def progress(seconds: float) -> Iterator[Announce]:
    """Says each step: a bar on a terminal, a line otherwise.

    The bar is drawn at the start of a step and never during one: a thread that draws would take
    its time from what is measured.
    """
    if not sys.stderr.isatty():
        yield lambda what, wanted: click.echo(f"{what}: about {wanted:.0f} s", err=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("", total=seconds)
        waiting = 0.0

        def announce(what: str, wanted: float) -> None:
            nonlocal waiting
            bar.update(task, advance=waiting, description=f"{what}, {wanted:.0f} s", refresh=True)
            waiting = wanted

        yield announce


def show_steps(steps: Sequence[Step], as_json: bool) -> None:
    """Print what would be done."""
    if as_json:
        click.echo(json.dumps({"steps": [dataclasses.asdict(step) for step in steps]}, indent=2))
        return
    for step in steps:
        needs = [f"{step.seconds:.0f} s"]
        needs += [f"{step.memory_mib} MiB of memory"] if step.memory_mib else []
        needs += [f"{step.space_mib} MiB of space"] if step.space_mib else []
        click.echo(f"{step.what}: {', '.join(needs)}")
        for line in step.details.splitlines():
            click.echo(f"    {line}")
    click.echo(f"about {sum(step.seconds for step in steps):.0f} s in all; nothing was done")


def show(results: Sequence[Measurement], changed: Sequence[str], file: Path, as_json: bool) -> None:
    """Print the results with unit, time and method, and what was written into the profile."""
    if as_json:
        entries = [{**dataclasses.asdict(item), "time": item.time.isoformat()} for item in results]
        written = {"file": str(file), "paths": list(changed)} if changed else None
        click.echo(json.dumps({"results": entries, "written": written}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("VALUE OF", "IS", "TIME", "METHOD", box=None, pad_edge=False)
    for item in results:
        value = f"{item.value:,g} {item.unit}" if item.value is not None else "refused"
        notes = [f"REFUSED: {item.refused}"] if item.refused else []
        notes += [f"NOT FOR PROFILES: {item.unfit}"] if item.unfit else []
        notes += [f"WARNING: {text}" for text in item.warnings]
        method = "\n".join(text for text in (item.method, *notes) if text)
        table.add_row(item.what, value, f"{item.seconds:.0f} s" if item.seconds else "", method)
    # Into a file or a pipe, lines are as wide as they come, for tools that read lines.
    Console(width=None if sys.stdout.isatty() else 400, markup=False, highlight=False).print(table)
    for path in changed:
        click.echo(f"{path} written to {file}")
