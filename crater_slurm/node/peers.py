"""Takes connections of other nodes' workers: checks the ticket, hands the connection on, no more.

A ticket counts here when it is signed with this cluster's plan key, still good, for this node, and
a record says that Slurm ran that very job of that very user on this node. Only a node that the
ticket names as partner may bring parts; others of the job may read, so that a run on new nodes
finds what earlier nodes hold. Data is never read here: that is the worker's, as the user.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from crater_slurm.checkpoint.peers.frames import TransportError
from crater_slurm.checkpoint.peers.handshake import Visitor
from crater_slurm.checkpoint.peers.tcp import Listener, TcpConnection
from crater_slurm.checkpoint.peers.ticket import Ticket, TicketError
from crater_slurm.node.jobs import JobRecord

_log = logging.getLogger("crater.node.peers")

#: A stranger gets so long to show a ticket, and so many may be at it, in all and from one host.
_SECONDS = 5.0
_MOST, _MOST_PER_HOST = 128, 32

#: Hands a connection to the job's worker, which is started where none runs: (record, connection,
#: the other node, whether it may bring parts). Raises OSError.
HandOver = Callable[[JobRecord, socket.socket, str, bool], None]


class PeerServer:
    """Listens at ``host:port``. ``job`` finds a job's record, kept also for a while after it."""

    def __init__(
        self,
        listen: str,
        *,
        keys: Callable[[], tuple[bytes, ...]],
        job: Callable[[str], JobRecord | None],
        hand_over: HandOver,
        clock: Callable[[], float] = time.time,
        seconds: float = _SECONDS,
    ) -> None:
        self._keys, self._job, self._hand_over = keys, job, hand_over
        self._clock, self._seconds = clock, seconds
        self._lock = threading.Lock()
        self._by_host: Counter[str] = Counter()
        self._listener = Listener(listen)
        self.address = self._listener.address
        self._thread = threading.Thread(target=self._accept, name="peers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, host = self._listener.accept()
            except OSError as error:
                if error.errno in (9, 22):
                    return  # stopped
                _log.warning("peers: couldn't accept a connection: %s", error)
                time.sleep(0.05)  # out of descriptors: let some end
                continue
            with self._lock:
                full = self._by_host.total() >= _MOST or self._by_host[host] >= _MOST_PER_HOST
                if not full:
                    self._by_host[host] += 1
            if full:
                connection.close()
                continue
            try:
                threading.Thread(target=self._meet, args=(connection, host), daemon=True).start()
            except RuntimeError as error:
                _log.error("peers: couldn't start a thread: %s", error)
                connection.close()
                self._leave(host)

    def _leave(self, host: str) -> None:
        with self._lock:
            self._by_host[host] -= 1
            if self._by_host[host] <= 0:
                del self._by_host[host]

    def _meet(self, connection: socket.socket, host: str) -> None:
        with contextlib.closing(connection):
            try:
                self._check(TcpConnection(connection, self._seconds), connection)
            except TicketError as error:
                _log.warning("peers: refused a connection from %s: %s", host, error)
            except (TransportError, OSError) as error:
                _log.info("peers: couldn't take a connection from %s: %s", host, error)
            except Exception:
                _log.exception("peers: couldn't take a connection from %s", host)
            finally:
                self._leave(host)

    def _check(self, talk: TcpConnection, connection: socket.socket) -> None:
        visitor = Visitor(talk)
        try:
            ticket, wanted = visitor.meet(self._keys(), self._clock(), self._seconds)
            record = self._job(ticket.job_id)
            _compare(ticket, wanted, record)
        except TicketError as error:
            visitor.refuse(error)
            raise
        assert record is not None
        visitor.welcome()
        # What the other end says next stays in the socket: the worker reads it.
        self._hand_over(record, connection, ticket.node, record.node in ticket.partners)


def _compare(ticket: Ticket, wanted: str, record: JobRecord | None) -> None:
    """Whether a genuine ticket is good for what happened on this node. Raises TicketError."""
    if record is None:
        raise TicketError(f"Job {ticket.job_id} is not known on this node.")
    if wanted != record.node:
        raise TicketError(f"This node is {record.node}, not {wanted!r:.80}.")
    same = (ticket.job_id, ticket.uid, ticket.cluster)
    if same != (record.job_id, record.uid, record.cluster):
        raise TicketError(f"Job {ticket.job_id} on this node is another user's or cluster's.")
    if ticket.node == record.node:
        raise TicketError("The ticket is this node's own.")
