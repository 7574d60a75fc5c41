"""``crater render``: Slurm's configuration from node profiles, and how far the live one differs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from crater_slurm.cli.context import loaded
from crater_slurm.errors import CraterError, SlurmError, UsageError

if TYPE_CHECKING:
    from crater_slurm.model.profile import NodeProfile
    from crater_slurm.slurm.client import Client
    from crater_slurm.slurm.node_gres import Choices
    from crater_slurm.slurm.render import Version

WHAT = ("slurm.conf", "gres.conf", "cgroup.conf", "node-line")
_OLDEST = (22, 5)
_path = click.Path(path_type=Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where the text goes: standard output, or a file that is made anew."""

    file: Path | None
    force: bool

    def write(self, text: str) -> None:
        """Print the text, or write the file whole or not at all; an existing one needs force."""
        if self.file is None:
            click.echo(text, nl=False)
            return
        try:
            with tempfile.TemporaryDirectory(dir=self.file.parent) as folder:
                made = Path(folder) / self.file.name
                made.write_text(text)
                made.chmod(0o644)  # Slurm's users read it
                # A link fails where the name is taken, even if it was taken just now.
                made.replace(self.file) if self.force else os.link(made, self.file)
        except FileExistsError as error:
            raise UsageError(f"{self.file} is there already; --force replaces it") from error
        except OSError as error:
            raise CraterError(f"can't write {self.file}: {error.strerror}") from error


@click.command()
@click.argument("what", type=click.Choice(WHAT), required=False)
@click.option("--node", "names", multiple=True, metavar="NODE", help="Only these; gn[01-04] works.")
@click.option("--file", "source", type=_path, metavar="PROFILES", help="Profiles of a file.")
@click.option(
    "--slurm", "release", metavar="VERSION", help="Such as 24.11; default: the cluster's."
)
@click.option("--shards", is_flag=True, help="Cut GPUs into shards by their memory.")
@click.option(
    "--shard-reserve",
    type=click.IntRange(0),
    help="Slices of each card that no job gets; default: sharing.reserve of the settings.",
)
@click.option("--no-features", is_flag=True, help="Publish no node features.")
@click.option("--no-weights", is_flag=True, help="Leave the order of nodes to Slurm.")
@click.option("--check", is_flag=True, help="Compare the live configuration; 1 if it differs.")
@click.option("--conf", type=_path, help="With --check: the slurm.conf; default: the live one.")
@click.option("--slurmd", is_flag=True, help="With --check: also what slurmd -C finds here.")
@click.option("--json", "as_json", is_flag=True, help="With --check: print JSON.")
@click.option("-o", "--output", type=_path, metavar="FILE", help="Write a file; it must be new.")
@click.option("--force", is_flag=True, help="With --output: replace the file.")
def render(
    what: str | None,
    names: tuple[str, ...],
    source: Path | None,
    release: str | None,
    shards: bool,
    shard_reserve: int | None,
    no_features: bool,
    no_weights: bool,
    check: bool,
    conf: Path | None,
    slurmd: bool,
    as_json: bool,
    output: Path | None,
    force: bool,
) -> None:
    """Print slurm.conf, gres.conf, cgroup.conf or the node lines for the known nodes.

    With --check nothing is rendered: the live files are compared with what would be, all of them
    or the one that is named. Nothing is ever written but to a file that --output names.
    """
    from crater_slurm.slurm.node_gres import Choices

    settings = loaded().settings
    reserve = settings.sharing.reserve if shard_reserve is None else shard_reserve
    choices = Choices(
        consume=settings.filter.consume,
        shard_reserve=reserve if shards else None,
        shard_rounding=settings.sharing.rounding,
        features=not no_features,
        weights=not no_weights,
        memory_margin=True,
    )
    _refuse_mixtures(what, check, conf=conf, slurmd=slurmd, as_json=as_json, output=output)
    profiles = _profiles(names, source)
    client = _client(conf)
    version = _version(release, client)
    if check:
        from crater_slurm.cli import render_check

        live = render_check.live_conf(conf, client)
        report = render_check.compare(what, live, profiles, version, choices, everyone=not names)
        if slurmd:
            report = report.with_slurmd(profiles, client, version)
        click.echo(json.dumps(report.tree(), indent=2) if as_json else report.text())
        sys.exit(1 if report.differences else 0)
    assert what
    text, notes = _text(what, profiles, version, choices)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    Output(file=output, force=force).write(text)


def _refuse_mixtures(what: str | None, check: bool, *, output: Path | None, **only: object) -> None:
    """UsageError for options that mean nothing together."""
    if check and output:
        raise UsageError("--check compares and writes nothing; leave --output out")
    if not check and what is None:
        raise UsageError(f"say what to render: {', '.join(WHAT)}; --check needs no name")
    given = [name for name, value in only.items() if value]
    if not check and given:
        option = given[0].replace("as_json", "json")
        raise UsageError(f"--{option} belongs to --check")


def _profiles(names: tuple[str, ...], source: Path | None) -> list[NodeProfile]:
    """The profiles of a file or of the store, all or those of the nodes named."""
    from crater_slurm.errors import nearest
    from crater_slurm.slurm import hostlist

    wanted = tuple(dict.fromkeys(name for text in names for name in hostlist.expand(text)))
    found = {p.name: p for p in (_of_file(source, wanted) if source else _of_store())}
    for name in wanted:
        if name not in found:
            close = nearest(name, list(found))
            hint = f"did you mean {close}?" if close else f"there are {hostlist.compress(found)}"
            raise UsageError(f"there is no profile of node {name}; {hint}")
    chosen = [found[name] for name in wanted] if wanted else list(found.values())
    if not chosen:
        raise UsageError("no node has a profile yet: run crater-probe on the nodes")
    return chosen


def _of_file(file: Path, names: tuple[str, ...]) -> list[NodeProfile]:
    from crater_slurm.store.importers import plan_import, read_file

    contents = read_file(file)
    return [
        change.new for change in plan_import([contents], {}, names if contents.nameless else ())
    ]


def _of_store() -> list[NodeProfile]:
    from crater_slurm.cli.db import store_url
    from crater_slurm.store.repository import Store

    with Store.open(store_url()) as store:
        return store.profiles()


def _client(conf: Path | None) -> Client:
    from crater_slurm.slurm.client import Client

    slurm = loaded().settings.slurm
    return Client(slurm.bin_dir, conf or slurm.conf, slurm.timeout_seconds)


def _version(release: str | None, client: Client) -> Version:
    """The release that was named, or that of Slurm's commands."""
    from crater_slurm.slurm.client import parse_version

    try:
        version = parse_version(release) if release else client.version()
    except SlurmError as error:
        raise SlurmError(f"{error}; --slurm names the release without asking Slurm") from error
    if version < _OLDEST:
        said = f"{release!r} is no release of Slurm" if release else f"Slurm {version} is too old"
        raise UsageError(f"{said}; crater works with 22.05 and later, written like 24.11")
    return version


def _text(
    what: str, profiles: Sequence[NodeProfile], version: Version, choices: Choices
) -> tuple[str, list[str]]:
    """The text, and what an admin should be told beside it."""
    from crater_slurm.slurm import node_gres
    from crater_slurm.slurm import render as renderer

    if what == "cgroup.conf":
        return renderer.cgroup_conf(version), []
    for profile in profiles:
        if why := node_gres.unwritable(profile):
            raise UsageError(why)
    groups = renderer.group(profiles, choices)
    notes = renderer.socket_notes(groups) + renderer.shard_notes(groups, choices)
    conf = renderer.SlurmConf(version=version, groups=groups, choices=choices)
    lines = conf.node_lines()  # refuses what this release can't have, in gres.conf too
    if what == "node-line":
        return "".join(f"{line}\n" for line in lines), notes
    text = conf.render() if what == "slurm.conf" else renderer.gres_conf(groups, choices)
    return text, notes
