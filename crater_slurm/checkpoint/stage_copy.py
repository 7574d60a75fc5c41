"""Copies a file or a folder into the cache, many small files and large ones, side by side.

A file that is there already with the same size and time is not copied again, and one in an older
copy of the folder is linked. Links to files are copied as files; links to folders point to the
original; what is neither file, folder nor link is left out.
"""

from __future__ import annotations

import ctypes
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from crater_slurm.checkpoint import finishing
from crater_slurm.checkpoint.remote.store import Limiter, StoppedError
from crater_slurm.job import layout

_AT_ONCE = 8
_QUEUED = 256
_PIECE_BYTES = 8 << 20
_libc = ctypes.CDLL(None, use_errno=True)


class StageError(Exception):
    """Something can't be staged; reads after "because"."""


@dataclass(frozen=True, slots=True)
class Way:
    """What every copy is told: when to stop, how fast, and whom to tell.

    ``fits`` is asked once, with all bytes that are to come, and raises StageError.
    """

    stop: threading.Event
    limiter: Limiter
    progress: Callable[[int], None]
    fits: Callable[[int], None]

    def check(self) -> None:
        """Raise StoppedError once staging is called off."""
        if self.stop.is_set():
            raise StoppedError


@dataclass(frozen=True, slots=True)
class Found:
    """Something in a tree: a file, or a link to a folder (``target``), under a relative path."""

    path: str
    size: int = 0
    mtime_ns: int = 0
    mode: int = 0o600
    target: str = ""


@dataclass(slots=True)
class Total:
    """What a tree holds."""

    count: int = 0
    size: int = 0
    folders: list[str] = field(default_factory=list)


def stage(source: str, local: str, way: Way) -> None:
    """Make ``local`` a whole copy of ``source``. Raises StageError, StoppedError, OSError."""
    status = os.stat(source)
    if stat.S_ISREG(status.st_mode):
        _file(source, local, way)
    elif stat.S_ISDIR(status.st_mode):
        _tree(source, local, way)
    else:
        raise StageError("it is neither a file nor a folder")


def same(path: str, size: int, mtime_ns: int) -> bool:
    """Whether a plain file of that size and time is there."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (size, mtime_ns)


def publish(local: str) -> None:
    """Give a whole copy its name, when it is on disk."""
    parent, _, name = local.rpartition("/")
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # A later start believes size and time, so the bytes must be there, too.
        if _libc.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), parent)
        finishing.put_in_place(fd, layout.partial_name(name), name)
    finally:
        os.close(fd)


def partial(local: str) -> str:
    """Name of a copy until it is whole."""
    parent, _, name = local.rpartition("/")
    return f"{parent}/{layout.partial_name(name)}"


def _file(source: str, local: str, way: Way) -> None:
    status = os.stat(source)
    if same(local, status.st_size, status.st_mtime_ns):
        way.progress(status.st_size)
        return
    way.fits(status.st_size)
    _copy(source, partial(local), status.st_mode, way)
    publish(local)


def _tree(source: str, local: str, way: Way) -> None:
    total = Total()
    missing = 0
    for found in _walk(source, way, total):
        if not found.target:
            total.count += 1
            total.size += found.size
            if not same(f"{local}/{found.path}", found.size, found.mtime_ns):
                missing += found.size + 1
    if not missing and _count(local) == total.count:
        way.progress(total.size)
        return
    way.fits(max(0, missing))
    new = partial(local)
    os.makedirs(new, 0o700, exist_ok=True)
    for folder in total.folders:
        os.makedirs(f"{new}/{folder}", 0o700, exist_ok=True)
    _copy_all(source, local, new, way)
    publish(local)


def _count(local: str) -> int:
    if not os.path.isdir(local):
        return -1
    return sum(len(names) for _, _, names in os.walk(local))


def _copy_all(source: str, old: str, new: str, way: Way) -> None:
    room = threading.BoundedSemaphore(_QUEUED)
    errors: list[BaseException] = []

    def one(found: Found) -> None:
        try:
            if not errors:
                _take(source, old, new, found, way)
        except BaseException as error:
            errors.append(error)
        finally:
            room.release()

    with ThreadPoolExecutor(_AT_ONCE, "crater-stage") as pool:
        for found in _walk(source, way, Total()):
            if errors:
                break
            room.acquire()
            pool.submit(one, found)
    if errors:
        raise errors[0]


def _take(source: str, old: str, new: str, found: Found, way: Way) -> None:
    way.check()
    to = f"{new}/{found.path}"
    if found.target:
        if not os.path.lexists(to):
            os.symlink(found.target, to)
        return
    if same(to, found.size, found.mtime_ns):
        way.progress(found.size)
        return
    if same(f"{old}/{found.path}", found.size, found.mtime_ns):
        try:
            os.link(f"{old}/{found.path}", to)
        except OSError:
            pass  # too many names, or half a file is there: copied like any other
        else:
            way.progress(found.size)
            return
    _copy(f"{source}/{found.path}", to, found.mode, way)


def _walk(source: str, way: Way, total: Total, below: str = "") -> Iterator[Found]:
    """Files of a tree, and links to folders; ``total`` collects its folders."""
    waiting = [below]
    while waiting:
        inner = waiting.pop()
        way.check()
        with os.scandir(f"{source}/{inner}" if inner else source) as entries:
            for entry in entries:
                path = f"{inner}/{entry.name}" if inner else entry.name
                if entry.is_dir(follow_symlinks=False):
                    total.folders.append(path)
                    waiting.append(path)
                    continue
                found = _one(entry, path)
                if found is not None:
                    yield found


def _one(entry: os.DirEntry[str], path: str) -> Found | None:
    try:
        status = entry.stat()
    except FileNotFoundError:  # a link to nothing, or just deleted
        return None
    if stat.S_ISDIR(status.st_mode):
        return Found(path, target=os.path.realpath(entry.path))
    if not stat.S_ISREG(status.st_mode):
        return None
    return Found(path, status.st_size, status.st_mtime_ns, status.st_mode)


def _copy(source: str, to: str, mode: int, way: Way) -> None:
    """Copy one file with its time, which it gets last: until then it is not taken for the same."""
    how = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    from_fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        before = os.fstat(from_fd)
        if not stat.S_ISREG(before.st_mode):
            raise StageError(f"{source} is no plain file any more")
        to_fd = os.open(to, how, 0o600 | (mode & 0o100))
        try:
            os.ftruncate(to_fd, 0)
            done = _send(from_fd, to_fd, way)
            after = os.fstat(from_fd)
            if (done, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise StageError(f"{source} changed while it was copied")
            os.utime(to_fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        finally:
            os.close(to_fd)
    finally:
        os.close(from_fd)


def _send(from_fd: int, to_fd: int, way: Way) -> int:
    done = 0
    while True:
        way.check()
        count = os.sendfile(to_fd, from_fd, done, _PIECE_BYTES)
        if not count:
            return done
        way.limiter.take(count)
        way.progress(count)
        done += count
