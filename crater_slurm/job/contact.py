"""Opening a connection to the job's checkpoint worker, and asking it one question."""

from __future__ import annotations

import os
import socket
import struct
import time

from crater_slurm.job import wire
from crater_slurm.job.saving import tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

OPEN_SECONDS = 5.0
#: struct timeval: a worker that has stopped reading counts as lost after 10 s.
_SEND_TIMEOUT = struct.pack("ll", 10, 0)


def connect(
    path: str, hello: dict[str, Any], fds: tuple[int, ...] = ()
) -> tuple[wire.Channel, dict[str, Any], list[int]]:
    """Open a connection: the channel, the worker's ``lane`` answer and the files beside it.

    Raises OSError (also TimeoutError) or wire.WireError.
    """
    channel = wire.Channel.connect(path, OPEN_SECONDS)
    try:
        channel.socket.settimeout(OPEN_SECONDS)
        channel.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        channel.send({"op": "open", "version": wire.VERSION, **hello}, fds)
        while True:
            answer, beside = channel.receive()
            if answer["op"] == "lane":
                channel.socket.settimeout(None)
                return channel, answer, beside
            for fd in beside:
                os.close(fd)
            if answer["op"] in ("error", "failed"):
                raise wire.WireError(f"use the ring: {answer.get('error')!s:.200}")
            if answer["op"] == "note":
                tell(str(answer.get("text", "")))
    except BaseException:
        channel.close()
        raise


def ask(
    path: str, hello: dict[str, Any], message: dict[str, Any], answer: str, seconds: float
) -> dict[str, Any]:
    """One question on a connection of its own; raises OSError or wire.WireError."""
    channel, _, fds = connect(path, {**hello, "bytes": 0})
    try:
        for fd in fds:
            os.close(fd)
        channel.send(message)
        end = time.monotonic() + seconds
        while True:
            channel.socket.settimeout(max(0.01, end - time.monotonic()))
            reply, fds = channel.receive()
            for fd in fds:
                os.close(fd)
            if reply["op"] == answer:
                return reply
            if reply["op"] == "error":
                raise wire.WireError(str(reply.get("error", ""))[:300])
            if reply["op"] == "note":
                tell(str(reply.get("text", "")))
    finally:
        channel.close()
