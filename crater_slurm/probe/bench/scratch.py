"""The private folder that a drive is measured in: made here, seen by nobody else, removed always.

Every step works on open folders, not on paths, so that nobody who may write beside it can put
another folder or a link in its place. What a killed run left is found by its exact name.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from crater_slurm.errors import CraterError

#: The file that fio reads and writes.
DATA = "data"
_FOLDER = re.compile(r"\.crater-bench-[0-9a-f]{16}")
#: Everything that a run makes in its folder.
_OURS = re.compile(r"data|iops_iops\.\d{1,3}\.log")
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def scratch(folder: Path, size_bytes: int) -> Iterator[int]:
    """An open private folder in ``folder`` with a file ``data`` of that size; gone afterwards.

    The space is taken at once, so that a file system that fills up meanwhile stops nobody later.
    Raises CraterError when the folder can't be written or has not the space.
    """
    parent = _open(folder)
    name = f".crater-bench-{secrets.token_hex(8)}"
    inside = -1
    try:
        with _signals_raise():
            try:
                inside = _make(parent, name, folder, size_bytes)
                yield inside
            finally:
                if inside >= 0:
                    os.close(inside)
                _remove(parent, name, folder)
    finally:
        os.close(parent)


def clean_leftovers(folder: Path) -> list[str]:
    """Remove what killed runs of this user left in ``folder``; say what was and was not removed.

    A folder goes only if its name is exactly one that a run makes, it is this user's and nobody
    else may write to it, and it holds nothing but what a run makes.
    """
    parent = _open(folder)
    try:
        told = []
        for name in _entries(parent):
            if not _FOLDER.fullmatch(name):
                continue
            if why := _not_ours(parent, name):
                told.append(f"left {folder / name} alone: {why}")
            else:
                _remove(parent, name, folder)
                told.append(f"removed {folder / name}, left by a run that was killed")
        return told
    finally:
        os.close(parent)


def _open(folder: Path) -> int:
    try:
        return os.open(folder, _OPEN_FOLDER)
    except OSError as error:
        raise CraterError(f"can't open the folder {folder}: {error.strerror}") from error


def _entries(folder: int) -> list[str]:
    return sorted(os.listdir(folder))


def _not_ours(parent: int, name: str) -> str | None:
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode):
        return "it is no folder"
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        return "it belongs to another user, or others may enter it"
    inside = os.open(name, _OPEN_FOLDER, dir_fd=parent)
    try:
        strange = [entry for entry in _entries(inside) if not _OURS.fullmatch(entry)]
    finally:
        os.close(inside)
    return f"it holds {strange[0]!r}" if strange else None


def _make(parent: int, name: str, folder: Path, size_bytes: int) -> int:
    """The new private folder, open, with the file in it."""
    inside = -1
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
        inside = os.open(name, _OPEN_FOLDER, dir_fd=parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        data = os.open(DATA, flags, 0o600, dir_fd=inside)
        try:
            os.posix_fallocate(data, 0, size_bytes)
        finally:
            os.close(data)
    except OSError as error:
        if inside >= 0:
            os.close(inside)
        raise CraterError(f"can't write in {folder}: {error.strerror}") from error
    return inside


def _remove(parent: int, name: str, folder: Path) -> None:
    """Unlink what a run makes, never what a link points to, then the folder."""
    try:
        inside = os.open(name, _OPEN_FOLDER, dir_fd=parent)
    except FileNotFoundError:
        return
    try:
        for entry in _entries(inside):
            if _OURS.fullmatch(entry):
                os.unlink(entry, dir_fd=inside)
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        raise CraterError(f"can't remove {folder / name}: {error.strerror}; remove it") from error
    finally:
        os.close(inside)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run through the removal of its folder, as SIGINT does anyway."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
