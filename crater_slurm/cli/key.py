"""``crater key create``: the secret by which nodes recognise plans."""

from __future__ import annotations

import click

from crater_slurm.cli.context import loaded


@click.group()
def key() -> None:
    """Make the cluster's plan key."""


@key.command()
def create() -> None:
    """Write a new random key to plan.key_file; never replaces one."""
    from crater_slurm.scheduler.keys import create_key

    file = loaded().settings.plan.key_file
    create_key(file)
    click.echo(f"wrote {file}; copy it to every node, readable by root only")
