"""What this user's submissions remember of each task: one small file, and a lock beside it.

It makes two submissions of one task at a time take turns, and lets one that was interrupted be
taken up. Slurm is the authority: the file only says what to ask it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from crater_slurm.errors import CraterError
from crater_slurm.files import write_atomically

_TURN_SECONDS = 0.1


class BusyError(CraterError):
    """Another submission of the same task is under way; exit code 8, the outcome is not known."""

    exit_code = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """``job_id`` is None between an attempt and its outcome. ``begun`` is seconds since 1970."""

    task_id: str
    fingerprint: str
    begun: float
    job_id: int | None = None
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Journal:
    """One task's file; without a folder nothing is remembered."""

    file: Path | None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    @contextmanager
    def turn(self, patience_seconds: float) -> Iterator[None]:
        """Hold the task's lock. Raises BusyError when another holds it for that long."""
        if self.file is None:
            yield
            return
        lock = self.file.with_suffix(".lock")
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            deadline = self.clock() + patience_seconds
            while not _locked(fd):
                if self.clock() >= deadline:
                    raise BusyError(
                        "another submission of this task is under way on this machine and does "
                        "not end; look for it before you try again"
                    )
                self.sleep(_TURN_SECONDS)
            yield
        finally:
            os.close(fd)

    def read(self) -> Entry | None:
        """What is remembered; a damaged file is as none, since Slurm is asked anyway."""
        if self.file is None:
            return None
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
            entry = Entry(**found)
        except (OSError, ValueError, TypeError):
            return None
        known = isinstance(entry.begun, int | float) and isinstance(entry.fingerprint, str)
        return entry if known and isinstance(entry.job_id, int | None) else None

    def begin(self, entry: Entry) -> None:
        """Write an attempt down, on the disk, before it is made. CraterError when that fails."""
        if self.file is None:
            return
        try:
            write_atomically(self.file, json.dumps(asdict(entry)) + "\n")
        except OSError as error:
            raise CraterError(
                f"nothing was submitted: {self.file} can't be written ({error.strerror}); "
                "XDG_STATE_HOME names another folder"
            ) from error

    def end(self, entry: Entry) -> None:
        """Write the outcome down; if that fails, Slurm still knows it."""
        if self.file is not None:
            with suppress(OSError):
                write_atomically(self.file, json.dumps(asdict(entry)) + "\n")

    def forget(self) -> None:
        """An attempt of which it is sure that nothing came."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def journal_of(task_id: str, cluster: str, environment: Mapping[str, str]) -> Journal:
    """The task's file below XDG_STATE_HOME or ~/.local/state; none where that can't be written.

    ``cluster`` tells clusters apart, since a task of the same name may be sent to each.
    """
    base = environment.get("XDG_STATE_HOME") or ""
    home = environment.get("HOME") or ""
    if not base.startswith("/"):
        base = f"{home}/.local/state" if home.startswith("/") else ""
    if not base:
        return Journal(None)
    folder = Path(base) / "crater" / "tasks"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return Journal(None)
    if not os.access(folder, os.W_OK | os.X_OK):
        return Journal(None)
    name = hashlib.sha256(f"{cluster}\0{task_id}".encode()).hexdigest()[:32]
    return Journal(folder / f"{name}.json")
