"""Folder work that a user can't trick: every step is relative to an open folder, no link followed.

Users own what is inside their cache folders and may put anything there: symbolic links, names
with newlines, trees deeper than any stack. The folders above belong to root alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

PARENT_MODE = 0o711  # users pass through to their own folder, but can't list others'
PRIVATE_MODE = 0o700
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: Trees are removed by recursion down to here; what lies deeper is moved up first.
_MAX_DEPTH = 32


class UnsafeError(Exception):
    """Something is in the way that root did not put there; the message reads after "couldn't"."""


@contextlib.contextmanager
def opened(path: Path | str, parent: int | None = None) -> Iterator[int]:
    """An open folder. A path without ``parent`` is the admin's and may be a link."""
    fd = os.open(path, _FOLDER if parent is not None else _FOLDER & ~os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def parent_folder(parent: int, name: str, mode: int = PARENT_MODE) -> Iterator[int]:
    """A folder of ours, made if absent; raises UnsafeError when anybody else could change it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=parent)
    try:
        fd = os.open(name, _FOLDER, dir_fd=parent)
    except NotADirectoryError as error:
        raise UnsafeError(f"use {name!r}: it is a link or a file, not a folder") from error
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise UnsafeError(f"use {name!r}: it belongs to uid {status.st_uid}")
        if mount_id(fd) != mount_id(parent):
            raise UnsafeError(f"use {name!r}: it is a mount point of its own")
        if stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(fd, mode)
        yield fd
    finally:
        os.close(fd)


def is_private_folder(parent: int, name: str, uid: int) -> bool:
    """Whether ``name`` is a real folder of this user; a link, a file or another's is not."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == uid


def exists(parent: int, name: str) -> bool:
    """Whether anything has this name, also a dangling link."""
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def make_private(parent: int, name: str, uid: int, gid: int) -> None:
    """A new folder of mode 0700 for one user; raises FileExistsError if the name is taken."""
    os.mkdir(name, PRIVATE_MODE, dir_fd=parent)
    with opened(name, parent) as fd:
        os.fchmod(fd, PRIVATE_MODE)
        os.fchown(fd, uid, gid)


def mount_id(fd: int) -> int:
    """The kernel's id of the mount that an open folder is on; bind mounts have their own."""
    text = Path(f"/proc/self/fdinfo/{fd}").read_text()
    match = re.search(r"^mnt_id:\s*(\d+)$", text, re.M)
    return int(match.group(1)) if match else -1


def remove_tree(trash: int, name: str) -> bool:
    """Remove an entry of the trash folder with all below it; False when something must stay.

    Never follows a link and never enters another mount. A subtree that lies very deep is moved up
    into the trash, to be removed as an entry of its own, so that depth costs neither stack nor
    file descriptors.
    """
    try:
        with opened(name, trash) as fd:
            home = mount_id(trash)
            if mount_id(fd) != home or not _empty(fd, trash, home, 1):
                return False
        os.rmdir(name, dir_fd=trash)
    except NotADirectoryError:
        os.unlink(name, dir_fd=trash)
    except FileNotFoundError:
        pass
    return True


def _empty(fd: int, trash: int, home: int, depth: int) -> bool:
    whole = True
    with os.scandir(fd) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=fd)
            elif depth >= _MAX_DEPTH:
                os.rename(entry.name, _deep_name(fd, entry), src_dir_fd=fd, dst_dir_fd=trash)
            else:
                whole = _remove_folder(fd, entry.name, trash, home, depth) and whole
    return whole


def _remove_folder(parent: int, name: str, trash: int, home: int, depth: int) -> bool:
    with opened(name, parent) as child:
        if mount_id(child) != home or not _empty(child, trash, home, depth + 1):
            return False
    os.rmdir(name, dir_fd=parent)
    return True


def _deep_name(fd: int, entry: os.DirEntry[str]) -> str:
    """A name in the trash that nothing else has: by inode, which the moved folder keeps."""
    return f"deep.{os.fstat(fd).st_dev}.{entry.inode()}"
