"""The daemon's socket: one acceptor, a thread per question, and who may ask what.

Anyone on the node may connect. The kernel's credentials of the peer decide: Prolog and Epilog are
obeyed from root and the daemon's own user, TaskProlog only about a job of the caller's uid. A
caller that hangs, dribbles or sends garbage costs one thread for two seconds and nobody else.
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
from collections.abc import Callable
from pathlib import Path

from crater_slurm.hooks import frame
from crater_slurm.node.epilog import epilog
from crater_slurm.node.prolog import prolog
from crater_slurm.node.request import Answer, Peer, Request, RequestError
from crater_slurm.node.services import Services
from crater_slurm.node.task_prolog import task_prolog

_log = logging.getLogger("crater.node.server")

Handler = Callable[[Request], Answer]

_TIMEOUT_SECONDS = 2.0
_BACKLOG = 1024
#: Threads at a time, for everyone and for one user; root is only bound by the former. One srun
#: starts as many TaskPrologs at once as the node has cores.
_MOST, _MOST_PER_USER = 768, 384


def dispatch(services: Services, request: Request) -> Answer:
    """The answer to a hook; errors become answers, so that a hook always learns something."""
    try:
        if request.operation in ("prolog", "epilog"):
            if request.peer.uid not in (0, os.geteuid()):
                raise RequestError(f"obey uid {request.peer.uid}: only Slurm's own hooks may ask")
            return (prolog if request.operation == "prolog" else epilog)(services, request)
        if request.operation == "task_prolog":
            return task_prolog(services, request)
        if request.operation == "ping":
            return Answer()
        raise RequestError(f"understand the operation {request.operation!r:.40}")
    except RequestError as error:
        _log.warning("%s: couldn't %s", request.operation[:20], error)
        return Answer.error(str(error))
    except Exception as error:
        # A fault of ours must not become the job's: the hook exits 0 and says so in its syslog.
        _log.exception("%s: couldn't finish", request.operation[:20])
        return Answer.error(f"finish: {type(error).__name__}, see the log of crater-io-daemon")


def _has_left(connection: socket.socket) -> bool:
    """Whether the other end is closed; a hook that waits for its answer keeps it open."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False


class _DeadlineReader:
    """A socket whose reads all end at one moment, so that one byte a second is no way to stay."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._end = time.monotonic() + seconds

    def recv(self, size: int) -> bytes:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the question took too long")
        self._connection.settimeout(left)
        return self._connection.recv(size)


class Server:
    """Listens on a Unix socket and answers with ``handler``."""

    def __init__(self, path: Path, handler: Handler, timeout: float = _TIMEOUT_SECONDS) -> None:
        self._path = path
        self._handler = handler
        self._timeout = timeout
        self._lock = threading.Lock()
        self._by_uid: collections.Counter[int] = collections.Counter()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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
                user_full = peer.uid and self._by_uid[peer.uid] >= _MOST_PER_USER
                if user_full or self._by_uid.total() >= _MOST:
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
            answer = self._answer(connection, peer)
            for work in answer.afterwards:
                try:
                    work()
                except Exception:
                    _log.exception("server: couldn't finish what an answer left to do")
        finally:
            self._leave(peer)

    def _answer(self, connection: socket.socket, peer: Peer) -> Answer:
        """Read, handle and answer one question. What was done is done even if nobody listens, but
        a Prolog that nobody waits for any more, after a stop of this process, is not begun."""
        answer = Answer()
        with connection:
            try:
                reader = _DeadlineReader(connection, self._timeout)
                pairs = frame.receive(reader)  # type: ignore[arg-type]  # all it uses is recv
                request = Request.from_pairs(pairs, peer)
                if request.operation == "prolog" and _has_left(connection):
                    # Its job runs unprepared, or is over: a record made now would have no Epilog.
                    _log.warning("server: dropped a Prolog whose hook had given up waiting")
                    return answer
                answer = self._handler(request)
                connection.settimeout(self._timeout)
                connection.sendall(frame.encode(answer.pairs()))
            except frame.FrameError as error:
                _log.info("server: couldn't read a question of uid %d: %s", peer.uid, error)
            except OSError as error:
                _log.info("server: couldn't talk to a hook of uid %d: %s", peer.uid, error)
        return answer
