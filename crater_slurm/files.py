"""Small files: never seen half written, and read without a fuss when they vanish."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

_serial = itertools.count()


def write_atomically(path: Path, text: str, mode: int = 0o600, *, durable: bool = True) -> None:
    """Replace a file in one step: temporary file beside it, fsync, rename.

    Without ``durable`` it is not waited for the disk; a power cut may then cost the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_serial)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


# Any word may be asked about below: one that is too long for a name, or in a folder that is closed
# to us, is none. The methods of Path raise OSError for those.


def exists(path: Path | str) -> bool:
    """Whether there is such a file, folder, pipe or device for us."""
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: Path | str) -> bool:
    """Whether there is such a file for us."""
    return os.path.isfile(path)  # noqa: PTH113


def is_dir(path: Path | str) -> bool:
    """Whether there is such a folder for us."""
    return os.path.isdir(path)  # noqa: PTH112


def read_text(path: Path | str) -> str | None:
    """A kernel file's text without its last newline; None when it can't be read (it may vanish).

    Done with bare system calls: the cgroup tree is hundreds of such files, read while a task waits.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = b""
        while chunk := os.read(fd, 65536):
            data += chunk
    except OSError:
        return None
    finally:
        os.close(fd)
    return data.decode("utf-8", "surrogateescape").strip()
