"""How commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

import click


def print_json(data: object) -> None:
    click.echo(json.dumps(data, indent=2))


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table without frame. Piped, it is as wide as its content and has no colours."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    if sys.stdout.isatty():
        Console(markup=False, emoji=False, highlight=False).print(table)
        return
    console = Console(
        width=10_000, color_system=None, force_terminal=False, markup=False, emoji=False
    )
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())
