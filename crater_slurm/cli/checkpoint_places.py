"""Where checkpoints are looked for: a job, by this node's daemon; a folder or a URL, by itself."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crater_slurm.cli.context import loaded
from crater_slurm.errors import CraterError, UsageError
from crater_slurm.files import is_dir

if TYPE_CHECKING:
    from crater_slurm.checkpoint.remote.catalogue import Stored
    from crater_slurm.checkpoint.remote.store import Store
    from crater_slurm.checkpoint.spec import Remote

_JOB = re.compile(r"[0-9]{1,10}\Z")


def is_job(where: str) -> bool:
    """Whether a place is a job's number."""
    return bool(_JOB.match(where))


def ask(job: str, question: dict[str, Any]) -> dict[str, Any]:
    """The answer of a job's worker, by this node's daemon."""
    from crater_slurm.node import ask as daemon

    return daemon.ask(loaded().settings.node.socket, job, question)


def remote_of(where: str, profile: str = "default", endpoint: str = "") -> Remote:
    """A folder or URL, and how to get there."""
    from crater_slurm.node.destinations import own

    settings = loaded().settings.node.checkpoints
    place = where if "://" in where else os.path.normpath(Path(where).absolute())
    return own(place, settings, profile, endpoint)


@contextlib.contextmanager
def opened(where: str, profile: str = "default", endpoint: str = "") -> Iterator[Store]:
    """A place to read; what goes wrong with it is an error for people."""
    from crater_slurm.checkpoint import remote as remotes
    from crater_slurm.checkpoint.remote.store import RemoteError
    from crater_slurm.checkpoint.restore import NotThereError

    if "://" not in where and not is_dir(where):
        raise UsageError(
            f"{where} is no folder; name a job id, a folder with checkpoints, or a URL such as "
            "s3://bucket/prefix"
        )
    try:
        found = remotes.open_store(remote_of(where, profile, endpoint), str(Path.home()))
        with contextlib.closing(found):
            yield found
    except (RemoteError, NotThereError) as error:
        raise CraterError(str(error)) from error
    except OSError as error:
        raise CraterError(f"{error.filename or where}: {error.strerror or error}") from error


def find(store: Store, name: str, step: int | None, run: str | None) -> list[Stored]:
    """The step that is meant there; CraterError where there is none."""
    from crater_slurm.checkpoint import inspect

    if found := inspect.find(store, name, step, run):
        return found
    raise CraterError(missing(store.where, name, step))


def missing(where: str, name: str, step: int | None) -> str:
    """What is said of a step that is not there."""
    what = f"no {name} {step}" if step is not None else f"no complete checkpoint {name!r}"
    return f"{where} has {what}; `crater checkpoints list` shows what is there"


@contextlib.contextmanager
def bar(label: str, length: int) -> Iterator[Callable[[int], None]]:
    """Progress for who sits at a terminal; called by several threads."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    lock = threading.Lock()
    with click.progressbar(length=length, label=label, file=sys.stderr) as bar:

        def progress(count: int) -> None:
            with lock:
                bar.update(count)

        yield progress
