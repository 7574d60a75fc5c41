"""``crater templates``: the batch scripts that tasks become, and what a site made of them."""

from __future__ import annotations

import click

from crater_slurm.cli.context import loaded


@click.group()
def templates() -> None:
    """List, show and try the templates of batch scripts."""


@templates.command("list")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def list_(as_json: bool) -> None:
    """List the templates; a task takes the one of its type."""
    from crater_slurm.alldata.templates import all_templates
    from crater_slurm.cli.output import print_json, print_table

    found = all_templates(loaded().settings.submit.templates).values()
    rows = [(t.name, "site" if t.site else "crater", t.about) for t in found]
    if as_json:
        keys = ("name", "from", "about")
        print_json([dict(zip(keys, row, strict=True)) for row in rows])
    else:
        print_table(("NAME", "FROM", "ABOUT"), rows)


@templates.command()
@click.argument("name")
def show(name: str) -> None:
    """Print a template as it is written, to begin a site's own with."""
    from crater_slurm.alldata.templates import find

    click.echo(find(name, loaded().settings.submit.templates).text(), nl=False)


@templates.command()
@click.argument("task")
@click.option("--template", metavar="NAME", help="Another template than the task type's.")
def render(task: str, template: str | None) -> None:
    """Print the batch script of TASK, a file or - for standard input."""
    from crater_slurm.alldata import batch
    from crater_slurm.alldata.task import parse
    from crater_slurm.cli.submit_task import enforced, read_task

    settings = loaded().settings.submit
    made = batch.render(parse(read_task(task)), settings, template=template, enforced=enforced())
    for note in made.notes:
        click.echo(f"crater: note: {note}", err=True)
    click.echo(made.script, nl=False)
