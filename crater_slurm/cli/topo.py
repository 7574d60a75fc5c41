"""``crater topo``: a node's physical graph, drawn or as data."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from crater_slurm.cli.db import store_url
from crater_slurm.errors import UsageError, nearest

if TYPE_CHECKING:
    from crater_slurm.model.profile import NodeProfile

#: Width of the drawing in a file or pipe; a wider terminal gets what it has, up to the limit.
_WIDTH, _WIDEST = 100, 180


@click.command()
@click.option("--node", metavar="NAME", help="A node of the store; default: this machine.")
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path),
    metavar="PROFILE",
    help="A profile as 'crater nodes export' prints it; --node picks one of several.",
)
@click.option("--json", "as_json", is_flag=True, help="Nodes, edges and matrix as JSON.")
@click.option("--dot", "as_dot", is_flag=True, help="For Graphviz.")
@click.option("--svg", "as_svg", is_flag=True, help="A picture for a browser.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write to FILE."
)
def topo(
    node: str | None,
    file: Path | None,
    as_json: bool,
    as_dot: bool,
    as_svg: bool,
    output: Path | None,
) -> None:
    """Draw a node: packages, NUMA nodes and memory, PCI tree, GPUs, NICs and NVMe drives.

    Below the drawing: how far apart any two devices are, as 'nvidia-smi topo -m' names it, and
    which NIC and drive is nearest to each GPU.
    """
    asked = [form for form, on in (("json", as_json), ("dot", as_dot), ("svg", as_svg)) if on] or [
        "text"
    ]
    if len(asked) > 1:
        raise UsageError(f"--{asked[0]} and --{asked[1]} are two forms; choose one")
    if file is not None:
        profile = _from_file(file, node)
    elif node is not None:
        profile = _from_store(node)
    else:
        profile = _this_machine()
    if output is None:
        click.echo(_drawn(profile, asked[0], *_terminal()), nl=False)
        return
    try:
        output.write_text(_drawn(profile, asked[0], _WIDTH, ascii_only=False), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"can't write {output}: {error.strerror}") from error


def _drawn(profile: NodeProfile, form: str, width: int, ascii_only: bool) -> str:
    from crater_slurm.topology import data, dot, svg, text

    if form == "json":
        return json.dumps(data.graph(profile), indent=2) + "\n"
    if form == "dot":
        return dot.draw(profile)
    if form == "svg":
        return svg.draw(profile)
    return text.draw(profile, width, ascii_only=ascii_only)


def _terminal() -> tuple[int, bool]:
    """Width to draw at, and whether box characters can't be shown."""
    width = _WIDTH
    if sys.stdout.isatty():
        width = min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDEST)
    try:
        "┌─┐│└┘…".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return width, True
    return width, False


def _this_machine() -> NodeProfile:
    from crater_slurm.probe.profile import node_name, scan

    return scan(node_name(), Path("/")).profile


def _from_store(name: str) -> NodeProfile:
    from crater_slurm.store.repository import Store

    with Store.open(store_url()) as store:
        profile = store.profile(name)
        if profile is not None:
            return profile
        close = nearest(name, store.names())
    hint = f"; did you mean {close}?" if close else "; 'crater nodes list' shows those"
    raise UsageError(f"there is no profile of node {name}{hint}")


def _from_file(file: Path, name: str | None) -> NodeProfile:
    """The file's only profile, or the one of that name; one without a name gets it, or the file's.

    A file of sections (gpu:, cpu:, ssd:) holds values, not a node.
    """
    from crater_slurm.catalogue import complete_profile
    from crater_slurm.store.codec import profile_from_dict
    from crater_slurm.store.importers import read_file

    contents = read_file(file)
    found = {profile.name: profile for profile in contents.profiles}
    if not found and len(contents.nameless) == 1:
        profile = profile_from_dict(contents.nameless[0], name or file.stem)
        return complete_profile(profile)
    if name is None and len(found) == 1:
        return complete_profile(next(iter(found.values())))
    if name in found:
        return complete_profile(found[name])
    if not found:
        raise UsageError(f"{file} holds no profile such as 'crater nodes export' prints")
    if name is None:
        raise UsageError(f"{file} has {len(found)} nodes; say which with --node")
    close = nearest(name, list(found))
    hint = f"; did you mean {close}?" if close else ""
    raise UsageError(f"{file} has no node {name}{hint}")
