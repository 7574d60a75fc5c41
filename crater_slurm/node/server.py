"""The hooks' socket: a thread per question, and who may ask what.

Anyone on the node may connect. The kernel's credentials of the peer decide: Prolog and Epilog are
obeyed from root and the daemon's own user, TaskProlog only about a job of the caller's uid. A
caller that hangs, dribbles or sends garbage costs one thread for two seconds and nobody else.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from crater_slurm.hooks import frame
from crater_slurm.node import listener
from crater_slurm.node.epilog import epilog
from crater_slurm.node.listener import Listener
from crater_slurm.node.prolog import prolog
from crater_slurm.node.request import Answer, Peer, Request, RequestError
from crater_slurm.node.services import Services
from crater_slurm.node.task_prolog import task_prolog

_log = logging.getLogger("crater.node.server")

Handler = Callable[[Request], Answer]


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


class Server(Listener):
    """Listens on a Unix socket and answers with ``handler``."""

    def __init__(
        self, path: Path, handler: Handler, timeout: float = listener.TIMEOUT_SECONDS
    ) -> None:
        super().__init__(path, socket.SOCK_STREAM, timeout)
        self._handler = handler

    def _talk(self, connection: socket.socket, peer: Peer) -> None:
        answer = self._answer(connection, peer)
        for work in answer.afterwards:
            try:
                work()
            except Exception:
                _log.exception("server: couldn't finish what an answer left to do")

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
