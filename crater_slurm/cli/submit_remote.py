"""``crater submit --server``: the task goes to crater-scheduler's API instead of sbatch."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from crater_slurm.alldata.remote import Server, read_token
from crater_slurm.alldata.task import parse
from crater_slurm.alldata.waiting import OWN, End, codes
from crater_slurm.cli.context import loaded
from crater_slurm.cli.output import print_json
from crater_slurm.errors import UsageError

if TYPE_CHECKING:
    from crater_slurm.cli.submit_task import Order

_TIMEOUT_SECONDS = 30.0


def send(order: Order, data: bytes) -> int:
    """Exit status. The task is checked here first, so that its mistakes need no server."""
    document = _with_program(order, data)
    refused = {
        "--dry-run": order.dry_run,
        "--test-only": order.test_only,
        "--template": order.template,
        "--again": order.again,
        "--cancel-on-signal": order.cancel_on_signal,
        **dict.fromkeys(order.options[:1], True),
    }
    for option, given in refused.items():
        if given:
            raise UsageError(f"{option} and --server don't go together; the server decides that")
    token = read_token(order.token_file) if order.token_file else None
    server = Server(order.server or "", token, order.timeout or _TIMEOUT_SECONDS)
    found = server.submit(document)
    _tell(order, found)
    if not order.wait:
        return 0

    def say(words: str) -> None:
        click.echo(f"crater: task {document['task_id']}: {words}", err=True)

    end = server.wait(document["task_id"], say, loaded().settings.submit.poll_seconds)
    if order.as_json:
        print_json(end)
    return status_of(end)


def _with_program(order: Order, data: bytes) -> dict[str, Any]:
    """The document as it is sent, with the program of the command line in it."""
    parse(data)
    document: dict[str, Any] = json.loads(data.decode("utf-8-sig"))
    if order.program:
        kept = {
            key: value
            for key, value in (document.get("run_config") or {}).items()
            if key not in ("script", "command", "arguments")
        }
        name, *arguments = order.program
        document["run_config"] = kept | {"script": name, "arguments": arguments}
        parse(json.dumps(document))
    return document


def _tell(order: Order, found: dict[str, Any]) -> None:
    job = found.get("job_id")
    if order.as_json:
        if not order.wait:
            print_json(found)
    elif job is None:
        click.echo("crater: the server has the task, and no job of it yet", err=True)
    else:
        click.echo(f"{job}" if order.parsable else f"Submitted batch job {job}")
    sys.stdout.flush()


def status_of(end: dict[str, Any]) -> int:
    """Exit status of a task as the server tells it, the same as for a job of sbatch's."""
    status = str(end.get("status"))
    if status == "rejected":
        return OWN + 1
    # The server tells exit codes as Slurm does: 3:0.
    return End(status.upper(), *codes(str(end.get("exit_code") or ""))).status
