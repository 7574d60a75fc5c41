"""A Unix socket that anyone on the node may connect to: one acceptor, bounded threads, who it is.

What a connection says is the subclass's matter. However many connect and whatever they do, each
costs one thread for a limited time, and no user takes the threads of the others.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path

from crater_slurm.node.request import Peer

_log = logging.getLogger("crater.node.server")

TIMEOUT_SECONDS = 2.0
_BACKLOG = 1024
#: Threads at a time, for everyone and for one user; root is only bound by the former. One srun
#: starts as many TaskPrologs at once as the node has cores.
MOST, MOST_PER_USER = 768, 384


class Listener(ABC):
    """Listens at ``path`` and gives each connection to ``_talk`` in a thread of its own."""

    def __init__(
        self,
        path: Path,
        kind: socket.SocketKind = socket.SOCK_STREAM,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self._path = path
        self._timeout = timeout
        self._lock = threading.Lock()
        self._by_uid: collections.Counter[int] = collections.Counter()
        self._socket = socket.socket(socket.AF_UNIX, kind)
        self._inode = 0
        self._thread = threading.Thread(target=self._accept, name="accept", daemon=True)

    def start(self) -> None:
        """Put the socket in place in one step, over whatever a crash left there, and listen."""
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        self._socket.bind(str(temporary))
        temporary.chmod(0o666)
        self._socket.listen(_BACKLOG)
        self._inode = temporary.stat().st_ino
        temporary.rename(self._path)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, and take the socket away unless it is another daemon's by now."""
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        end = time.monotonic() + self._timeout
        while self._by_uid.total() and time.monotonic() < end:
            time.sleep(0.01)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._socket.fileno() < 0 or error.errno in (9, 22):
                    return  # stopped
                _log.warning("server: couldn't accept a connection: %s", error)
                time.sleep(0.05)  # out of descriptors: let some threads end
                continue
            self._start(connection)

    def _start(self, connection: socket.socket) -> None:
        try:
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            peer = Peer(*struct.unpack("3i", raw))
            with self._lock:
                user_full = peer.uid and self._by_uid[peer.uid] >= MOST_PER_USER
                if user_full or self._by_uid.total() >= MOST:
                    raise OSError(f"too many questions at once, uid {peer.uid}")
                self._by_uid[peer.uid] += 1
        except OSError as error:
            _log.warning("server: couldn't take a connection: %s", error)
            connection.close()
            return
        try:
            threading.Thread(target=self._serve, args=(connection, peer), daemon=True).start()
        except RuntimeError as error:
            _log.error("server: couldn't start a thread: %s", error)
            connection.close()
            self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        with self._lock:
            self._by_uid[peer.uid] -= 1
            if self._by_uid[peer.uid] <= 0:
                del self._by_uid[peer.uid]

    def _serve(self, connection: socket.socket, peer: Peer) -> None:
        try:
            self._talk(connection, peer)
        finally:
            self._leave(peer)

    @abstractmethod
    def _talk(self, connection: socket.socket, peer: Peer) -> None:
        """Everything about one connection, which this closes or gives away."""
