"""TCP: frames with data from memory or straight from files, deadlines, back-pressure.

Data goes out by sendmsg of the caller's own buffers and by sendfile from the page cache, so this
side copies nothing. A frame that does not get through within its time ends the connection: a slow
or dead node costs one thread for that long and never a trainer.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Sequence

from crater_slurm.checkpoint.peers import frames
from crater_slurm.checkpoint.peers.frames import Header, TransportError

#: A node that vanished is noticed after this, also while nothing is sent.
_DEAD_SECONDS = 30
_MOST_BUFFERS = 512


class TcpConnection:
    """One end of a TCP connection; see transport.Connection."""

    name = "tcp"

    def __init__(
        self,
        plain: socket.socket,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = plain
        self._seconds = seconds
        self._clock = clock
        self._buffer = bytearray()
        self.reason = ""
        plain.setblocking(False)
        with contextlib.suppress(OSError):  # a Unix socket in a test has none of these
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_SECONDS // 3)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_SECONDS // 6)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _DEAD_SECONDS)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, header: Header, buffers: Sequence[memoryview] = ()) -> None:
        """Send a header and what lies in the buffers."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        end = self._clock() + self._seconds
        self._send([memoryview(frames.encode(header, sum(map(len, views)))), *views], end)

    def send_file(self, header: Header, fd: int, at: int, length: int) -> None:
        """Send a header and a piece of a file, which must be that long."""
        end = self._clock() + self._seconds
        self._send([memoryview(frames.encode(header, length))], end, socket.MSG_MORE)
        stop = at + length
        while at < stop:
            try:
                sent = os.sendfile(self._socket.fileno(), fd, at, stop - at)
            except BlockingIOError:
                self._wait(select.POLLOUT, end)
                continue
            except OSError as error:
                raise TransportError(f"send: {error.strerror}") from error
            if not sent:
                raise TransportError(f"send a file beyond its end at byte {at}")
            at += sent

    def receive(self, most: int = 0, idle: float | None = None) -> tuple[Header, memoryview]:
        """The next header and its data, good until the next ``receive``."""
        self._wait(select.POLLIN, None if idle is None else self._clock() + idle)
        end = self._clock() + self._seconds
        head = bytearray(frames.HEAD.size)
        self._fill(memoryview(head), end)
        header_bytes, data_bytes = frames.lengths(bytes(head), most)
        text = bytearray(header_bytes)
        self._fill(memoryview(text), end)
        header = frames.decode(text)
        if len(self._buffer) < data_bytes:
            self._buffer = bytearray(data_bytes)  # a new one: views of the old may be out
        data = memoryview(self._buffer)[:data_bytes]
        self._fill(data, end)
        return header, data

    @property
    def deadline(self) -> float:
        """When a frame that begins now must be through."""
        return self._clock() + self._seconds

    def now(self) -> float:
        """The clock that ``deadline`` is read from."""
        return self._clock()

    def abort(self) -> None:
        """End it from another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        self._socket.close()

    def _send(self, views: list[memoryview], end: float, flags: int = 0) -> None:
        while views:
            try:
                sent = self._socket.sendmsg(views[:_MOST_BUFFERS], [], flags | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._wait(select.POLLOUT, end)
                continue
            except OSError as error:
                raise TransportError(f"send: {error.strerror}") from error
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def _fill(self, view: memoryview, end: float) -> None:
        while view:
            try:
                got = self._socket.recv_into(view)
            except BlockingIOError:
                self._wait(select.POLLIN, end)
                continue
            except OSError as error:
                raise TransportError(f"receive: {error.strerror}") from error
            if not got:
                raise TransportError("go on: the other end closed the connection")
            view = view[got:]

    def _wait(self, event: int, end: float | None) -> None:
        left = None if end is None else (end - self._clock()) * 1000
        if left is not None and left <= 0:
            raise TransportError("go on: the other end was too slow")
        if self._socket.fileno() < 0:
            raise TransportError("go on: the connection is closed")
        poll = select.poll()
        # Who has hung up reads no more; a full window would hide that for as long as it stays full.
        closed = select.POLLRDHUP if event == select.POLLOUT else 0
        poll.register(self._socket.fileno(), event | closed)
        events = poll.poll(left)
        if not events:
            raise TransportError("go on: the other end was too slow")
        if events[0][1] & closed and not events[0][1] & event:
            raise TransportError("go on: the other end closed the connection")


class Listener:
    """Takes TCP connections at ``host:port``; port 0 takes a free one, see ``address``."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, int(port)), family=family, backlog=128)
        self.address = f"{host}:{self._socket.getsockname()[1]}"

    def accept(self) -> tuple[socket.socket, str]:
        """The next connection and the host it comes from; raises OSError once closed."""
        connection, origin = self._socket.accept()
        return connection, str(origin[0])

    def close(self) -> None:
        """Stop listening; a thread in ``accept`` gets an OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
