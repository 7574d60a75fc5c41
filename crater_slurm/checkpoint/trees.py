"""Folders by descriptor: opened without following links, measured, removed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Deeper than datasets are; a user may nest folders without end.
_DEEPEST = 64


def open_folder(name: str, parent: int | None = None) -> int:
    """Open a folder that is no symbolic link. Raises OSError."""
    return os.open(name, _FOLDER, dir_fd=parent)


def remove(name: str, parent: int, depth: int = 0) -> None:
    """Remove a file, a link, or a folder with all that is in it. Raises OSError."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=parent)
            return
        if depth > _DEEPEST:
            raise OSError(errno.ELOOP, "folders lie too deep in each other", name)
        fd = open_folder(name, parent)
        try:
            for inner in os.listdir(fd):
                remove(inner, fd, depth + 1)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return


def tree_bytes(fd: int, depth: int = 0) -> int:
    """Bytes that an open folder's files take on disk; what can't be read counts nothing."""
    total = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(fd):
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                total += status.st_blocks * 512
                if stat.S_ISDIR(status.st_mode) and depth < _DEEPEST:
                    inner = open_folder(name, fd)
                    try:
                        total += tree_bytes(inner, depth + 1)
                    finally:
                        os.close(inner)
    return total
