"""``crater checkpoints``: what checkpoints are where, whether they are whole, and bringing them.

Of a job this node's crater-io-daemon is asked; folders and URLs are read by this process itself,
with the rights and the keys of whoever calls it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crater_slurm.cli import checkpoint_places as places
from crater_slurm.cli import checkpoints_view as view
from crater_slurm.cli.output import print_json
from crater_slurm.errors import CraterError, UsageError

if TYPE_CHECKING:
    pass

_POLL_SECONDS = 1.0

Command = Callable[..., Any]
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_name = click.option("--name", default="step", show_default=True, help="Kind of checkpoint.")
_run = click.option("--run", default=None, help="Run, such as 4711.0, where several saved it.")
_step = click.argument("step", type=click.IntRange(min=0), required=False)


def _keys(command: Command) -> Command:
    profile = click.option(
        "--profile", default="default", show_default=True, help="Your profile in ~/.aws, for URLs."
    )
    endpoint = click.option("--endpoint", default="", help="https://host:port of an S3 store.")
    return profile(endpoint(command))


@click.group()
def checkpoints() -> None:
    """List, show, verify, flush and restore checkpoints.

    WHERE is a job id (on a node of that job), a folder, or a URL (s3://, gs://, az://). STEP is
    the newest complete one unless it is given.
    """


@checkpoints.command("list")
@click.argument("where", required=False)
@_keys
@_json
def list_(where: str | None, profile: str, endpoint: str, as_json: bool) -> None:
    """List the steps of a job, in a folder or at a URL. In a job WHERE may be left out."""
    where = where or os.environ.get("SLURM_JOB_ID") or ""
    if not where:
        raise UsageError("name a job, a folder or a URL; outside a job none is understood")
    if places.is_job(where):
        found = places.ask(where, {"op": "list"})
        print_json(found) if as_json else view.job_steps(found)
        return
    from crater_slurm.checkpoint import inspect

    with places.opened(where, profile, endpoint) as store:
        rows = inspect.steps(store)
        if as_json:
            print_json({"place": store.where, "steps": rows})
        else:
            view.steps(store.where, rows)


@checkpoints.command()
@click.argument("where")
@_step
@_name
@_run
@_keys
@_json
def show(
    where: str, step: int | None, name: str, run: str | None, as_json: bool, **keys: str
) -> None:
    """Show a step's parts and files."""
    if places.is_job(where):
        found = places.ask(where, {"op": "show", "name": name, "step": step})
        copies: dict[str, list[dict[str, Any]]] = found["copies"]
        if run is not None:
            copies = {k: [s for s in v if s["run"] == run] for k, v in copies.items()}
        if not any(copies.values()):
            raise CraterError(places.missing(f"job {where}", name, step))
    else:
        from crater_slurm.checkpoint import inspect

        with places.opened(where, **keys) as store:
            found_here = places.find(store, name, step, run)
            copies = {store.where: [inspect.show(stored) for stored in found_here]}
    print_json(copies) if as_json else view.copies(copies)


@checkpoints.command()
@click.argument("where")
@_step
@_name
@_run
@click.option("--destination", is_flag=True, help="Of a job: also what is at its destination.")
@_keys
@_json
def verify(
    where: str,
    step: int | None,
    name: str,
    run: str | None,
    destination: bool,
    as_json: bool,
    **keys: str,
) -> None:
    """Compare a step's bytes with its checksums; of a job all steps unless one is named.

    The exit code is 1 when something is damaged.
    """
    if places.is_job(where):
        question = {"op": "verify", "name": name, "step": step, "destination": destination}
        found = places.ask(where, question)
        if not found["checked"]:
            raise CraterError(places.missing(f"job {where}", name, step))
    else:
        found = _verify_here(where, step, name, run, keys)
    print_json(found) if as_json else view.verified(found)
    if found["damaged"]:
        click.get_current_context().exit(1)


def _verify_here(
    where: str, step: int | None, name: str, run: str | None, keys: dict[str, str]
) -> dict[str, Any]:
    from crater_slurm.checkpoint import inspect

    damaged: list[str] = []
    checked = []
    with places.opened(where, **keys) as store:
        for stored in places.find(store, name, step, run):
            with places.bar("verify", inspect.row(stored)["bytes"]) as progress:
                wrong = inspect.verify(store, stored, progress)
            damaged += wrong
            known = {k: inspect.row(stored)[k] for k in ("name", "step", "run", "bytes")}
            checked.append({**known, "where": store.where, "good": not wrong})
    return {"checked": checked, "damaged": damaged}


@checkpoints.command()
@click.argument("where")
@_step
@_name
@click.option("--to", default=None, help="Of a folder: the folder or URL to bring its steps to.")
@click.option("--wait/--no-wait", default=True, help="Of a job: until all of it is there.")
@_keys
@_json
def flush(
    where: str,
    step: int | None,
    name: str,
    to: str | None,
    wait: bool,
    as_json: bool,
    **keys: str,
) -> None:
    """Bring steps to their destination now: of a job, or of a FOLDER that a job left, with --to."""
    if not places.is_job(where):
        if to is None:
            raise UsageError("say where the folder's steps go: --to FOLDER or --to URL")
        if step is not None:
            raise UsageError("of a folder all steps are flushed; leave the step out")
        rows = _flush_folder(where, to, keys)
        print_json({"steps": rows}) if as_json else view.flushed(rows, to)
        return
    if to is not None:
        raise UsageError("a job has its own destination; --to is for folders")
    found = places.ask(where, {"op": "flush", "name": name, "step": step})
    if wait:
        found = _wait(where, name, step, found)
    print_json(found) if as_json else view.flushing(found, where)


def _wait(job: str, name: str, step: int | None, found: dict[str, Any]) -> dict[str, Any]:
    """Until nothing that was asked for is on its way any more. Raises CraterError when it fails."""
    while True:
        mine = [s for s in found["steps"] if step is None or (s["name"], s["step"]) == (name, step)]
        for one in mine:
            if one["error"]:
                raise CraterError(str(one["error"]))
        if not mine:
            return found
        done, size = sum(s["done"] for s in mine), sum(s["bytes"] for s in mine)
        if sys.stderr.isatty():
            click.echo(f"\r{view.amount(done)} of {view.amount(size)} ", nl=False, err=True)
        time.sleep(_POLL_SECONDS)
        found = places.ask(job, {"op": "flushing"})


def _flush_folder(folder: str, to: str, keys: dict[str, str]) -> list[dict[str, Any]]:
    from crater_slurm.checkpoint import inspect
    from crater_slurm.checkpoint.flush import Flusher
    from crater_slurm.checkpoint.remote import open_store

    remote, rows = places.remote_of(to, **keys), []
    with places.opened(folder, **keys) as store:
        if "://" in store.where:
            raise UsageError(f"only folders are flushed, and {folder} is a URL")
        for spec, parts in inspect.left(store, store.where, remote, str(Path.home())):
            away = open_store(remote, str(Path.home()))
            with contextlib.closing(away):
                flusher = Flusher(spec, lambda step: None, _say, store=away)
                for folder_of, part in parts:
                    flusher.add(folder_of, part)
                while flusher.turn():
                    pass
                rows += flusher.state()
    if failed := [row["error"] for row in rows if row["error"]]:
        raise CraterError("\n".join(dict.fromkeys(failed)))
    if not rows:
        raise CraterError(f"{folder} has no checkpoints")
    return rows


def _say(level: str, text: str) -> None:
    if level != "info":
        click.echo(f"crater: {level}: {text}", err=True)


@checkpoints.command()
@click.argument("where")
@_step
@_name
@_run
@click.option("--to", default=None, help="Folder to put it into; of a job, else its cache.")
@_keys
@_json
def restore(
    where: str,
    step: int | None,
    name: str,
    run: str | None,
    to: str | None,
    as_json: bool,
    **keys: str,
) -> None:
    """Bring a complete step into the job's cache, or into the folder that --to names."""
    source = ""
    if places.is_job(where):
        found = places.ask(where, {"op": "restore", "name": name, "step": step, "run": run})
        if not found.get("folder"):
            raise CraterError(places.missing(f"job {where}", name, step))
        folder, source = str(found["folder"]), str(found["source"])
        step, run = int(found["step"]), str(found["run"])
        if to is not None:
            folder = _copy(str(Path(folder).parent), to, name, step, run, {})[0]
    elif to is None:
        raise UsageError("say where the step goes: --to FOLDER")
    else:
        folder, step, run = _copy(where, to, name, step, run, keys)
    known = {"name": name, "step": step, "run": run, "folder": folder, "source": source or where}
    print_json(known) if as_json else view.restored(known)


def _copy(
    where: str, to: str, name: str, step: int | None, run: str | None, keys: dict[str, str]
) -> tuple[str, int, str]:
    from crater_slurm.checkpoint import inspect

    with places.opened(where, **keys) as store:
        stored = next((s for s in places.find(store, name, step, run) if s.complete), None)
        if stored is None:
            raise CraterError(f"{name} {step} is not complete at {store.where}")
        with places.bar("restore", inspect.row(stored)["bytes"]) as progress:
            folder = inspect.copy(store, stored, str(Path(to).absolute()), progress)
    return folder, stored.step, stored.run
