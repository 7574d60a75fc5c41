"""Brings this node's parts to its partner: in a thread of its own, the newest one first.

A trainer never waits for it. While one part is under way newer ones may come; then only the newest
is sent next, for it is the one that counts. A failure is tried again, later and later, until a
newer part takes its place; a refusal (no room, no right) is told once and not tried again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from crater_slurm.checkpoint.peers.checks import pieces
from crater_slurm.checkpoint.peers.frames import Header, TransportError
from crater_slurm.checkpoint.peers.handshake import RefusedError
from crater_slurm.checkpoint.peers.serve import MOST_LIST, Log
from crater_slurm.checkpoint.peers.transport import Connection, refusal
from crater_slurm.job.layout import Manifest

_FIRST_WAIT, _MOST_WAIT = 1.0, 60.0
#: The partner answers a put only after it has read what an earlier try left there.
_PUT_SECONDS = 600.0


@dataclass
class _Work:
    """What one part still needs, shared by the streams that bring it."""

    folder: str
    manifest: Manifest
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    lock: threading.Lock = field(default_factory=threading.Lock)
    todo: Iterator[tuple[int, int, int, int]] | None = None
    failed: list[TransportError] = field(default_factory=list)

    def next(self) -> tuple[int, int, int, int] | None:
        with self.lock:
            return None if self.failed or self.todo is None else next(self.todo, None)


class Courier:
    """Sends one part over one or several connections; raises TransportError or RefusedError."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        streams: int = 1,
        pace: Callable[[int], None] = lambda length: None,
    ) -> None:
        self._connect = connect
        self._streams = streams
        self._pace = pace
        self.carrier = ""

    def bring(self, folder: str, manifest: Manifest) -> int:
        """Bytes that had to be sent for the partner to have it, whole and on disk."""
        work = _Work(folder, manifest)
        with contextlib.ExitStack() as stack:
            # Held open, so that an eviction meanwhile takes the names and not the data.
            fds = [stack.enter_context(_opened(folder, file.name)) for file in manifest.files]
            connection = self._connect()
            stack.callback(connection.close)
            self.carrier = connection.name
            missing = _put(connection, work)
            work.todo = _in_order(manifest, missing)
            helpers = min(self._streams - 1, len(missing) // 2)
            threads = [
                threading.Thread(target=self._help, args=(work, fds), daemon=True)
                for _ in range(helpers)
            ]
            for thread in threads:
                thread.start()
            try:
                self._pieces(connection, work, fds)
            finally:
                for thread in threads:
                    thread.join()
            if work.failed:
                raise work.failed[0]
            _ask(connection, {"op": "commit"}, "stored", _PUT_SECONDS)
        return sum(length for _, _, _, length in _in_order(manifest, missing))

    def _help(self, work: _Work, fds: list[int]) -> None:
        """A further stream; when it fails all end, and the next try sends what is missing."""
        try:
            connection = self._connect()
            try:
                _put(connection, work)
                self._pieces(connection, work, fds)
                _ask(connection, {"op": "end"}, "got", _PUT_SECONDS)
            finally:
                connection.close()
        except TransportError as error:
            with work.lock:
                work.failed.append(error)

    def _pieces(self, connection: Connection, work: _Work, fds: list[int]) -> None:
        while (piece := work.next()) is not None:
            file, number, at, length = piece
            self._pace(length)
            try:
                connection.send_file(
                    {"op": "data", "file": file, "piece": number}, fds[file], at, length
                )
            except TransportError:
                _last_words(connection)
                raise


def _in_order(
    manifest: Manifest, missing: set[tuple[int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    for file, entry in enumerate(manifest.files):
        for number, at, length in pieces(entry):
            if (file, number) in missing:
                yield file, number, at, length


def _put(connection: Connection, work: _Work) -> set[tuple[int, int]]:
    """Offer the part; the pieces that the partner lacks."""
    manifest = work.manifest.to_json().encode()
    connection.send({"op": "put", "session": work.session}, [memoryview(manifest)])
    header, data = connection.receive(MOST_LIST, _PUT_SECONDS)
    if header["op"] != "want":
        raise RefusedError(f"leave the part there: {refusal(header)}")
    try:
        return {(int(file), int(piece)) for file, piece in json.loads(bytes(data))}
    except (ValueError, TypeError) as error:
        raise TransportError("understand what the partner wants") from error


def _ask(connection: Connection, header: Header, expected: str, seconds: float) -> None:
    connection.send(header)
    answer, _ = connection.receive(0, seconds)
    if answer["op"] != expected:
        raise TransportError(f"finish: {refusal(answer)}")


def _last_words(connection: Connection) -> None:
    """What the partner said before it hung up; better than "broken pipe"."""
    try:
        answer, _ = connection.receive(0, 0.5)
    except TransportError:
        return
    raise TransportError(f"go on: {refusal(answer)}") from None


@contextlib.contextmanager
def _opened(folder: str, name: str) -> Iterator[int]:
    try:
        fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise RefusedError(f"read {name} of the part: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)


class Sender:
    """The thread that brings parts to the partner. ``on_sent`` hears (manifest, bytes, seconds)."""

    def __init__(
        self,
        partner: str,
        courier: Courier,
        log: Log,
        on_sent: Callable[[Manifest, int, float], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
        first_wait: float = _FIRST_WAIT,
    ) -> None:
        self._partner, self._courier, self._log, self._on_sent = partner, courier, log, on_sent
        self._clock = clock
        self._first_wait = first_wait
        self._lock = threading.Condition()
        self._next: dict[str, tuple[str, Manifest]] = {}
        self._busy = False
        self._stopped = False
        self.error = ""
        self._thread = threading.Thread(target=self._run, name="peer-send", daemon=True)
        self._thread.start()

    def add(self, folder: str, manifest: Manifest) -> None:
        """A part has its final name; returns at once."""
        with self._lock:
            self._next[manifest.name] = (folder, manifest)
            self._lock.notify_all()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way or waits; what was refused does not."""
        with self._lock:
            return not self._busy and not self._next

    def stop(self) -> None:
        """Begin nothing more; a part under way ends with the process."""
        with self._lock:
            self._stopped = True
            self._lock.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._busy = False
                self._lock.notify_all()
                self._lock.wait_for(lambda: self._stopped or self._next)
                if self._stopped:
                    return
                name = next(iter(self._next))
                folder, manifest = self._next.pop(name)
                self._busy = True
            self._until_there(folder, manifest)

    def _until_there(self, folder: str, manifest: Manifest) -> None:
        """Try until it is there, refused, or overtaken by a newer part of the same name."""
        wait = self._first_wait
        while True:
            begin = self._clock()
            try:
                sent = self._courier.bring(folder, manifest)
            except TransportError as error:
                self._tell(f"peers: couldn't {error} ({self._partner})")
                if isinstance(error, RefusedError):
                    return
            except Exception as error:  # a defect of ours costs a copy, never the worker
                self._tell(f"peers: couldn't copy to {self._partner}: {error!r}")
                return
            else:
                self.error = ""
                self._on_sent(manifest, sent, self._clock() - begin)
                return
            with self._lock:
                overtaken = self._lock.wait_for(
                    lambda: self._stopped or manifest.name in self._next, wait
                )
            if overtaken:
                return
            wait = min(2 * wait, _MOST_WAIT)

    def _tell(self, sentence: str) -> None:
        if sentence != self.error:
            self.error = sentence
            self._log("warning", sentence)
