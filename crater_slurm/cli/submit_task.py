"""What ``crater submit`` does with a task: read, render, send, wait, and print."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crater_slurm.alldata import options
from crater_slurm.alldata.batch import Batch, command_line, render
from crater_slurm.alldata.document import MOST_BYTES
from crater_slurm.alldata.marker import Marker, comment
from crater_slurm.alldata.task import Task, fingerprint, parse
from crater_slurm.alldata.waiting import OWN
from crater_slurm.cli.context import loaded
from crater_slurm.cli.output import print_json
from crater_slurm.cli.signals import Signals, Stopped
from crater_slurm.errors import CraterError, SlurmError, UsageError

if TYPE_CHECKING:
    from crater_slurm.alldata.queue import Queue
    from crater_slurm.alldata.sending import Submitted
    from crater_slurm.config.submit import Submit


#: Enough to say how much too large a task is, and no more.
_MOST_READ = 16 * MOST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The command line of one submission."""

    task: str
    program: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    dry_run: bool = False
    test_only: bool = False
    wait: bool = False
    cancel_on_signal: bool = False
    as_json: bool = False
    parsable: bool = False
    again: bool = False
    template: str | None = None
    server: str | None = None
    token_file: Path | None = None
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A task that can be sent: its script, its mark, and sbatch's words without the program."""

    task: Task
    batch: Batch
    marker: Marker
    words: tuple[str, ...]
    clusters: str | None
    notes: tuple[str, ...]


def run(order: Order) -> int:
    """Exit status. Under --wait an error of ours is told by 200 and its own code."""
    if not order.wait:
        return _run(order)
    try:
        return _run(order)
    except CraterError as error:
        for line in str(error).splitlines():
            click.echo(f"crater: ERROR: {line}", err=True)
        return OWN + error.exit_code


def _run(order: Order) -> int:
    data = read_task(order.task)
    if order.server:
        from crater_slurm.cli.submit_remote import send

        return send(order, data)
    task = parse(data)
    settings = loaded().settings.submit
    if order.timeout is not None:
        settings = settings.model_copy(update={"timeout_seconds": order.timeout})
    ready = prepare(order, task, settings)
    for note in ready.notes:
        click.echo(f"crater: note: {note}", err=True)
    if order.dry_run:
        return _dry_run(order, ready)
    if order.test_only:
        return _test_only(ready)
    with Signals() as signals:
        done = _send(order, ready, settings)
        _tell(order, ready, done)
        if not order.wait:
            return 0
        cancel = order.cancel_on_signal or settings.cancel_on_signal
        return _wait(order, ready, done, settings, signals, cancel)


def read_task(name: str) -> bytes:
    """A task's text, no more of it than a task can have. Raises UsageError."""
    try:
        if name == "-":
            return sys.stdin.buffer.read(_MOST_READ)
        with Path(name).open("rb") as file:
            return file.read(_MOST_READ)
    except OSError as error:
        raise UsageError(f"the task {name} can't be read: {error.strerror}") from error


def prepare(order: Order, task: Task, settings: Submit) -> Ready:
    """Everything that is decided before Slurm is asked."""
    from crater_slurm.alldata.advice import notes

    own, rest = options.take(order.options, "--comment")
    clusters, _ = options.take(rest, "--clusters")
    if order.wait and "--array" in options.said(rest):
        raise UsageError("--wait follows one job, and --array makes several")
    batch = render(
        task,
        settings,
        words=order.program,
        options=rest,
        template=order.template,
        enforced=enforced(),
    )
    marker = Marker(
        task.task_id,
        fingerprint(task, list(order.program), list(order.options), order.template),
    )
    words = (f"--comment={comment(marker, own)}", *rest)
    return Ready(
        task,
        batch,
        marker,
        words,
        clusters,
        (*batch.notes, *notes(task, loaded().settings.sharing)),
    )


def enforced() -> bool:
    """Whether crater's filter asks Slurm for what directives say."""
    return loaded().settings.filter.mode == "enforce"


def _program() -> str:
    folder = loaded().settings.slurm.bin_dir
    return str(folder / "sbatch") if folder else "sbatch"


def _dry_run(order: Order, ready: Ready) -> int:
    argv = ["sbatch", *ready.words]
    if order.as_json:
        print_json(
            {
                "task_id": ready.task.task_id,
                "template": ready.batch.template,
                "sbatch": argv,
                "script": ready.batch.script,
                "notes": list(ready.notes),
            }
        )
        return 0
    click.echo(ready.batch.script, nl=False)
    # Behind the script, as a remark: the whole output is a script that can be submitted.
    click.echo(f"# {command_line(argv)} < this script")
    return 0


def _environment() -> dict[str, str]:
    from crater_slurm.slurm.environment import clean_environment

    found = clean_environment(os.environ)
    conf = loaded().settings.slurm.conf
    return found | ({"SLURM_CONF": str(conf)} if conf else {})


def _test_only(ready: Ready) -> int:
    import subprocess

    try:
        done = subprocess.run(
            [_program(), "--test-only", *ready.words],
            input=ready.batch.script,
            text=True,
            env=_environment(),
            timeout=loaded().settings.submit.timeout_seconds,
            check=False,
        )
    except OSError as error:
        raise SlurmError(
            f"can't run sbatch ({error.strerror}); install Slurm's client commands"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError("sbatch --test-only did not answer; is slurmctld up?") from error
    return 1 if done.returncode else 0


def _queue(ready: Ready) -> Queue:
    from crater_slurm.alldata.queue import Queue
    from crater_slurm.cli.explain import slurm_client

    return Queue(slurm_client(), ready.clusters)


def _send(order: Order, ready: Ready, settings: Submit) -> Submitted:
    from crater_slurm.alldata.journal import journal_of
    from crater_slurm.alldata.sbatch import attempt
    from crater_slurm.alldata.sending import Sender

    environment = _environment()
    argv = [_program(), "--parsable", *ready.words]
    cluster = f"{environment.get('SLURM_CONF', '')} {ready.clusters or ''}".strip()
    sender = Sender(
        queue=_queue(ready),
        journal=journal_of(ready.task.task_id, cluster, os.environ),
        settings=settings,
        attempt=lambda: attempt(argv, ready.batch.script, environment, settings.timeout_seconds),
    )
    done = sender.send(ready.marker, again=order.again)
    for line in done.said.splitlines():
        click.echo(line, err=True)
    return done


def _tell(order: Order, ready: Ready, done: Submitted) -> None:
    if not done.fresh:
        click.echo(
            f"crater: note: the task {ready.task.task_id} was submitted before; this is its job",
            err=True,
        )
    if order.as_json:
        if not order.wait:
            print_json(_document(ready, done))
    elif order.parsable:
        click.echo(done.parsable)
    else:
        click.echo(done.sentence)
    sys.stdout.flush()


def _document(ready: Ready, done: Submitted, **end: Any) -> dict[str, Any]:
    return {
        "task_id": ready.task.task_id,
        "job_id": done.job_id,
        "cluster": done.cluster or None,
        "fresh": done.fresh,
        "template": ready.batch.template,
        "notes": list(ready.notes),
        **end,
    }


def _wait(
    order: Order,
    ready: Ready,
    done: Submitted,
    settings: Submit,
    signals: Signals,
    cancel: bool,
) -> int:
    from crater_slurm.alldata.waiting import Waiter

    def say(words: str) -> None:
        click.echo(f"crater: job {done.job_id}: {words}", err=True)

    queue = replace(_queue(ready), clusters=ready.clusters or done.cluster or None)
    waiter = Waiter(queue=queue, say=say, steady_seconds=settings.poll_seconds)
    try:
        signals.listen()
        end = waiter.wait(done.job_id)
        status = end.status
    except Stopped as stopped:
        signals.hold()
        status = 128 + stopped.number
        if not cancel:
            say("goes on; only the waiting for it has ended")
            return status
        queue.cancel(done.job_id)
        say(f"cancelled, because of {signal.Signals(stopped.number).name}")
        end = replace(waiter, steady_seconds=1.0).wait(done.job_id)
    if order.as_json:
        about = {"state": end.state, "exit_code": end.exit_code, "signal": end.signal}
        print_json(_document(ready, done, **about, status=status))
    return status
