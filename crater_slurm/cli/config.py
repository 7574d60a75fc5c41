"""``crater config show``: every setting, its value, and where that comes from."""

from __future__ import annotations

import json
from typing import Any

import click

from crater_slurm.cli.context import loaded


@click.group()
def config() -> None:
    """Show the settings and where they come from."""


@config.command()
@click.option("--json", "as_json", is_flag=True, help="Values only, as JSON.")
@click.option("--describe", is_flag=True, help="Say what each setting means.")
def show(as_json: bool, describe: bool) -> None:
    """Print every setting; values that are not defaults name their origin."""
    current = loaded()
    tree = current.settings.model_dump(mode="json")
    if as_json:
        click.echo(json.dumps(tree, indent=2))
        return
    _print(current.settings, tree, current.origins, "", describe)


@config.command()
def sample() -> None:
    """Print a settings file with every default, each explained and commented out."""
    from crater_slurm.config.sample import sample as text

    click.echo(text(), nl=False)


def _print(model: Any, tree: dict[str, Any], origins: Any, prefix: str, describe: bool) -> None:
    for name, entry in type(model).model_fields.items():
        path = f"{prefix}{name}"
        value = getattr(model, name)
        if hasattr(type(value), "model_fields"):
            _print(value, tree[name], origins, path + ".", describe)
            continue
        origin = origins.get(path)
        shown = json.dumps(tree[name], ensure_ascii=False)
        click.echo(f"{path} = {shown}" + (f"    [{origin}]" if origin else ""))
        if describe and entry.description:
            click.echo(f"    {entry.description}")
