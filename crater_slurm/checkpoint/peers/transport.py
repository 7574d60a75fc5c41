"""One way to reach another node's worker: TCP for all, RDMA where both ends have it.

A connection always begins as TCP: the ticket is checked there, and RDMA, when both ends have it,
is arranged over it. ``connect`` and ``accept`` never fail for want of RDMA: they fall back to TCP,
and ``Connection.reason`` says why.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # by host names; later on this user may not read the code
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from crater_slurm.checkpoint.peers import handshake, rdma, verbs
from crater_slurm.checkpoint.peers.frames import Header, TransportError, text
from crater_slurm.checkpoint.peers.tcp import TcpConnection

#: How long one frame may take from its first byte to its last; a piece of 8 MiB, mostly.
FRAME_SECONDS = 60.0
#: How long the other end may take to register its memory.
_ARRANGE_SECONDS = 60.0


class Connection(Protocol):
    """One end. One thread sends and receives; another may only ``abort`` it."""

    name: str
    reason: str

    def send(self, header: Header, buffers: Sequence[memoryview] = ()) -> None:
        """Send a header and what lies in the buffers. Raises TransportError."""

    def send_file(self, header: Header, fd: int, at: int, length: int) -> None:
        """Send a header and a piece of an open file."""

    def receive(self, most: int = 0, idle: float | None = None) -> tuple[Header, memoryview]:
        """The next header and its data, at most ``most`` bytes, good until the next ``receive``.

        ``idle``: seconds to wait for its first byte, None for as long as the connection stands.
        """

    def abort(self) -> None:
        """End it from another thread; whoever waits gets a TransportError."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True, slots=True)
class Carrier:
    """What may carry the data: "tcp", or "rdma:DEVICE[:PORT[:GID_INDEX]]" such as rdma:mlx5_0:1:3.

    ``slot_bytes`` and ``slots`` shape the registered memory of one connection.
    """

    kind: str = "tcp"
    device: str = ""
    port: int = 1
    gid_index: int = 0
    slot_bytes: int = 8 << 20
    slots: int = 4

    @classmethod
    def parse(cls, words: str) -> Carrier:
        """Carrier of a Spec's ``transport``. Raises ValueError with a sentence."""
        kind, *rest = words.split(":")
        if kind == "tcp" and not rest:
            return cls()
        if kind != "rdma" or not 1 <= len(rest) <= 3 or not rest[0]:
            raise ValueError(
                f"A transport is tcp or rdma:DEVICE[:PORT[:GID_INDEX]], not {words!r:.80}."
            )
        if not all(word.isdecimal() for word in rest[1:]):
            raise ValueError(f"Port and GID index are numbers, not {words!r:.80}.")
        return cls("rdma", rest[0], *map(int, rest[1:]))


def connect(
    address: str, ticket: str, node: str, carrier: Carrier, seconds: float = 10.0
) -> Connection:
    """Reach the worker of a node at ``host:port``; raises TransportError, also when refused."""
    ours, reason = _endpoint(carrier)  # before anybody waits for it: registering takes a while
    try:
        connection = _reach(address, ticket, node, seconds)
        if ours is None:
            connection.reason = reason
            connection.send({"op": "transport", "want": "tcp"})
            connection.receive(0, seconds)
            return connection
    except BaseException:
        if ours is not None:
            ours.close()
        raise
    return rdma.offer(connection, ours, _ARRANGE_SECONDS)


def _endpoint(carrier: Carrier) -> tuple[verbs.Endpoint | None, str]:
    """This node's end for RDMA; or none, and why."""
    if carrier.kind != "rdma":
        return None, ""
    try:
        return verbs.Endpoint(carrier), ""
    except verbs.RdmaError as error:
        return None, str(error)


def _reach(address: str, ticket: str, node: str, seconds: float) -> TcpConnection:
    host, _, port = address.rpartition(":")
    try:
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
    except (OSError, ValueError, OverflowError) as error:
        raise TransportError(f"reach {node} at {address}: {error}") from error
    connection = TcpConnection(plain, FRAME_SECONDS)
    try:
        handshake.offer(connection, ticket, node, seconds)
    except BaseException:
        connection.close()
        raise
    return connection


def accept(plain: socket.socket, carrier: Carrier, seconds: float = 10.0) -> Connection:
    """The worker's end of a connection whose ticket the daemon has checked."""
    connection = TcpConnection(plain, FRAME_SECONDS)
    try:
        wish, _ = connection.receive(0, max(seconds, _ARRANGE_SECONDS))
        if wish["op"] != "transport":
            raise TransportError(f"begin with {wish['op']!r:.40}")
        if wish.get("want") != "rdma":
            connection.send({"op": "transport", "use": "tcp"})
            return connection
        return _answer(connection, carrier, wish)
    except BaseException:
        connection.close()
        raise


def _answer(connection: TcpConnection, carrier: Carrier, wish: Header) -> Connection:
    try:
        if carrier.kind != "rdma":
            raise verbs.RdmaError("RDMA is off on this node (node.checkpoints.peer_transport).")
        return rdma.take(connection, verbs.Endpoint(carrier), wish)
    except verbs.RdmaError as error:
        connection.reason = str(error)
        connection.send({"op": "transport", "use": "tcp", "reason": str(error)[:1000]})
        return connection


def refusal(answer: Header) -> str:
    """The other end's sentence, cut to what fits a log line."""
    return text(answer, "error")[:500] if isinstance(answer.get("error"), str) else "no reason"
