"""The Unix socket that slurmctld's Lua asks: one frame in, one frame out, one thread a caller.

Only SlurmUser and root are heard. A caller that hangs, sends garbage or goes away costs a thread
for a second and disturbs nobody.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from crater_slurm.errors import CraterError
from crater_slurm.hooks import frame

_log = logging.getLogger("crater.scheduler.socket")
_TIMEOUT_SECONDS = 1.0
_BACKLOG = 128
_PEERCRED = struct.Struct("3i")

Pairs = list[tuple[str, str]]


class FilterSocket:
    """Listens at ``path`` and answers with ``handle``; users are names that may ask."""

    def __init__(self, path: Path, users: Iterable[str], handle: Callable[[Pairs], Pairs]) -> None:
        self._path = path
        self._uids = {os.geteuid()} | set(_uids(users))
        self._handle = handle
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._accept, name="filter", daemon=True)
        self.answered = 0
        self.failed = 0

    def start(self) -> None:
        """Bind and listen. Raises CraterError when another scheduler already answers there."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if _answers(self._path):
            raise CraterError(f"another crater-scheduler already listens at {self._path}")
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        server.bind(str(fresh))
        # Everybody may connect, peer credentials decide: SlurmUser's groups are not ours to know.
        fresh.chmod(0o666)
        server.listen(_BACKLOG)
        fresh.rename(self._path)  # at no time is there a socket that nobody listens at
        self._socket = server
        self._thread.start()

    def stop(self) -> None:
        if self._socket:
            self._socket.close()
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _accept(self) -> None:
        assert self._socket
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed by stop()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_TIMEOUT_SECONDS)
            try:
                uid = _peer_uid(connection)
                if uid not in self._uids:
                    _log.warning("uid %d may not ask the filter (filter.allowed_users)", uid)
                    return
                message = frame.receive(connection)
                connection.sendall(frame.encode(self._handle(message)))
                self.answered += 1
            except (OSError, frame.FrameError) as error:
                self.failed += 1
                _log.warning("a filter call failed: %s", error)
            except Exception:
                # slurmctld sees a closed connection and lets the job through.
                self.failed += 1
                _log.exception("a decision failed; the job goes through unchanged")


def _uids(users: Iterable[str]) -> Iterable[int]:
    for name in users:
        try:
            yield pwd.getpwnam(name).pw_uid
        except KeyError:
            _log.info("filter.allowed_users names %s, whom this machine does not know", name)


def _peer_uid(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    return int(_PEERCRED.unpack(data)[1])


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
