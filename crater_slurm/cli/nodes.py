"""``crater nodes``: what is known of the nodes, and how to tell crater more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crater_slurm.cli import node_state
from crater_slurm.cli.output import print_json, print_table
from crater_slurm.cli.profiles import expanded, open_store, stored
from crater_slurm.files import is_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from crater_slurm.model.profile import NodeProfile
    from crater_slurm.store.diff import Difference

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_file = click.Path(path_type=Path)


@click.group()
def nodes() -> None:
    """Node profiles: GPUs, NUMA nodes, memory bandwidth and NVMe of every node."""


nodes.add_command(node_state.events)
nodes.add_command(node_state.health)


@nodes.command("list")
@_json
def list_(as_json: bool) -> None:
    """List the nodes that have a profile."""
    from crater_slurm.store import describe

    with open_store() as store:
        profiles = store.profiles()
    summaries = [describe.summary(profile) for profile in profiles]
    if as_json:
        print_json(summaries)
    elif not profiles:
        click.echo("no node has a profile yet: run crater-probe on the nodes, or import a file")
    else:
        print_table(
            ("NODE", "GPUS", "CORES", "NUMA", "MEMORY", "BANDWIDTH", "NVME READ", "KNOWN BY"),
            [
                _list_row(profile, summary)
                for profile, summary in zip(profiles, summaries, strict=True)
            ],
        )


@nodes.command()
@click.argument("name")
@_json
def show(name: str, as_json: bool) -> None:
    """Show every value of node NAME with unit, method and time."""
    from crater_slurm.store import describe
    from crater_slurm.store.diff import known, show_value

    with open_store() as store:
        profile = stored(store, [name])[0]
    if as_json:
        print_json(
            {
                "name": name,
                "values": [describe.value_entry(profile, *item) for item in profile.values()],
            }
        )
        return
    rows = [
        (
            path,
            show_value(path, value),
            *describe.origin(profile.where_from(path) if known(value) else None),
        )
        for path, value in profile.values()
    ]
    click.echo(f"{name}, {describe.origin_text(profile.source)}")
    print_table(("VALUE OF", "IS", "METHOD", "TIME"), rows)


@nodes.command("import")
@click.argument("files", nargs=-1, required=True, type=_file, metavar="FILE...")
@click.option(
    "--node", "names", multiple=True, metavar="NAME", help="Whose values; gn[01-04] works."
)
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@_json
def import_(files: tuple[Path, ...], names: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Import profiles, or add values to them.

    A FILE holds profiles as 'crater nodes export' prints them, or the sections gpu:, cpu: and ssd:
    of gpu_topology.yaml, cpu_topology.yaml and probe-config.yaml.
    """
    from crater_slurm.store import describe
    from crater_slurm.store.diff import differences
    from crater_slurm.store.importers import plan_import, read_file

    contents = [read_file(file) for file in files]
    with open_store() as store:
        present = {profile.name: profile for profile in store.profiles()}
        changes = plan_import(contents, present, expanded(names))
        saved = [] if dry_run else store.save_profiles(change.new for change in changes)
    described = [
        (change, differences(change.old, change.new) if change.old else []) for change in changes
    ]
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "nodes": [
                    {
                        "name": change.new.name,
                        "new": change.old is None,
                        "changes": [describe.difference_entry(item) for item in found],
                        "warnings": change.warnings,
                    }
                    for change, found in described
                ],
            }
        )
        return
    for change, found in described:
        _print_change(change.new.name, change.old is None, found)
    # One sentence about a model may come from each of a thousand nodes.
    for warning in dict.fromkeys(text for change in changes for text in change.warnings):
        click.echo(f"warning: {warning}", err=True)
    if dry_run:
        click.echo("dry run: nothing was stored")
    else:
        click.echo(f"{len(saved)} stored, {len(changes) - len(saved)} as they were")


@nodes.command()
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option(
    "--format",
    "form",
    type=click.Choice(["yaml", "json"]),
    default="yaml",
    show_default=True,
    help="How to print.",
)
def export(names: tuple[str, ...], form: str) -> None:
    """Print profiles of nodes, or of all.

    The output is what 'crater nodes import' reads.
    """
    from crater_slurm.store.codec import profile_to_dict

    with open_store() as store:
        profiles = stored(store, expanded(names)) if names else store.profiles()
    entries = [profile_to_dict(profile) for profile in profiles]
    document: Any = entries[0] if len(entries) == 1 else {"nodes": entries}
    if form == "json":
        print_json(document)
    else:
        import yaml

        click.echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), nl=False)


@nodes.command()
@click.argument("left", metavar="NODE")
@click.argument("right", metavar="NODE_OR_FILE")
@_json
def diff(left: str, right: str, as_json: bool) -> None:
    """Compare NODE with another node or a file.

    A file of sections is compared by what it would make of NODE.
    """
    from crater_slurm.store import describe
    from crater_slurm.store.diff import differences

    with open_store() as store:
        one = stored(store, [left])[0]
        if right not in store.names() and is_file(right):
            other = _from_file(one, Path(right))
        else:
            other = stored(store, [right])[0]
    found = differences(one, other)
    if as_json:
        print_json([describe.difference_entry(item) for item in found])
    elif not found:
        click.echo(f"{left} and {right} have the same values")
    else:
        _print_differences(found, (left, right))


@nodes.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def remove(names: tuple[str, ...]) -> None:
    """Forget the profiles of nodes. A node that still runs crater-probe comes back by itself."""
    with open_store() as store:
        for profile in stored(store, expanded(names)):
            store.delete_profile(profile.name)
            click.echo(f"{profile.name} removed")


def _from_file(node: NodeProfile, file: Path) -> NodeProfile:
    """What the file makes of the node, or the file's only profile, whatever its name."""
    from crater_slurm.errors import UsageError
    from crater_slurm.store.importers import plan_import, read_file

    changes = plan_import([read_file(file)], {node.name: node}, (node.name,))
    by_name = {change.new.name: change.new for change in changes}
    if node.name in by_name:
        return by_name[node.name]
    if len(by_name) == 1:
        return next(iter(by_name.values()))
    raise UsageError(f"{file} has several nodes, but not {node.name}")


def _list_row(profile: NodeProfile, summary: dict[str, Any]) -> tuple[str, ...]:
    from crater_slurm.model.units import format_mib
    from crater_slurm.store import describe
    from crater_slurm.store.diff import show_value

    gpus = ", ".join(f"{count} x {model}" for model, count in summary["gpus"].items())
    return (
        profile.name,
        gpus or "-",
        str(summary["cores"]),
        str(summary["numa_nodes"]),
        format_mib(profile.memory_mib) if profile.memory_mib else "-",
        show_value("memory_bandwidth_gb_s", summary["memory_bandwidth_gb_s"]),
        show_value("random_read_iops", summary["random_read_iops"]),
        describe.origin_text(profile.source),
    )


def _print_change(name: str, new: bool, found: Sequence[Difference]) -> None:
    if new:
        click.echo(f"{name}: new")
    elif not found:
        click.echo(f"{name}: no value changes")
    else:
        click.echo(f"{name}:")
        _print_differences(found, ("NOW", "NEW"))


def _print_differences(found: Sequence[Difference], titles: tuple[str, str]) -> None:
    from crater_slurm.store.diff import show_value

    rows = [
        (
            item.path,
            show_value(item.path, item.old),
            item.old_from.method.value if item.old_from else "-",
            show_value(item.path, item.new),
            item.new_from.method.value if item.new_from else "-",
        )
        for item in found
    ]
    print_table(("VALUE OF", titles[0], "METHOD", titles[1], "METHOD"), rows)
