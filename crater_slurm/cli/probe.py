"""``crater-probe``: what a node has, read from its kernel and driver."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from crater_slurm import __version__
from crater_slurm.cli.probe_bench import bench
from crater_slurm.errors import CraterError


@click.group()
@click.version_option(__version__, prog_name="crater-probe")
def probe() -> None:
    """Read what this node has."""


probe.add_command(bench)


@probe.command()
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path("/"),
    help="Read a captured machine below this folder.",
)
@click.option("--name", help="The node's name in Slurm; default: this host's.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of YAML.")
def scan(root: Path, name: str | None, as_json: bool) -> None:
    """Print this node's profile, ready for 'crater nodes import'.

    What only a measurement can tell (bandwidth, IOPS, latency) is left out.
    """
    from crater_slurm.probe.profile import node_name
    from crater_slurm.probe.profile import scan as read_profile
    from crater_slurm.store.codec import profile_to_dict

    node = name or node_name()
    found = read_profile(node, root)
    document = profile_to_dict(found.profile)
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    import yaml

    click.echo(yaml.safe_dump(document, sort_keys=False), nl=False)


@probe.command()
@click.option("--config", type=click.Path(path_type=Path), help="Settings file.")
@click.option("--name", help="The node's name in Slurm; default: this host's.")
def serve(config: Path | None, name: str | None) -> None:
    """Report profile and health to crater-scheduler, and show metrics.

    Runs until SIGTERM; SIGHUP reads the hardware at once.
    """
    import logging

    from crater_slurm.config import load
    from crater_slurm.sensor.main import serve as run

    logging.basicConfig(level=logging.INFO, format="crater-probe: %(message)s")
    run(load(config).settings, name)


def main() -> int:
    """Run, with errors as one sentence and their exit code."""
    try:
        probe(prog_name="crater-probe")
    except CraterError as error:
        click.echo(f"crater-probe: ERROR: {error}", err=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
