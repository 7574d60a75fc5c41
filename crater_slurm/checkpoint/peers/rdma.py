"""RDMA between two workers: reliable queue pairs, one-sided writes, credits, no busy loop.

The TCP connection that checked the ticket stays: headers, credits and small data go there. A piece
of data is copied into a registered slot here and written by the adapter into a registered slot of
the other end (RDMA WRITE with immediate: its completion there says that the bytes are in memory).
A slot is free again when its reader says so.
"""

from __future__ import annotations

import collections
import os
import select
from collections.abc import Callable, Sequence

from crater_slurm.checkpoint.peers.frames import Header, TransportError, whole
from crater_slurm.checkpoint.peers.tcp import TcpConnection
from crater_slurm.checkpoint.peers.verbs import Completions, Endpoint, RdmaError

#: Data shorter than this is not worth a slot.
_SMALL = 4096
_MOST_SLOTS = 64
_MOST_SLOT_BYTES = 64 << 20


def offer(
    connection: TcpConnection, ours: Endpoint, seconds: float
) -> TcpConnection | RdmaConnection:
    """The client's part of arranging RDMA; a plain connection when the other end has none."""
    try:
        connection.send({"op": "transport", "want": "rdma", **ours.card()})
        answer, _ = connection.receive(0, seconds)
        if answer.get("use") == "rdma":
            return _join(connection, ours, answer)
        connection.reason = f"the other node: {str(answer.get('reason'))[:500]}"
    except BaseException:
        ours.close()
        connection.close()
        raise
    ours.close()
    return connection


def take(connection: TcpConnection, ours: Endpoint, card: Header) -> RdmaConnection:
    """The server's part. Raises RdmaError while TCP can still be used instead."""
    try:
        joined = _join(connection, ours, card)
    except TransportError as error:
        ours.close()
        raise RdmaError(f"RDMA could not be arranged: couldn't {error}.") from error
    try:
        connection.send({"op": "transport", "use": "rdma", **ours.card()})
    except BaseException:
        ours.close()
        raise
    return joined


def _join(connection: TcpConnection, ours: Endpoint, card: Header) -> RdmaConnection:
    try:
        ours.join(card)
    except ours.verbs.errors as error:
        raise TransportError(f"join the RDMA queue pair: {error}") from error
    return RdmaConnection(connection, ours, card)


class RdmaConnection:
    """One end of a connection whose data goes by RDMA; see transport.Connection."""

    name = "rdma"
    reason = ""

    def __init__(self, control: TcpConnection, ours: Endpoint, card: Header) -> None:
        self._control = control
        self._ours = ours
        self._address = whole(card, "address", (1 << 64) - 1)
        self._rkey = whole(card, "rkey", (1 << 32) - 1)
        self._their_slots = whole(card, "slots", _MOST_SLOTS, 1)
        self._their_bytes = whole(card, "slot_bytes", _MOST_SLOT_BYTES, _SMALL)
        #: As many pieces are under way as the smaller of both ends has slots.
        self._credits = min(self._their_slots, ours.carrier.slots)
        self._written = self._completed = self._read = self._landed = 0
        self._held = False
        self._inbox: collections.deque[tuple[Header, bytes]] = collections.deque()

    def fileno(self) -> int:
        return self._control.fileno()

    def send(self, header: Header, buffers: Sequence[memoryview] = ()) -> None:
        """Send a header and what lies in the buffers."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        length = sum(map(len, views))
        if not self._fits(length):
            self._control.send(header, views)
            return

        def fill(slot: memoryview) -> None:
            at = 0
            for view in views:
                slot[at : at + len(view)] = view
                at += len(view)

        self._write(header, length, fill)

    def send_file(self, header: Header, fd: int, at: int, length: int) -> None:
        """Send a header and a piece of a file, which must be that long."""
        if not self._fits(length):
            self._control.send_file(header, fd, at, length)
            return

        def fill(slot: memoryview) -> None:
            got = 0
            while got < length:
                read = os.preadv(fd, [slot[got:length]], at + got)
                if not read:
                    raise TransportError(f"send a file beyond its end at byte {at + got}")
                got += read

        self._write(header, length, fill)

    def receive(self, most: int = 0, idle: float | None = None) -> tuple[Header, memoryview]:
        """The next header and its data, good until the next ``receive``."""
        self._give_back()
        if self._inbox:
            header, kept = self._inbox.popleft()
            data = memoryview(kept)
        else:
            while True:
                header, data = self._control.receive(most, idle)
                if header["op"] != "credit":
                    break
                self._credits += 1
        if "rdma" not in header:
            if len(data) > most:
                raise TransportError(f"take {len(data)} bytes of data, {most} at most")
            return header, data
        return header, self._landing(whole(header, "rdma", min(most, self._ours.incoming.bytes)))

    def abort(self) -> None:
        """End it from another thread."""
        self._control.abort()

    def close(self) -> None:
        self._control.close()
        self._ours.close()

    def _fits(self, length: int) -> bool:
        return _SMALL <= length <= min(self._their_bytes, self._ours.outgoing.bytes)

    def _write(self, header: Header, length: int, fill: Callable[[memoryview], None]) -> None:
        end = self._control.deadline
        while not self._credits:
            self._collect(end)
        while self._written - self._completed >= self._ours.carrier.slots:
            self._wait(self._ours.sent, end)
            self._completed += self._ours.sent.take()
        self._completed += self._ours.sent.take()
        slot = self._written % self._ours.carrier.slots
        fill(self._ours.outgoing.view(slot))
        target = self._written % self._their_slots * self._their_bytes
        try:
            self._ours.write(slot, length, self._address + target, self._rkey)
        except self._ours.verbs.errors as error:
            raise TransportError(f"write by RDMA: {error}") from error
        self._written += 1
        self._credits -= 1
        self._control.send({**header, "rdma": length})

    def _collect(self, end: float) -> None:
        """Read one message while waiting for a credit; what is no credit waits for `receive`."""
        header, data = self._control.receive(_SMALL, end - self._control.now())
        if header["op"] == "credit":
            self._credits += 1
        elif len(self._inbox) < _MOST_SLOTS:
            self._inbox.append((header, bytes(data)))
        else:
            raise TransportError("go on: the other end talks and takes nothing")

    def _landing(self, length: int) -> memoryview:
        """The slot of the next piece, once the adapter has said that it is there."""
        end = self._control.deadline
        self._landed += self._ours.arrived.take()
        while self._landed <= self._read:
            self._wait(self._ours.arrived, end)
            self._landed += self._ours.arrived.take()
        slot = self._read % self._ours.carrier.slots
        self._read += 1
        self._held = True
        return self._ours.incoming.view(slot)[:length]

    def _give_back(self) -> None:
        if self._held:
            self._held = False
            try:
                self._ours.expect()
            except self._ours.verbs.errors as error:
                raise TransportError(f"wait for RDMA: {error}") from error
            self._control.send({"op": "credit"})

    def _wait(self, completions: Completions, end: float) -> None:
        """Sleep until something completed; the end of the TCP connection ends this too."""
        poll = select.poll()
        poll.register(completions.fd, select.POLLIN)
        if self._control.fileno() < 0:
            raise TransportError("go on: the connection is closed")
        poll.register(self._control.fileno(), select.POLLRDHUP)
        left = end - self._control.now()
        events = dict(poll.poll(max(0.0, left) * 1000))
        if completions.fd in events:
            completions.rearm()
        elif events:
            raise TransportError("go on: the other end closed the connection")
        else:
            raise TransportError("go on: the other end was too slow")
