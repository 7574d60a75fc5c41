"""``crater nodes events`` and ``crater nodes health``: what changed on nodes, and how they are."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import click

from crater_slurm.cli.context import loaded
from crater_slurm.cli.output import print_json, print_table
from crater_slurm.cli.profiles import open_store, stored
from crater_slurm.model.units import split_unit

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command()
@click.argument("name", required=False)
@click.option("--limit", default=50, show_default=True, help="How many, the newest first.")
@_json
def events(name: str | None, limit: int, as_json: bool) -> None:
    """Show what changed on node NAME, or on all: lost hardware, slower drives, new drivers."""
    with open_store() as store:
        found = store.events(name, limit=limit)
        if not found and name is not None:
            stored(store, [name])
    if as_json:
        print_json([dataclasses.asdict(event) for event in found])
    elif not found:
        click.echo("nothing happened yet")
    else:
        print_table(
            ("TIME", "NODE", "EVENT", "WAS", "IS", "WHAT"),
            [
                (
                    time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time)),
                    event.node,
                    event.kind,
                    event.old or "-",
                    event.new or "-",
                    event.message,
                )
                for event in found
            ],
        )


@click.command()
@click.argument("name", required=False)
@_json
def health(name: str | None, as_json: bool) -> None:
    """Show the health score of all nodes, or how node NAME is and what its score is made of."""
    from crater_slurm.scheduler import client

    url = loaded().settings.scheduler.url
    if name is None:
        _all(client.cluster_health(url), as_json)
        return
    found = client.node_health(url, name)
    if as_json:
        print_json(found)
        return
    age, load = found["age_seconds"], found.get("load")
    click.echo(f"{name}, reported {age:g} s ago" + ("" if load is None else f", load {load:g}"))
    print_table(("PART", "STATE"), list(_rows(found)))
    if judged := found.get("judged"):
        click.echo(f"\nscore {_score(judged)}")
        if terms := judged["terms"]:
            print_table(
                ("TERM", "VALUE", "SEEN", "THRESHOLD"),
                [(t["name"], f"{t['value']:.2f}", t["seen"], t["threshold"]) for t in terms],
            )


def _all(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = []
    for node in found["nodes"]:
        own = node["own_weight"]
        weight = "?" if node["weight"] is None else str(node["weight"])
        weight += f" (own {own})" if own is not None and own != node["weight"] else ""
        taking = sorted((t for t in node["terms"] if t["value"] < 1), key=_first)
        worst = "; ".join(f"{t['name']}: {t['seen']}" for t in taking[:2])
        rows.append((node["node"], f"{node['score']:.2f}", _flags(node), weight, worst or "-"))
    print_table(("NODE", "SCORE", "FLAGS", "WEIGHT", "WORST"), rows)
    for warning in found["warnings"]:
        click.echo(f"crater: warning: {warning}", err=True)


def _first(term: dict[str, Any]) -> tuple[bool, float]:
    """Grave terms first, the worst of them before the others."""
    return not term["grave"], term["value"]


def _score(judged: dict[str, Any]) -> str:
    return f"{judged['score']:.2f}, {_flags(judged)}"


def _flags(judged: dict[str, Any]) -> str:
    """``tier 2, degraded, gpu_lost``; ``well`` when there is nothing to say."""
    words = [f"tier {judged['tier']}"] if judged["tier"] else []
    words += ["degraded"] if judged["degraded"] else []
    words += [*judged["faults"], *judged["flags"]]
    return ", ".join(words) or "well"


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for node in found.get("numa_nodes", ()):
        yield f"NUMA node {node['id']}", _words(node, without=("id",))
    for gpu in found.get("gpus", ()):
        own = ("index", "model", "uuid")
        yield f"GPU {gpu['index']} ({gpu.get('model', '?')})", _words(gpu, without=own)
    for drive in found.get("drives", ()):
        yield drive["name"], _words(drive, without=("name", "stable_id"))


def _words(part: dict[str, Any], without: tuple[str, ...]) -> str:
    """``cpu utilization 12.5 %, memory used 1024 MiB``: the end of a name is its unit."""
    words = []
    for name, value in part.items():
        if name not in without:
            text = " ".join(map(str, value)) if isinstance(value, list) else f"{value:g}"
            label, unit = split_unit(name)
            words.append(f"{label.replace('_', ' ')} {text} {unit}".rstrip())
    return ", ".join(words) or "unknown"
