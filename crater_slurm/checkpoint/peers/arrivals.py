"""Parts on their way in, by whom: one at a time for each node, the later one takes over.

A node that connects anew while its old connection still stands (it may be dead, which takes a
while to show) ends the old one; several connections with one session bring one part together.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from crater_slurm.checkpoint.peers.frames import TransportError
from crater_slurm.checkpoint.peers.receive import Incoming
from crater_slurm.checkpoint.peers.store import PeerStore, key_of
from crater_slurm.checkpoint.peers.transport import Connection
from crater_slurm.job.layout import Manifest

#: How long a part that takes over waits for the old connection's last write.
_TAKE_OVER_SECONDS = 20.0


class NoRoomError(Exception):
    """The part can't come in; a clause for the sender."""


class _Active:
    def __init__(self, session: str, incoming: Incoming) -> None:
        self.session = session
        self.key = key_of(incoming.manifest)
        self.incoming = incoming
        self.connections: set[Connection] = set()


class Arrivals:
    """All of one worker's."""

    def __init__(self, store: PeerStore) -> None:
        self._store = store
        self._lock = threading.Condition()
        self._active: dict[str, _Active] = {}

    @contextlib.contextmanager
    def join(
        self, node: str, session: str, manifest: Manifest, connection: Connection
    ) -> Iterator[Incoming]:
        """The part that this connection helps to bring, until the block is left.

        Raises NoRoomError, TransportError when another connection does not end, and OSError.
        """
        with self._lock:
            active = self._enter(node, session, manifest)
            active.connections.add(connection)
        try:
            yield active.incoming
        finally:
            with self._lock:
                active.connections.discard(connection)
                if not active.connections:
                    active.incoming.close()
                    if self._active.get(node) is active:
                        del self._active[node]
                self._lock.notify_all()

    def _enter(self, node: str, session: str, manifest: Manifest) -> _Active:
        active = self._active.get(node)
        if active and active.session == session and active.key == key_of(manifest):
            return active
        if active:
            for connection in active.connections:
                connection.abort()
            gone = self._lock.wait_for(lambda: node not in self._active, _TAKE_OVER_SECONDS)
            if not gone:
                raise TransportError(f"take a part of {node}: its last one is still being written")
        if problem := self._store.room_for(node, manifest):
            raise NoRoomError(problem)
        incoming = Incoming(self._store.place(node), manifest)
        self._store.drop_partials(node, incoming.partial_name)
        fresh = self._active[node] = _Active(session, incoming)
        return fresh
