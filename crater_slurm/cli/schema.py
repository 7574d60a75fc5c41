"""``crater schema``: the JSON Schema of the documents that other programs send."""

from __future__ import annotations

import click

from crater_slurm.cli.output import print_json


@click.group()
def schema() -> None:
    """Print the JSON Schema of what crater reads."""


@schema.command()
def task() -> None:
    """The task that AllData sends, and that crater submit reads."""
    from crater_slurm.alldata.task import json_schema

    print_json(json_schema())


@schema.command()
def request() -> None:
    """The #CRATER directives, keyed as they are written."""
    from crater_slurm.model.request import json_schema

    print_json(json_schema())
