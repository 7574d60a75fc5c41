"""``crater``: the command for people. Knows the other commands by name and loads them when used."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from crater_slurm import __version__
from crater_slurm.errors import CraterError, nearest

#: Command, where it lives, and its line in ``crater --help``; kept here so that help is instant.
COMMANDS: dict[str, tuple[str, str]] = {
    "alldata": ("crater_slurm.cli.alldata:alldata", "Run a fake AllData server."),
    "callbacks": (
        "crater_slurm.cli.callbacks:callbacks",
        "List, repeat and test what a platform is told.",
    ),
    "check": ("crater_slurm.cli.explain:check", "Say what a script would get, before submitting."),
    "checkpoints": (
        "crater_slurm.cli.checkpoints:checkpoints",
        "List, check, flush and restore checkpoints.",
    ),
    "config": ("crater_slurm.cli.config:config", "Show the settings and where they come from."),
    "db": ("crater_slurm.cli.db:db", "Create or upgrade the node-profile store."),
    "directives": ("crater_slurm.cli.directives:directives", "List every #CRATER directive."),
    "estimate": (
        "crater_slurm.cli.estimate:estimate",
        "Predict a workload's GPU memory and host needs.",
    ),
    "eta": ("crater_slurm.cli.eta:eta", "Say when a job is expected to start."),
    "explain": ("crater_slurm.cli.explain:explain", "Say why a job went where it went."),
    "install": ("crater_slurm.cli.install:install", "Copy filter and hooks where Slurm runs them."),
    "key": ("crater_slurm.cli.key:key", "Make the cluster's plan key."),
    "lab": ("crater_slurm.cli.lab:lab", "A throwaway Slurm on this machine."),
    "nodes": ("crater_slurm.cli.nodes:nodes", "List, show, import and compare node profiles."),
    "observations": (
        "crater_slurm.cli.observations:observations",
        "List what jobs were seen to need.",
    ),
    "render": ("crater_slurm.cli.render:render", "Write or check Slurm's configuration files."),
    "schema": ("crater_slurm.cli.schema:schema", "Print the JSON Schema of what crater reads."),
    "simulate": ("crater_slurm.cli.simulate:simulate", "Replay a trace under placement policies."),
    "submit": ("crater_slurm.cli.submit:submit", "Submit a task, or what sbatch takes, as a job."),
    "templates": ("crater_slurm.cli.templates:templates", "List, show and try script templates."),
    "tokens": ("crater_slurm.cli.tokens:tokens", "Make and revoke tokens of the API."),
    "topo": ("crater_slurm.cli.topo:topo", "Draw a node: NUMA, PCI tree, GPUs, NICs, NVMe."),
}


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = click.utils.make_str(args[0])
        if name not in COMMANDS and not name.startswith("-"):
            close = nearest(name, list(COMMANDS))
            hint = f"; did you mean {close}?" if close else ""
            ctx.fail(f"there is no command {name!r}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in sorted(COMMANDS.items())])


class Root(LazyGroup):
    """The top of the tree: the one place where errors become words and exit codes."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except CraterError as error:
            for line in str(error).splitlines() or [type(error).__name__]:
                click.echo(f"crater: ERROR: {line}", err=True)
            sys.exit(error.exit_code)
        except BrokenPipeError:
            sys.exit(141)  # the reader went away: head, less


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="crater")
@click.option("--config", type=click.Path(path_type=Path), help="Settings file.")
@click.pass_context
def crater(ctx: click.Context, config: Path | None) -> None:
    """Topology-aware GPUs, cores, memory bandwidth and NVMe for Slurm."""
    ctx.meta["crater.config"] = config
