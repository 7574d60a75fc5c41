"""Single files in an open folder of a destination: written, fsynced, compared; no link followed."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable

from crater_slurm.checkpoint import checksum
from crater_slurm.checkpoint.remote.store import RemoteError, pieces
from crater_slurm.job import layout

FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FILE_MODE = 0o640
_MOST_TEXT = 64 << 20


def open_own(name: str, folder: int) -> int:
    """A file of our own to write, made or gone on with; raises OSError or RemoteError."""
    fd = os.open(name, os.O_RDWR | os.O_CREAT | FLAGS, _FILE_MODE, dir_fd=folder)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
        os.close(fd)
        raise RemoteError(
            f"{name} is there already and is no plain file of uid {os.geteuid()} alone "
            f"(uid {status.st_uid}, {status.st_nlink} names); remove it.",
            lasting=True,
        )
    return fd


def put_partial(name: str, text: str, folder: int, temporary: str = "") -> None:
    """Write a text under a hidden name, and fsync it."""
    partial = temporary or layout.partial_name(name)
    fd = open_own(partial, folder)
    try:
        os.ftruncate(fd, 0)
        write(fd, text.encode(), 0)
        sync(fd, partial, folder)
    finally:
        os.close(fd)


def own_partial(name: str) -> str:
    """A hidden name for a file that other processes, here and on other nodes, may write too."""
    return f".{name}.{_host()}.{os.getpid()}.partial"


def own_partials(name: str, folder: int, *, dead: bool = False) -> list[str]:
    """Such names that are there; with ``dead``, of processes of this node that are no more."""
    pattern = re.compile(rf"\.{re.escape(name)}\.(.+)\.([0-9]{{1,10}})\.partial")
    found = [match for match in map(pattern.fullmatch, os.listdir(folder)) if match]
    if dead:
        found = [m for m in found if m[1] == _host() and not os.path.exists(f"/proc/{m[2]}")]
    return [match[0] for match in found]


def remove(names: Iterable[str], folder: int) -> None:
    """Remove files of which others may remove some as well. Raises OSError."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def _host() -> str:
    return os.uname().nodename[:64]


def get_text(name: str, folder: int) -> str:
    """A file's text; raises OSError."""
    fd = os.open(name, os.O_RDONLY | FLAGS, dir_fd=folder)
    with os.fdopen(fd, "rb") as file:
        return file.read(_MOST_TEXT).decode("utf-8", "replace")


def sync(fd: int, name: str, folder: int) -> None:
    """fsync a file; one that fails is removed. Raises OSError."""
    try:
        os.fsync(fd)
    except OSError:
        # The kernel may have dropped pages that it still shows: none of the file can be trusted.
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise


def agreed(fd: int, entry: layout.FileEntry) -> int:
    """How many bytes from the file's beginning are what the manifest says, in whole chunks."""
    size = os.fstat(fd).st_size
    buffer = memoryview(bytearray(min(layout.CHUNK_BYTES, max(1, min(size, entry.size)))))
    for start, count in pieces(entry.size, layout.CHUNK_BYTES):
        if start + count > size or read(fd, start, buffer[:count]) != count:
            return start
        if checksum.wrong_chunk(entry, start, buffer[:count]) is not None:
            return start
    return entry.size


def read(fd: int, start: int, into: memoryview) -> int:
    """Fill a buffer as far as the file goes; how many bytes."""
    got = 0
    while got < len(into):
        count = os.preadv(fd, [into[got:]], start + got)
        if not count:
            break
        got += count
    return got


def write(fd: int, data: bytes | bytearray, start: int) -> None:
    """Write all of it at an offset; raises OSError."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], start + done)
