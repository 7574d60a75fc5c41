"""Steps' folders in the cache: given their final name, and taken away, in one step each.

A folder that goes is renamed to a hidden name first, so that nobody takes half of one for a
checkpoint, whenever this process ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil

from crater_slurm.checkpoint import syscalls

_TRASH = ".trash."
_serial = itertools.count()
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def publish(folder: str, partial: str, final: str) -> None:
    """Give a written folder its final name, exchanging one that is there; raises OSError."""
    parent = os.open(folder, _FOLDER)
    try:
        if _exists(final, parent):
            syscalls.exchange(parent, partial, final)
            _discard(partial, parent)
        else:
            os.rename(partial, final, src_dir_fd=parent, dst_dir_fd=parent)
        os.fsync(parent)
    finally:
        os.close(parent)


def remove(folder: str, name: str) -> None:
    """Take a folder away; nothing happens when it is not there. Raises OSError."""
    parent = os.open(folder, _FOLDER)
    try:
        with contextlib.suppress(FileNotFoundError):
            _discard(name, parent)
    finally:
        os.close(parent)


def sweep(folder: str) -> None:
    """Delete what removals that broke off have left; raises OSError."""
    parent = os.open(folder, _FOLDER)
    try:
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(_TRASH)]
        for name in names:
            shutil.rmtree(name, ignore_errors=True, dir_fd=parent)
    finally:
        os.close(parent)


def _discard(name: str, parent: int) -> None:
    trash = f"{_TRASH}{name.lstrip('.')}.{os.getpid()}.{next(_serial)}"
    os.rename(name, trash, src_dir_fd=parent, dst_dir_fd=parent)
    os.fsync(parent)
    shutil.rmtree(trash, ignore_errors=True, dir_fd=parent)


def _exists(name: str, parent: int) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
