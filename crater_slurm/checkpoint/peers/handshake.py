"""The first words of a connection: a ticket shown, and both ends prove that they hold its secret.

    server  hello     nonce
    client  ticket    ticket (its open half), to (the node it wants), nonce, proof
    server  welcome   proof                 or: refused, error

The proofs bind both nonces and the wanted node, so that nothing can be replayed or passed on to
another node. The secret itself never travels. Data is not encrypted: the network between nodes is
trusted with it as it is with NFS.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence

from crater_slurm.checkpoint.peers.frames import TransportError, text
from crater_slurm.checkpoint.peers.tcp import TcpConnection
from crater_slurm.checkpoint.peers.ticket import (
    EndedError,
    Ticket,
    TicketError,
    check,
    prove,
    split,
)

VERSION = 1


class RefusedError(TransportError):
    """The other node does not want us; asking again at once changes nothing."""


def offer(connection: TcpConnection, ticket: str, node: str, seconds: float) -> None:
    """The client's part. Raises RefusedError, or TransportError."""
    try:
        body, secret = split(ticket)
    except TicketError as error:
        raise RefusedError(f"use the ticket: {error}") from error
    hello, _ = connection.receive(0, seconds)
    if hello["op"] != "hello" or hello.get("version") != VERSION:
        raise TransportError(f"talk to {node}: it has another version of crater-slurm")
    theirs, ours = text(hello, "nonce", 64), secrets.token_hex(16)
    proof = prove(secret, "client", node, theirs, ours)
    connection.send({"op": "ticket", "ticket": body, "to": node, "nonce": ours, "proof": proof})
    answer, _ = connection.receive(0, seconds)
    if answer["op"] != "welcome":
        raise RefusedError(f"go on: {node} says: {str(answer.get('error'))[:500]}")
    expected = prove(secret, "server", node, theirs, ours)
    if not hmac.compare_digest(expected, text(answer, "proof", 128)):
        raise RefusedError(f"trust {node}: it can't prove that it is of this cluster")


class Visitor:
    """The server's part, in two steps: who is it (`meet`), then `welcome` or `refuse`."""

    def __init__(self, connection: TcpConnection) -> None:
        self._connection = connection
        self._words: tuple[str, str, str] = ("", "", "")
        self._secret = b""

    def meet(self, keys: Sequence[bytes], now: float, seconds: float) -> tuple[Ticket, str]:
        """The visitor's ticket, and the node it believes this to be. Raises TransportError,
        TicketError. Nothing is said of the reason to who has no genuine ticket."""
        nonce = secrets.token_hex(16)
        self._connection.send({"op": "hello", "version": VERSION, "nonce": nonce})
        shown, _ = self._connection.receive(0, seconds)
        if shown["op"] != "ticket":
            raise TransportError(f"begin with {shown['op']!r:.40}")
        self._words = (text(shown, "to", 64), nonce, text(shown, "nonce", 64))
        ticket, self._secret = check(
            text(shown, "ticket"),
            text(shown, "proof", 128),
            ("client", *self._words),
            keys,
            now,
        )
        return ticket, self._words[0]

    def welcome(self) -> None:
        proof = prove(self._secret, "server", *self._words)
        self._connection.send({"op": "welcome", "proof": proof})

    def refuse(self, error: TicketError) -> None:
        """Say no, with the reason only for who has shown a genuine ticket."""
        said = str(error) if self._secret or isinstance(error, EndedError) else "no"
        self._connection.send({"op": "refused", "error": said[:1000]})
