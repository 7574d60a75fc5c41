"""One benchmark at a time: two would measure each other."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crater_slurm.errors import CraterError


def lock_file() -> Path:
    """Root's lock is the machine's; a user's own keeps that user from running two."""
    if os.geteuid() == 0:
        return Path("/run/crater/bench.lock")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    # In /tmp a foreign file of that name only keeps this user's benchmarks from starting.
    return Path(runtime or "/tmp") / f"crater-bench-{os.geteuid()}.lock"  # noqa: S108


@contextmanager
def lock(file: Path) -> Iterator[int]:
    """The open lock file. A child that inherits it keeps the lock until it has ended too.

    Raises CraterError when another benchmark runs, or the file can't be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        handle = os.open(file, flags, 0o644)
    except OSError as error:
        raise CraterError(f"can't open the lock {file}: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CraterError("another crater-probe bench runs; start this one after it") from error
    else:
        yield handle
    finally:
        os.close(handle)
