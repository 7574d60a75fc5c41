"""``crater directives``: the table of requirements, for people and for tools."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The JSON schema of a request.")
@click.option("--markdown", is_flag=True, help="The table as in the documentation.")
def directives(as_json: bool, markdown: bool) -> None:
    """List every #CRATER directive with unit, values and meaning."""
    from crater_slurm.model.request import REQUIREMENTS, json_schema, markdown_table

    if as_json:
        click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
        return
    if markdown:
        click.echo(markdown_table())
        return
    width = max(len(f"{r.key}={r.example}") for r in REQUIREMENTS)
    click.echo("Write them in a batch script, before the first command:")
    click.echo("    #CRATER gpus=2 gpu-memory=16GiB cpus=8 numa=strict")
    click.echo("or, for srun and salloc:  --comment 'crater: gpus=2 cpus=8'")
    click.echo("All amounts are per node, and minimum needs.\n")
    for requirement in REQUIREMENTS:
        example = f"{requirement.key}={requirement.example}"
        unit = f" [{requirement.unit}]" if requirement.unit else ""
        click.echo(f"  {example:<{width}}  {requirement.meaning}{unit}")
        if requirement.choices:
            click.echo(f"  {'':<{width}}  one of: {', '.join(requirement.choices)}")
