"""The daemon's end: its connection, and whom the worker takes for the daemon."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

from crater_slurm.checkpoint.connection import Connection

_STARTED_BY = os.getuid()


class Control(Connection):
    """The daemon's connection."""

    def __init__(self, connection: socket.socket, take: Callable[..., None]) -> None:
        super().__init__(connection)
        self._take_message = take

    def take(self, message: dict[str, object], fds: list[int]) -> None:
        self._take_message(message, fds)

    def mistake(self, error: str) -> None:
        """A daemon of another version may say what this one doesn't know, as often as it likes."""
        self.send({"op": "log", "level": "warning", "text": error[:1000]})


def trusted(connection: socket.socket) -> bool:
    """Whether root, or whoever started this process, is at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", raw)[1] in (0, _STARTED_BY)
