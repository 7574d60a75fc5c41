"""All of a worker's dealings with the other nodes of its job, in one object.

The worker tells it what was saved and flushed, hands it the connections that the daemon took, and
asks it for a checkpoint that this node lacks. Every call but ``available``, ``fetch``,
``look_after`` and ``on_flushed`` returns at once; those belong into a thread that may wait.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from crater_slurm.checkpoint.peers import transport
from crater_slurm.checkpoint.peers.fetch import Brought, Fetcher
from crater_slurm.checkpoint.peers.frames import TransportError
from crater_slurm.checkpoint.peers.heir import GRACE_SECONDS, Heir
from crater_slurm.checkpoint.peers.ring import partner_of
from crater_slurm.checkpoint.peers.send import Courier, Sender
from crater_slurm.checkpoint.peers.serve import Log, Service
from crater_slurm.checkpoint.peers.store import PeerStore, key_of
from crater_slurm.checkpoint.peers.ticket import is_node
from crater_slurm.checkpoint.peers.transport import Carrier, Connection
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.files import read_text, write_atomically
from crater_slurm.job.layout import Manifest

_KNOWN = ".peers.json"
_MOST_CONNECTIONS = 64
_ASK_SECONDS = 30.0


class Copies:
    """``is_flushed(name, step, run)``: whether this node's own part is at the destination;
    ``flush(node, folder, manifest)`` begins to bring a lost node's part there."""

    def __init__(
        self,
        spec: Spec,
        *,
        log: Log,
        is_flushed: Callable[[str, int, str], bool],
        flush: Callable[[str, str, Manifest], None],
        on_sent: Callable[[Manifest, int, float], None] = lambda *_: None,
        streams: int = 1,
        clock: Callable[[], float] = time.monotonic,
        grace_seconds: float = GRACE_SECONDS,
        first_wait: float = 1.0,
    ) -> None:
        self._spec, self._log = spec, log
        self._carrier = _carrier(spec.transport, log)
        self._store = PeerStore(spec.folder, spec.quota_bytes)
        self._known = self._remember()
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._serving = 0
        self._heir = Heir(self._store, self._ask_flushed, flush, clock, grace_seconds)
        self._service = Service(
            self._store, is_flushed=is_flushed, others=lambda: self._known, log=log
        )
        self._fetcher = Fetcher(
            spec.node, self._store, self._others, self._reach, self._reach_data, log
        )
        self.partner = partner_of(spec.nodes, spec.node)
        self.carrier = ""
        self._sender: Sender | None = None
        if self.partner in spec.peers and spec.token:
            courier = Courier(self._to_partner, streams)
            self._sender = Sender(self.partner, courier, log, on_sent, first_wait=first_wait)

    @property
    def idle(self) -> bool:
        """Whether no copy is under way, in or out."""
        with self._lock:
            return not self._serving and (self._sender is None or self._sender.idle)

    @property
    def error(self) -> str:
        """Why the last copy was not made; "" when it was."""
        return self._sender.error if self._sender else ""

    def on_saved(self, folder: str, manifest: Manifest) -> None:
        """This node's part has its final name in ``folder``."""
        if self._sender:
            self._sender.add(folder, manifest)

    def on_flushed(self, folder: str, manifest: Manifest) -> None:
        """A part is at the destination: this node's own, which its partner is told, or a copy.
        Waits for the partner."""
        if not self._heir.flushed(folder, manifest) and self._sender:
            self._tell_flushed(manifest)

    def take(self, plain: socket.socket, node: str, may_put: bool) -> None:
        """A connection of another node's worker, whose ticket the daemon has checked."""
        with self._lock:
            full = self._serving >= _MOST_CONNECTIONS
            if not full:
                self._serving += 1
        if full or not is_node(node):
            plain.close()
            return
        threading.Thread(target=self._serve, args=(plain, node, may_put), daemon=True).start()

    def fetch(
        self,
        name: str,
        step: int | None = None,
        ranks: Iterable[int] | None = None,
        run: str | None = None,
    ) -> Brought | None:
        """Have a complete checkpoint here; see Fetcher.bring. May take long."""
        return self._fetcher.bring(name, step, ranks, run)

    def available(self, name: str) -> list[tuple[int, str, float]]:
        """(step, run, time) of what the job's nodes hold together. May take a while."""
        return self._fetcher.available(name)

    @property
    def alone(self) -> bool:
        """Whether there is no other node to ask, of this run or an earlier one."""
        return not self._others() or not self._spec.token

    def make_room(self, over_bytes: int) -> None:
        """Give up copies for this node's own saves, which have no room within the quota."""
        freed = self._store.make_room(over_bytes)
        if freed:
            self._log("warning", f"peers: {freed} bytes of copies went for this node's own saves")

    def look_after(self, ended: bool) -> bool:
        """See to it that copies of lost nodes reach the destination, about once a minute; whether
        any is still to come. While the run goes on only of nodes that are not in the job."""
        if not self._spec.remote.url:
            return False
        present = () if ended else self._spec.nodes
        return self._heir.tick(node for node in self._store.nodes() if node not in present)

    def close(self) -> None:
        """End everything; what is half there is finished by the next worker, or swept."""
        if self._sender:
            self._sender.stop()
        with self._lock:
            for connection in self._connections:
                connection.abort()

    def _remember(self) -> dict[str, str]:
        """Addresses of the job's nodes, of this and its earlier runs here: kept in its folder."""
        path = os.path.join(self._spec.folder, _KNOWN)
        known: dict[str, str] = {}
        try:
            told = json.loads(read_text(path) or "{}")
            known = {n: a for n, a in told.items() if is_node(n) and isinstance(a, str)}
        except (ValueError, AttributeError, RecursionError):
            self._log("warning", f"peers: {path} is damaged and is written anew")
        merged = {**known, **self._spec.peers}
        if merged != known:
            try:
                write_atomically(Path(path), json.dumps(merged), durable=False)
            except OSError as error:
                self._log("warning", f"peers: couldn't keep {path}: {error.strerror}")
        return merged

    def _others(self) -> dict[str, str]:
        return {node: at for node, at in self._known.items() if node != self._spec.node}

    def _reach(self, node: str, address: str) -> Connection:
        """For questions, which are not worth registered memory."""
        return transport.connect(address, self._spec.token, node, Carrier())

    def _reach_data(self, node: str, address: str) -> Connection:
        return transport.connect(address, self._spec.token, node, self._carrier)

    def _to_partner(self) -> Connection:
        connection = self._reach_data(self.partner, self._spec.peers[self.partner])
        if self.carrier != connection.name or connection.reason:
            why = f": {connection.reason}" if connection.reason else ""
            if self.carrier != connection.name:
                self._log("info", f"peers: {self.partner} by {connection.name}{why}")
            self.carrier = connection.name
        return connection

    def _serve(self, plain: socket.socket, node: str, may_put: bool) -> None:
        try:
            connection = transport.accept(plain, self._carrier)
            with self._lock:
                self._connections.add(connection)
            self._service.serve(connection, node, may_put)
            with self._lock:
                self._connections.discard(connection)
        except TransportError as error:
            self._log("debug", f"peers: couldn't {error} ({node})")
        finally:
            with self._lock:
                self._serving -= 1

    def _ask_flushed(self, node: str, manifest: Manifest) -> bool | None:
        address = self._known.get(node)
        if address is None:
            return None
        question = {key: getattr(manifest, key) for key in ("name", "step", "run")}
        try:
            connection = self._reach(node, address)
            try:
                connection.send({"op": "state", **question})
                answer, _ = connection.receive(0, _ASK_SECONDS)
            finally:
                connection.close()
        except TransportError:
            return None
        if answer.get("flushed") is True:
            return True
        # An owner that has lost the part itself (its cache is new) is no better than a silent one.
        return False if answer.get("here") is True else None

    def _tell_flushed(self, manifest: Manifest) -> None:
        """Only saves the partner a question later on, so a failure is no matter."""
        try:
            connection = self._reach(self.partner, self._spec.peers[self.partner])
            try:
                connection.send({"op": "flushed", "key": key_of(manifest)})
                connection.receive(0, _ASK_SECONDS)
            finally:
                connection.close()
        except TransportError as error:
            self._log("debug", f"peers: couldn't {error} ({self.partner})")


def _carrier(words: str, log: Log) -> Carrier:
    try:
        return Carrier.parse(words)
    except ValueError as error:
        log("warning", f"peers: {error} TCP is used.")
        return Carrier()
