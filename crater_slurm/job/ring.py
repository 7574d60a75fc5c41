"""The trainer's end of the ring: its lane, its connection, and what to do when either is lost.

A thread listens to the worker. When the connection breaks it connects again, offers the lane and
says again what has not been called saved; when nobody answers for GRACE_SECONDS, it writes what
lies in the lane to disk itself. It never raises into the training: what can't go this way is
answered with False, and the caller writes the file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

from crater_slurm.job import wire
from crater_slurm.job.copying import Image, Segment, cpu_count
from crater_slurm.job.lane import Lane, prefault, register, rounded
from crater_slurm.job.layout import ALIGN
from crater_slurm.job.saving import Saving, tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

OPEN_SECONDS = 5.0
GRACE_SECONDS = 20.0
#: Without any progress for so long, a save that waits for room goes another way.
STALL_SECONDS = 300.0
_MOST_LANE = 1 << 50
#: struct timeval: a worker that has stopped reading counts as lost after 10 s.
_SEND_TIMEOUT = struct.pack("ll", 10, 0)
_STALLED = (
    f"the checkpoint worker has made no progress for {STALL_SECONDS:.0f} s, so this step is "
    "written directly. If only one rank saves, call save(..., only_rank=0) on all of them."
)


class Announced:
    """A save that the worker knows, or shall know, and has not called saved."""

    def __init__(self, number: int, begin: dict[str, Any], saving: Saving, start: int) -> None:
        self.number = number
        self.begin = begin
        self.saving = saving
        self.start = start
        self.pieces: list[tuple[int, int, int]] = []
        #: The lane holds all of it until it is saved; otherwise it is in the partial folder.
        self.whole = True
        #: All of it has been copied or written, so it may be announced.
        self.ready = False
        self.rescue: Callable[[Image], None] | None = None


def connect(
    path: str, hello: dict[str, Any], fds: tuple[int, ...] = ()
) -> tuple[wire.Channel, dict[str, Any], list[int]]:
    """Open a connection: the channel, the worker's ``lane`` answer and the files beside it.

    Raises OSError (also TimeoutError) or wire.WireError.
    """
    channel = wire.Channel.connect(path, OPEN_SECONDS)
    try:
        channel.socket.settimeout(OPEN_SECONDS)
        channel.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        channel.send({"op": "open", "version": wire.VERSION, **hello}, fds)
        while True:
            answer, beside = channel.receive()
            if answer["op"] == "lane":
                channel.socket.settimeout(None)
                return channel, answer, beside
            for fd in beside:
                os.close(fd)
            if answer["op"] in ("error", "failed"):
                raise wire.WireError(f"use the ring: {answer.get('error')!s:.200}")
            if answer["op"] == "note":
                tell(str(answer.get("text", "")))
    except BaseException:
        channel.close()
        raise


class Ring:
    """One rank's ring. One thread saves at a time; ``hello`` is what ``open`` says of the rank."""

    def __init__(self, path: str, hello: dict[str, Any], wanted: int) -> None:
        """Connect and map the lane; raises OSError, ValueError or wire.WireError."""
        self.path = path
        self.hello = hello
        self.wanted = max(rounded(wanted), ALIGN)
        #: The connection is gone; nobody has answered for too long; the worker wants another lane.
        self.lost = self.given_up = self.retired = False
        self.generation = 0
        self.unsaved: dict[int, Announced] = {}
        self.flushed: set[tuple[str, int]] = set()
        self.changed = threading.Condition()
        self._send = threading.Lock()
        self._rescuing = threading.Lock()
        self._next = 1
        self._closing = threading.Event()
        self._progress = time.monotonic()
        self._channel, answer, fds = connect(path, {**hello, "bytes": self.wanted})
        self.lane = self._lane_of(answer, fds)
        register(self.lane)
        self._thread = threading.Thread(target=self._listen, daemon=True, name="crater-ring")
        self._thread.start()

    def _lane_of(self, answer: dict[str, Any], fds: list[int]) -> Lane:
        try:
            size = wire.whole(answer, "bytes", _MOST_LANE)
            self.policy = str(answer.get("policy", "wait"))
            self.partial_root = str(answer.get("partial_root") or "")
            if not fds or size < ALIGN:
                raise wire.WireError("use the ring: the worker has no room for a lane")
            return Lane(fds.pop(0), size)
        except BaseException:
            self._channel.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def prefault(self) -> None:
        """Touch all pages of the lane."""
        prefault(self.lane, cpu_count())

    def save(
        self,
        image: Image,
        begin: dict[str, Any],
        saving: Saving,
        rescue: Callable[[Image], None],
    ) -> bool:
        """Take a file into the lane; False where the caller has to write it, with nothing left
        behind here. ``rescue(image)`` writes it from the lane, should the worker be lost."""
        if self.given_up or self.retired:
            return False
        announced = self._new(begin, image.size, saving)
        announced.rescue = rescue
        if rounded(image.size) > self.lane.length:
            announced.whole = False
            return self._stream(announced, image)
        if not self._wait_for(rounded(image.size)):
            return False
        with self.changed:
            announced.start = self.lane.head
            announced.pieces = self.lane.take(image.size)
            self.unsaved[announced.number] = announced
        for at, position, count in announced.pieces:
            image.copy(at, count, self.lane.place(position))
        with self.changed:
            announced.ready = True
            if not self.lost:
                self._announce(announced)
        if self.given_up:
            self._rescue()
        return True

    def _new(self, begin: dict[str, Any], size: int, saving: Saving) -> Announced:
        with self.changed:
            number, self._next = self._next, self._next + 1
            self._progress = time.monotonic()
            message = {**begin, "op": "begin", "save": number, "size": size}
            return Announced(number, message, saving, self.lane.head)

    def _stream(self, announced: Announced, image: Image) -> bool:
        """A file larger than the lane, piece by piece; returns once all of it is on disk."""
        era, at = self.generation, 0
        with self.changed:
            self.unsaved[announced.number] = announced
        good = self._tell(announced.begin)
        step = max(ALIGN, self.lane.length // 4 // ALIGN * ALIGN)
        while good and at < image.size:
            count = min(step, image.size - at, self.lane.length - self.lane.head % self.lane.length)
            good = self._wait_for(rounded(count), era)
            if good:
                with self.changed:
                    piece = self.lane.take(count, at)[0]
                image.copy(at, count, self.lane.place(piece[1]))
                good = self.generation == era and self._tell_piece(announced.number, piece)
                at += count
        end = self.lane.head
        over = announced.saving.done
        good = good and self._tell({"op": "commit", "save": announced.number})
        good = good and self._wait_until(lambda: self.lane.tail >= end or over(), era)
        return self._keep(announced, good)

    def direct(
        self, begin: dict[str, Any], size: int, saving: Saving, write: Callable[[str], None]
    ) -> bool:
        """Have the caller write the file where the worker looks for it, and the worker take it;
        False where there is none. ``write(folder)`` raises what it likes."""
        if self.lost or self.retired or not self.partial_root:
            return False
        era = self.generation
        announced = self._new(begin, size, saving)
        announced.whole = False
        with self.changed:
            self.unsaved[announced.number] = announced
        good = self._tell(announced.begin)
        try:
            if good:
                write(self.partial_root)
        except BaseException:
            self._keep(announced, False)
            raise
        good = good and self.generation == era
        return self._keep(
            announced, good and self._tell({"op": "direct", "save": announced.number})
        )

    def _keep(self, announced: Announced, good: bool) -> bool:
        """Remember a save that is on disk until the worker calls it saved; drop a failed one."""
        with self.changed:
            saved = announced.saving.done() and announced.saving.error is None
            announced.ready = good
            if not (good or saved):
                self.unsaved.pop(announced.number, None)
        if not (good or saved):
            self._tell({"op": "abandon", "save": announced.number})
        return good or saved

    def _wait_for(self, nbytes: int, era: int | None = None) -> bool:
        """Wait for room; False when it won't come, or is not there and the policy is direct.
        ``era``: the connection on which it has to come."""
        if era is None and self.policy == "direct" and self.lane.room < nbytes:
            return False
        return self._wait_until(lambda: self.lane.room >= nbytes, era)

    def _wait_until(self, test: Callable[[], bool], era: int | None) -> bool:
        with self.changed:
            while True:
                if self.given_up or self.retired:
                    return False
                if era is not None and (self.lost or self.generation != era):
                    return False
                if test():
                    return True
                left = self._progress + STALL_SECONDS - time.monotonic()
                if left <= 0:
                    tell(_STALLED)
                    return False
                self.changed.wait(min(left, 1.0))

    def wait(self, seconds: float | None) -> bool:
        """Wait until nothing is unsaved; whether it is so."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.unsaved, seconds)

    def close(self, seconds: float) -> bool:
        """Wait for what is unsaved, write it here where the worker is lost, and hang up; whether
        all is saved. The worker keeps the lane and goes on with what is left."""
        if self.lost:
            self._closing.set()
        done = self.wait(seconds)
        self._closing.set()
        self._hang_up()
        return done

    def forked(self) -> None:
        """In a child process: the parent's files are not the child's to keep open."""
        for fd in (self._channel.fileno(), self.lane.fd):
            with contextlib.suppress(OSError):
                os.close(fd)

    # Messages

    def _announce(self, announced: Announced) -> None:
        """Say all of a save that lies in the lane, or was written before."""
        sent = self._tell(announced.begin)
        if not announced.whole:
            _ = sent and self._tell({"op": "direct", "save": announced.number})
            return
        for piece in announced.pieces:
            sent = sent and self._tell_piece(announced.number, piece)
        _ = sent and self._tell({"op": "commit", "save": announced.number})

    def _tell_piece(self, number: int, piece: tuple[int, int, int]) -> bool:
        at, position, count = piece
        return self._tell(
            {"op": "data", "save": number, "at": at, "position": position, "bytes": count}
        )

    def _tell(self, message: dict[str, Any]) -> bool:
        """Send; False when the connection is gone, which the listener is made to see."""
        try:
            with self._send:
                self._channel.send(message)
        except (OSError, wire.WireError):
            self._hang_up()
            return False
        return True

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        while not self.retired:
            try:
                message, fds = self._channel.receive()
                for fd in fds:
                    os.close(fd)
                self._take(message)
            except (OSError, wire.WireError):
                with self.changed:
                    self.lost = True
                    self.changed.notify_all()
                if not self._reconnect():
                    return

    def _take(self, message: dict[str, Any]) -> None:
        op = message["op"]
        with self.changed:
            self._progress = time.monotonic()
            if op == "freed":
                position = wire.whole(message, "position", self.lane.head)
                self.lane.tail = max(self.lane.tail, position)
            elif op == "saved":
                self._over(message, None)
            elif op == "failed":
                self._over(message, wire.text(message, "error"))
            elif op == "flushed":
                self.flushed.add((wire.text(message, "name"), wire.whole(message, "step", 10**15)))
            elif op == "note":
                tell(wire.text(message, "text"))
            elif op == "error":
                tell(f"the checkpoint worker: {wire.text(message, 'error')}")
            self.changed.notify_all()

    def _over(self, message: dict[str, Any], error: str | None) -> None:
        announced = self.unsaved.pop(wire.whole(message, "save", 1 << 62), None)
        if announced is None:
            return
        if error:
            tell(f"{announced.saving.name} {announced.saving.step} is not saved: {error}")
        announced.saving.finish(error)

    # A lost worker

    def _reconnect(self) -> bool:
        """Try until there is a worker again; False when this ring is over."""
        began, delay = time.monotonic(), 0.05
        while True:
            if not self._closing.is_set() and self._try_again():
                return not self.retired
            late = time.monotonic() - began > GRACE_SECONDS
            if (late or self._closing.is_set()) and not self.given_up:
                with self.changed:
                    self.given_up = True
                    self.changed.notify_all()
                self._rescue()
            if self._closing.is_set():
                return False
            self._closing.wait(delay)
            delay = min(2 * delay, 30.0 if self.given_up else 2.0)

    def _try_again(self) -> bool:
        """Connect and offer the lane; what is unsaved is announced again."""
        hello = {**self.hello, "bytes": self.lane.length}
        try:
            channel, answer, fds = connect(self.path, hello, (self.lane.fd,))
        except (OSError, wire.WireError):
            return False
        if fds or answer.get("bytes") != self.lane.length:
            for fd in fds:
                os.close(fd)
            channel.close()
            with self.changed:
                self.retired = True
                self.changed.notify_all()
            self._rescue()
            return True
        with self.changed:
            self._channel.close()
            self._channel = channel
            self.lost = self.given_up = False
            self.generation += 1
            self._progress = time.monotonic()
            for number in [n for n, a in self.unsaved.items() if not (a.ready or a.whole)]:
                del self.unsaved[number]
            self._settle()
            for announced in list(self.unsaved.values()):
                if announced.ready:
                    self._announce(announced)
            self.changed.notify_all()
        return True

    def _settle(self) -> None:
        """What lies before the oldest save that the lane still holds is free."""
        kept = [a.start for a in self.unsaved.values() if a.whole]
        self.lane.tail = max(self.lane.tail, min(kept, default=self.lane.head))

    def _rescue(self) -> None:
        """Write what lies in the lane and is not saved, without a worker."""
        with self._rescuing:
            while True:
                with self.changed:
                    ready = (a for a in self.unsaved.values() if a.ready)
                    announced = next(ready, None)
                if announced is None:
                    break
                error = self._write(announced)
                if error:
                    tell(f"{announced.saving.name} {announced.saving.step} is not saved: {error}")
                with self.changed:
                    self.unsaved.pop(announced.number, None)
                    announced.saving.finish(error)
                    self._settle()
                    self.changed.notify_all()

    def _write(self, announced: Announced) -> str | None:
        if not announced.whole or announced.rescue is None:
            return "its worker was lost before it had been checked"
        segments = [Segment(a, n, self.lane.place(p)) for a, p, n in announced.pieces]
        try:
            announced.rescue(Image(segments))
        except Exception as problem:
            return f"its worker was lost, and it can't be written: {problem}"
        return None


def ask(
    path: str, hello: dict[str, Any], message: dict[str, Any], answer: str, seconds: float
) -> dict[str, Any]:
    """One question on a connection of its own; raises OSError or wire.WireError."""
    channel, _, fds = connect(path, {**hello, "bytes": 0})
    try:
        for fd in fds:
            os.close(fd)
        channel.send(message)
        end = time.monotonic() + seconds
        while True:
            channel.socket.settimeout(max(0.01, end - time.monotonic()))
            reply, fds = channel.receive()
            for fd in fds:
                os.close(fd)
            if reply["op"] == answer:
                return reply
            if reply["op"] == "error":
                raise wire.WireError(str(reply.get("error", ""))[:300])
            if reply["op"] == "note":
                tell(str(reply.get("text", "")))
    finally:
        channel.close()
