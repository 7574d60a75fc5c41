"""``crater callbacks``: what the platform was told, and what could not be told to it."""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any

import click

from crater_slurm.cli.output import print_json, print_table
from crater_slurm.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from crater_slurm.store.task_records import StoredCallback

_DELIVERIES = ("waiting", "delivered", "dead", "off")


@click.group()
def callbacks() -> None:
    """Callbacks to the platform, and their dead letters."""


@callbacks.command("list")
@click.option("--state", type=click.Choice(_DELIVERIES), help="Only those.")
@click.option("--task", "task_id", help="Only of this task.")
@click.option(
    "--limit", default=50, show_default=True, type=click.IntRange(min=1), help="How many."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with what is sent.")
def list_(state: str | None, task_id: str | None, limit: int, as_json: bool) -> None:
    """List callbacks, the newest first: sent, waiting, or dead after too many attempts."""
    from crater_slurm.cli.profiles import open_store

    with open_store() as store:
        found: list[StoredCallback] = []
        if task_id is None:
            found = store.callbacks(delivery=state, limit=limit)
        for task in store.tasks(task_id=task_id, limit=100) if task_id else []:
            found += store.callbacks(delivery=state, task=task.number, limit=limit)
        counts = store.callback_counts()
    if as_json:
        print_json([_shown(one) | {"payload": json.loads(one.payload)} for one in found])
        return
    if found:
        titles = ("EVENT", "TASK", "#", "STATUS", "DELIVERY", "TRIES", "HTTP", "WHAT WENT WRONG")
        print_table(titles, [_row(one) for one in found])
    told = ", ".join(f"{counts[name]} {name}" for name in _DELIVERIES if name in counts)
    click.echo(f"in all: {told or 'no callbacks'}")


def _shown(one: StoredCallback) -> dict[str, Any]:
    from crater_slurm.alldata.payload import iso

    return {
        "event_id": one.event_id,
        "client": one.client,
        "task_id": one.task_id,
        "sequence": one.sequence,
        "status": one.status,
        "delivery": one.delivery,
        "attempts": one.attempts,
        "http_status": one.http_status,
        "error": one.error or None,
        "written": iso(one.time),
        "next_try": iso(one.next_try) if one.delivery == "waiting" else None,
        "done": iso(one.done),
    }


def _row(one: StoredCallback) -> list[str]:
    http = "-" if one.http_status is None else str(one.http_status)
    words = (one.event_id, one.task_id, one.sequence, one.status, one.delivery, one.attempts)
    return [*map(str, words), http, one.error or "-"]


@callbacks.command()
@click.argument("events", nargs=-1, metavar="[EVENT]...")
@click.option("--all-dead", is_flag=True, help="All dead ones, instead of naming them.")
def retry(events: tuple[str, ...], all_dead: bool) -> None:
    """Let callbacks go out again: those named, or all dead ones.

    crater-scheduler sends them within seconds. A receiver knows repeats by their event id, and
    late ones by their sequence.
    """
    from crater_slurm.cli.profiles import open_store

    if bool(events) is all_dead:
        raise UsageError("name events, or say --all-dead; 'crater callbacks list' shows them")
    with open_store() as store:
        done = store.retry_callbacks(time.time(), None if all_dead else events)
    if events and done < len(set(events)):
        raise UsageError(
            f"{done} of {len(set(events))} will be sent again; the others are unknown or delivered"
        )
    click.echo(f"{done} will be sent again")


@callbacks.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def test(as_json: bool) -> None:
    """Send one callback of no task to alldata.callback.url, and say what came back.

    Its task_id is "crater-test" and its sequence 0, so that a receiver can leave it out.
    """
    from crater_slurm.alldata.payload import VERSION, iso
    from crater_slurm.alldata.sender import Sender
    from crater_slurm.cli.context import loaded

    settings = loaded().settings.alldata.callback
    if not settings.url:
        raise UsageError("alldata.callback.url is empty: nobody is told anything")
    event = str(uuid.uuid4())
    body = {"version": VERSION, "event_id": event, "task_id": "crater-test", "status": "scheduled"}
    body |= {"sequence": 0, "time": iso(time.time()), "job_id": None, "test": True}
    sender = Sender(settings)
    begin = time.monotonic()
    answer = sender.post(json.dumps(body).encode(), event, "scheduled")
    seconds = time.monotonic() - begin
    sender.close()
    if as_json:
        about = {"url": settings.url, "http_status": answer.status, "error": answer.error or None}
        print_json(about | {"accepted": answer.accepted, "seconds": round(seconds, 3)})
    if not answer.accepted:
        raise UnavailableError(f"{settings.url}: {answer.error}")
    if not as_json:
        click.echo(f"{settings.url} answered {answer.status} in {seconds * 1000:.0f} ms")
