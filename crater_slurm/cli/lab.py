"""``crater lab``: try a policy on a throwaway Slurm before it reaches production."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crater_slurm.files import is_file

if TYPE_CHECKING:
    from crater_slurm.lab.lab import Lab

_name = click.argument("name", required=False, default="default")


@click.group()
def lab() -> None:
    """A throwaway Slurm with many nodes on this machine, for trying a policy."""


@lab.command()
@_name
@click.option(
    "--inventory",
    default="demo",
    show_default=True,
    help="The nodes: a file, or a name from 'crater lab inventories'.",
)
@click.option(
    "--slurm",
    metavar="RELEASE",
    help="22.05, 24.11 or 26.05, from Debian's packages; default: the machine's own.",
)
@click.option("--cgroup", is_flag=True, help="Constrain jobs to their devices and cores.")
@click.option(
    "--mode",
    type=click.Choice(["observe", "advise", "enforce"]),
    default="enforce",
    show_default=True,
    help="What crater does with jobs.",
)
@click.option("--no-crater", is_flag=True, help="Plain Slurm, to compare with.")
@click.option("--controller-only", is_flag=True, help="No slurmd: for very many nodes.")
@click.option("--cloud", is_flag=True, help="With --controller-only: allocate without nodes.")
@click.option("--accounting", is_flag=True, help="With slurmdbd, so that sacct knows ended jobs.")
@click.option(
    "--cache-mib",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Size of each node's cache in memory, MiB.",
)
def up(name: str, no_crater: bool, **fields: Any) -> None:
    """Start the lab NAME."""
    from crater_slurm.lab import Lab

    made = Lab(name=name, crater=not no_crater, **fields)
    made.up(say=lambda text: click.echo(text, err=True))
    version = "{}.{:02}".format(*made.version)
    count = len(made.nodes.names)
    click.echo(
        f"lab {name}: Slurm {version}, {count} nodes, up in {made.seconds_to_up:.1f} s.\n"
        f"Try: crater lab exec {name} -- sbatch --gres=gpu:1 --wrap hostname"
    )


@lab.command()
@_name
@click.option("--all", "everything", is_flag=True, help="Every lab.")
def down(name: str, everything: bool) -> None:
    """End the lab NAME and remove all that it left."""
    from crater_slurm.lab import Lab

    for one in Lab.all() if everything else [Lab.attach(name)]:
        one.down()
        click.echo(f"lab {one.spec.name}: down")


@lab.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status(as_json: bool) -> None:
    """Show all labs with their nodes and services."""
    from crater_slurm.lab import Lab

    found = [_status(one) for one in Lab.all()]
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for one in found:
        click.echo(f"{one['name']}: {'up' if one['up'] else 'not up'}, Slurm {one['slurm']}")
        for state, nodes in one["nodes"].items():
            click.echo(f"  nodes {state}: {nodes}")
        click.echo(f"  services: {' '.join(one['services'])}")
        click.echo(f"  folder: {one['folder']}")
    if not found:
        click.echo("no lab; crater lab up starts one")


def _status(one: Lab) -> dict[str, Any]:
    from crater_slurm.slurm import hostlist

    is_up = one.is_up
    by_state: dict[str, list[str]] = {}
    for node, state in (one.node_states() if is_up else {}).items():
        by_state.setdefault(state, []).append(node)
    return {
        "name": one.spec.name,
        "up": is_up,
        "slurm": "{}.{:02}".format(*one.version),
        "inventory": one.spec.inventory,
        "mode": one.spec.mode if one.spec.crater else None,
        "nodes": {state: hostlist.compress(names) for state, names in by_state.items()},
        "services": list(one.supervisor.running()) if is_up else [],
        "folder": str(one.folders.base),
    }


class _AfterDashes(click.Command):
    """A command whose own words end at ``--``; what follows is another program's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta["command"] = args[cut + 1 :]
        return super().parse_args(ctx, args[:cut])


@lab.command("exec", cls=_AfterDashes, options_metavar="[OPTIONS] [NAME] -- COMMAND...")
@click.argument("name", required=False, default="default", metavar="")
@click.option("--user", default="alice", show_default=True, help="alice, bob or root.")
@click.option("--node", help="On this node instead of the controller.")
@click.pass_context
def execute(ctx: click.Context, name: str, user: str, node: str | None) -> None:
    """Run a command in a lab, such as: crater lab exec -- sbatch job.sh

    It runs in the present folder if the lab's user can write there. Else it runs in the user's
    home in the lab, and files that the command names are copied there.
    """
    from crater_slurm.lab import Lab

    command: list[str] = ctx.meta["command"]
    if not command:
        raise click.UsageError("put -- and a command at the end: crater lab exec -- sinfo")
    one = Lab.attach(name)
    cwd, command = _placed(one, user, command)
    argv = one.command(command, user=user, node=node, cwd=cwd)
    sys.exit(subprocess.run(argv, check=False, preexec_fn=one.supervisor.before_start).returncode)


def _placed(one: Lab, user: str, command: list[str]) -> tuple[str | None, list[str]]:
    """Folder to run in (None: the user's home) and the command with its files in reach."""
    here = Path.cwd()
    if one.can_work_in(here, user):
        return str(here), command
    words = [command[0]]
    for word in command[1:]:
        if is_file(here / word):
            click.echo(f"copied {word} to {user}'s home in the lab", err=True)
            word = one.bring(here / word, user)
        words.append(word)
    return None, words


@lab.command()
@click.argument("names", nargs=-1, metavar="[NAME] [SERVICE]")
def logs(names: tuple[str, ...]) -> None:
    """Print the log of a service: slurmctld, a node, scheduler, node@NODE ... (slurmctld)."""
    from crater_slurm.lab import Lab

    if len(names) > 2:
        raise click.UsageError("give a lab's name and a service's name at most")
    labs = {one.spec.name for one in Lab.all()}
    if len(names) == 1:
        names = (names[0], "slurmctld") if names[0] in labs else ("default", names[0])
    name, service = names or ("default", "slurmctld")
    click.echo(Lab.attach(name).log(service), nl=False)


@lab.command()
def inventories() -> None:
    """List the inventories and node profiles that come with crater."""
    from crater_slurm.lab import inventory

    for name, about in inventory.shipped().items():
        click.echo(f"{name:12} {about}")
    click.echo(f"\nnode profiles: {', '.join(inventory.shipped_profiles())}")
