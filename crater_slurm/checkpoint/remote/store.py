"""What every kind of destination can do, and the errors that it raises.

Keys are relative to the destination: ``step-000000120/rank-00000.safetensors``. They are always
computed, never read from a file that a user could have changed. A store has no opinion about which
steps matter; it moves bytes, checks them, and says what is there.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from crater_slurm.checkpoint import checksum
from crater_slurm.job import layout

#: Object that says which run a step's place belongs to.
CLAIM = layout.CLAIM
_TEXT_BYTES = 64 << 20


class RemoteError(Exception):
    """A destination did not do what it was asked; the message is a whole sentence.

    ``lasting``: trying again soon is no use, somebody has to mend it. ``missing``: what was asked
    for is not there. ``code`` and HTTP ``status`` are the store's own, where it has them.
    """

    def __init__(
        self,
        text: str,
        *,
        lasting: bool = False,
        missing: bool = False,
        code: str = "",
        status: int = 0,
    ) -> None:
        super().__init__(text)
        self.lasting = lasting
        self.missing = missing
        self.code = code
        self.status = status


class SourceError(Exception):
    """The file in the node's cache is not what its manifest says; a whole sentence."""


class StoppedError(Exception):
    """The work was called off; what is done can be gone on with."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One file of a step at the destination; ``time`` is when the store got it."""

    name: str
    size: int
    time: float


@dataclass(frozen=True, slots=True)
class Stat:
    """What a store says of a file: its size, and its CRC-32 where it keeps one."""

    size: int
    crc32: int | None = None


class Limiter(Protocol):
    """Shares a rate among those who move bytes; ``take`` returns when they may be moved."""

    def take(self, count: int) -> None: ...


class Unlimited:
    """No rate."""

    def take(self, count: int) -> None:
        del count


@dataclass(slots=True)
class Transfer:
    """One file's way to a store: called back with bytes moved, and what to go on with later.

    ``resume`` is the store's own note of what it has begun; ``keep`` writes it down.
    """

    resume: dict[str, Any]
    keep: Callable[[], None]
    progress: Callable[[int], None]
    stop: threading.Event
    limiter: Limiter

    def check(self) -> None:
        """Raise StoppedError once the work is called off."""
        if self.stop.is_set():
            raise StoppedError


class Store(Protocol):
    """A destination. Every method may raise RemoteError. Thread-safe."""

    @property
    def where(self) -> str:
        """The destination in words, for messages; holds no secret."""

    def list_steps(self) -> list[str]:
        """Names of the steps' folders, in any state."""

    def list_files(self, step: str) -> list[Listed]:
        """Whole files of a step; none when it is not there."""

    def put_file(
        self, source: Source, key: str, entry: layout.FileEntry, transfer: Transfer
    ) -> None:
        """Bring a file there and check that it arrived. Raises SourceError, StoppedError."""

    def put_text(self, key: str, text: str) -> None:
        """Put a small file, whole or not at all, and check that it arrived."""

    def claim(self, key: str, text: str) -> str:
        """Put a small file unless it is there; what it then says."""

    def get_text(self, key: str) -> str | None:
        """A small file's text; None when it is not there."""

    def get_range(self, key: str, start: int, into: memoryview) -> None:
        """Fill a buffer with a file's bytes from ``start`` on."""

    def head(self, key: str) -> Stat | None:
        """Size and checksum of a file; None when it is not there."""

    def delete(self, step: str, names: list[str]) -> None:
        """Delete files of a step and, where it is a folder that is then empty, the folder."""

    def discard(self, key: str, resume: dict[str, Any]) -> None:
        """Give up a file that was begun."""

    def tidy(self, own: set[str], active: set[str]) -> int:
        """Give up what earlier workers began and nobody goes on with; how many.

        ``own``: keys that only this node writes. ``active``: notes of what is gone on with.
        """

    def close(self) -> None:
        """Let go of connections."""


class Source:
    """A rank's file in the cache, open for reading; no link is followed. Thread-safe."""

    def __init__(self, folder: str, entry: layout.FileEntry) -> None:
        self.entry = entry
        try:
            self._fd = _open_in(folder, entry.name)
        except OSError as error:
            raise SourceError(f"{entry.name} can't be read: {error.strerror}.") from None
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
                raise SourceError(
                    f"{entry.name} has {status.st_size} bytes, its manifest says {entry.size}."
                )
        except SourceError:
            os.close(self._fd)
            raise

    def read(self, start: int, count: int) -> bytearray:
        """Bytes from a chunk's start to a chunk's or the file's end, checked by the manifest."""
        data = bytearray(count)
        with memoryview(data) as view:
            self._fill(start, view)
            wrong = checksum.wrong_chunk(self.entry, start, view)
        if wrong is not None:
            raise SourceError(f"{self.entry.name} is damaged after byte {wrong}.")
        return data

    def _fill(self, start: int, view: memoryview) -> None:
        got = 0
        try:
            while got < len(view):
                count = os.preadv(self._fd, [view[got:]], start + got)
                if not count:
                    raise SourceError(f"{self.entry.name} ends early, at byte {start + got}.")
                got += count
            # Read once: the page cache belongs to the job.
            os.posix_fadvise(self._fd, start, len(view), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise SourceError(f"{self.entry.name} can't be read: {error.strerror}.") from None

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_in(folder: str, name: str) -> int:
    how = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.open(name, how, dir_fd=parent)
    finally:
        os.close(parent)


def read_small(folder: str, name: str, most: int = _TEXT_BYTES) -> str | None:
    """Text of a regular file in a folder; None when it is not there, or is none. No link."""
    try:
        fd = _open_in(folder, name)
    except OSError:
        return None
    with contextlib.closing(os.fdopen(fd, "rb")) as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        try:
            return file.read(most).decode()
        except (OSError, UnicodeDecodeError):
            return None


def pieces(size: int, piece: int) -> Iterator[tuple[int, int]]:
    """(start, bytes) of pieces of a file, in order."""
    for start in range(0, size, piece):
        yield start, min(piece, size - start)


def is_ours(name: str) -> bool:
    """Whether a file of a step is one that crater puts there."""
    return (
        name == CLAIM
        or layout.is_part(name)
        or (name.startswith("rank-") and name.endswith(".safetensors"))
        or (name.startswith(".") and name.endswith(".partial"))
    )
