"""What ``crater checkpoints`` prints for people."""

from __future__ import annotations

import time
from typing import Any

import click

from crater_slurm.cli.output import print_table

Row = dict[str, Any]
_WORDS = {"pending": "to flush", "running": "flushing", "skipped": "needless there"}


def amount(size: float) -> str:
    """Bytes, as short as they are still exact enough."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"


def age(moment: float) -> str:
    """How long ago, in the largest unit that fits."""
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def job_steps(found: Row) -> None:
    """A job's steps, with where each is and how far."""
    place = found["destination"] or "none: checkpoints stay on the node"
    click.echo(f"cache: {found['folder']}\ndestination: {place}")
    if found["problem"]:
        click.echo(f"the destination could not be asked: {found['problem']}")
    if not found["steps"]:
        click.echo("no checkpoints yet")
        return
    print_table(
        ("STEP", "SIZE", "AGE", "RUN", "RANKS", "WHERE", "STATE"),
        [
            (
                *_first(row),
                f"{row['ranks']}/{row['world']}" if row["world"] else "-",
                ", ".join(row["where"]),
                _state(row),
            )
            for row in found["steps"]
        ],
    )
    if found["left_out"]:
        click.echo(f"and {found['left_out']} older ones")
    for row in found["steps"]:
        if row["error"]:
            click.echo(f"{row['name']} {row['step']}: {row['error']}")


def _first(row: Row) -> tuple[str, str, str, str]:
    return f"{row['name']} {row['step']}", amount(row["bytes"]), age(row["time"]), row["run"]


def _state(row: Row) -> str:
    whole = "complete" if row["complete"] else "this node's part"
    state = row["state"]
    if not state:
        return whole
    if row["error"]:
        said = "failed" if state == "failed" else "tried again"
        return f"{whole}, {said}" + (f" since {age(row['since'])}" if row.get("since") else "")
    if state == "running" and row["bytes"]:
        return f"{whole}, flushing ({100 * row['done'] // row['bytes']} %)"
    return f"{whole}, {_WORDS.get(state, state)}"


def steps(where: str, rows: list[Row]) -> None:
    """The steps of a folder or at a URL."""
    if not rows:
        click.echo(f"{where} has no checkpoints")
        return
    print_table(
        ("STEP", "SIZE", "AGE", "RUN", "RANKS", "PARTS", "STATE"),
        [
            (
                *_first(row),
                f"{row['ranks']}/{row['world']}",
                str(row["parts"]),
                "complete" if row["complete"] else "incomplete",
            )
            for row in rows
        ],
    )


def copies(found: dict[str, list[Row]]) -> None:
    """A step's parts and files, at each place where it is."""
    for where, there in found.items():
        for one in there:
            whole = "complete" if one["complete"] else "incomplete"
            click.echo(
                f"{where}: {one['folder']}, run {one['run']}, {amount(one['bytes'])}, "
                f"{one['ranks']} of {one['world']} ranks, {whole}"
            )
            print_table(
                ("MANIFEST", "NODE", "SAVED", "RANKS", "SIZE"),
                [
                    (
                        part["manifest"],
                        part["node"] or "-",
                        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(part["time"])),
                        str(part["ranks"]),
                        amount(part["bytes"]),
                    )
                    for part in one["manifests"]
                ],
            )
            print_table(
                ("FILE", "RANK", "SIZE", "NODE"),
                [
                    (file["file"], str(file["rank"]), amount(file["bytes"]), file["node"] or "-")
                    for file in one["files"]
                ],
            )
            if (left := one["all"] - len(one["files"])) > 0:
                click.echo(f"and {left} more files")


def verified(found: Row) -> None:
    """Which steps are good, and what is wrong with the others."""
    for one in found["checked"]:
        what = "all bytes agree" if one["good"] else "DAMAGED"
        click.echo(
            f"{one['name']} {one['step']} of run {one['run']}, {one['where']}: "
            f"{amount(one['bytes'])}, {what}"
        )
    for problem in found["damaged"]:
        click.echo(problem)


def flushing(found: Row, job: str) -> None:
    """What of a job is still on its way."""
    if not found["count"]:
        click.echo(f"all of job {job} on this node is at {found['destination']}")
        return
    for one in found["steps"]:
        what = one["error"] or f"{amount(one['done'])} of {amount(one['bytes'])}"
        click.echo(f"{one['name']} {one['step']} to {found['destination']}: {what}")


def flushed(rows: list[Row], where: str) -> None:
    """What of a folder was brought to a place."""
    for row in rows:
        state = "is there" if row["state"] == "flushed" else row["state"]
        click.echo(f"{row['name']} {row['step']} of run {row['run']}: {state} ({where})")


def restored(known: Row) -> None:
    click.echo(
        f"{known['name']} {known['step']} of run {known['run']} is in {known['folder']} "
        f"(from {known['source']})"
    )
