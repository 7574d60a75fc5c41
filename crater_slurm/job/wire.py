"""Messages of the ring: JSON packets, with file descriptors beside them, on a Unix socket.

SOCK_SEQPACKET keeps each message whole. Data never travels here: it lies in the ring, and messages
say where. Both ends may be anybody, so every message is bounded and checked by its reader.
docs/checkpoint-format.md describes the messages.
"""

from __future__ import annotations

import array
import json
import os
import socket

VERSION = 1
MAX_BYTES = 60000
MAX_FDS = 4


class WireError(Exception):
    """The other end sent something that is no message, or went away; a clause for "couldn't"."""


class Channel:
    """One end of a connection. Not thread-safe for two senders or two receivers at once."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    @classmethod
    def connect(cls, path: str, seconds: float = 5.0) -> Channel:
        """Connect to a listening socket; raises OSError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(seconds)
            connection.connect(path)
            connection.settimeout(None)
        except OSError:
            connection.close()
            raise
        return cls(connection)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, object], fds: tuple[int, ...] | list[int] = ()) -> None:
        """Send a message with open files; raises WireError when it is too long, or OSError."""
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > MAX_BYTES:
            raise WireError(f"send {len(data)} bytes in one message, {MAX_BYTES} at most")
        beside = []
        if fds:
            beside.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds)))
        self.socket.sendmsg([data], beside, socket.MSG_NOSIGNAL)

    def receive(self, wait: bool = True) -> tuple[dict[str, object], list[int]]:
        """The next message and its open files, which are now the caller's to close.

        Raises WireError at the end of the connection and for what is no message, BlockingIOError
        when nothing is there and ``wait`` is false, TimeoutError by the socket's own timeout.
        """
        room = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
        flags = 0 if wait else socket.MSG_DONTWAIT
        data, beside, how, _ = self.socket.recvmsg(
            MAX_BYTES + 1, room, flags | socket.MSG_CMSG_CLOEXEC
        )
        fds = _descriptors(beside)
        try:
            if not data:
                raise WireError("go on: the other end closed the connection")
            if how & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise WireError("take a message that is too long")
            message = json.loads(data)
            if not isinstance(message, dict) or not isinstance(message.get("op"), str):
                raise WireError("understand a message without an operation")
        except (ValueError, RecursionError, WireError) as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, WireError):
                raise
            raise WireError("read a message that is no JSON") from error
        return message, fds

    def close(self) -> None:
        self.socket.close()


def _descriptors(beside: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def whole(message: dict[str, object], key: str, most: int, least: int = 0) -> int:
    """A whole number of a message; raises WireError unless it is one from least to most."""
    value = message.get(key)
    if type(value) is not int or not least <= value <= most:
        raise WireError(f"use {key}={value!r:.40}: a whole number from {least} to {most} belongs")
    return value


def text(message: dict[str, object], key: str, default: str | None = None) -> str:
    """A text of a message; raises WireError when it is none, or too long."""
    value = message.get(key, default)
    if not isinstance(value, str) or len(value) > 4096:
        raise WireError(f"use {key}={value!r:.40}: a text belongs there")
    return value
