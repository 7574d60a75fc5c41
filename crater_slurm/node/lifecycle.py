"""A daemon's manners: run once, detach when told to, say when it is ready, end on SIGTERM."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from crater_slurm.errors import UnavailableError


class OnlyOne:
    """A lock file for as long as the process lives; the kernel drops it with the process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise UnavailableError(
                f"crater-io-daemon runs already, as process {holder} ({path}); stop it first"
            ) from error

    def write_pid(self) -> None:
        """Leave the process id in the file, for whoever finds the lock taken."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


def detach() -> Callable[[], None]:
    """Go to the background; the caller's process exits 0 once the returned function is called,
    and with 1 if the daemon dies before. Must be called before any thread is started."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os._exit(0 if os.read(reader, 1) else 1)
    os.close(reader)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.set_inheritable(null, False)

    def ready() -> None:
        os.dup2(null, 1)
        os.write(writer, b"1")
        os.close(writer)

    return ready
