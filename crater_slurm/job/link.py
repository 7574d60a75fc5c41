"""A rank's connection to its checkpoint worker: what it says, and what to do when it is lost.

A thread listens. When the connection breaks it connects again, offers the lane and says again
what has not been called saved; when nobody answers for GRACE_SECONDS, it writes what lies in the
lane to disk itself. Nothing of this raises into the training.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

from crater_slurm.job import wire
from crater_slurm.job.contact import connect
from crater_slurm.job.copying import Image, Segment, cpu_count
from crater_slurm.job.lane import Lane, prefault, register, rounded
from crater_slurm.job.layout import ALIGN
from crater_slurm.job.saving import Saving, tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

GRACE_SECONDS = 20.0
_MOST_LANE = 1 << 50
#: A worker that understands nothing of what it is told is done without.
_MOST_MISTAKES = 5


class Announced:
    """A save that the worker knows, or shall know, and has not called saved."""

    def __init__(self, number: int, begin: dict[str, Any], saving: Saving) -> None:
        self.number = number
        self.begin = begin
        self.saving = saving
        self.start = 0
        self.pieces: list[tuple[int, int, int]] = []
        #: The lane holds all of it until it is saved; otherwise it is in the partial folder.
        self.whole = True
        #: All of it has been copied or written, so it may be announced.
        self.ready = False
        #: Writes it without the worker: ``rescue(image, own)``, ``own``: into the user's folder.
        self.rescue: Callable[[Image, bool], None] | None = None
        #: The worker's disk does not take it, and the saving thread still has the state.
        self.refused = False


class Link:
    """A rank's connection and lane; ``hello`` is what ``open`` says of the rank."""

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
        self._mistakes = 0
        self._closing = threading.Event()
        self._progress = time.monotonic()
        self._channel, answer, fds = connect(path, {**hello, "bytes": self.wanted})
        self.lane = self._lane_of(answer, fds)
        if self.lane is not None:
            register(self.lane)
        self._thread = threading.Thread(target=self._listen, daemon=True, name="crater-ring")
        self._thread.start()

    def _lane_of(self, answer: dict[str, Any], fds: list[int]) -> Lane | None:
        try:
            size = wire.whole(answer, "bytes", _MOST_LANE)
            self.policy = str(answer.get("policy", "wait"))
            self.partial_root = str(answer.get("partial_root") or "")
            return Lane(fds.pop(0), size) if fds and size >= ALIGN else None
        except BaseException:
            self._channel.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def prefault(self) -> None:
        """Touch all pages of the lane."""
        if self.lane is not None:
            prefault(self.lane, cpu_count())

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
        with contextlib.suppress(OSError):
            os.close(self._channel.socket.detach())
        if self.lane is not None:
            self.lane.close()

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
        while True:
            try:
                message, fds = self._channel.receive()
                for fd in fds:
                    os.close(fd)
                if message["op"] == "failed":
                    self._failed(message)
                else:
                    self._take(message)
                if self.retired:
                    self._hang_up()
                    self._rescue()
                    return
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
            if op in ("freed", "saved"):
                self._mistakes = 0
            if op == "freed" and self.lane is not None:
                position = wire.whole(message, "position", self.lane.head)
                self.lane.tail = max(self.lane.tail, position)
            elif op == "saved":
                announced = self.unsaved.pop(wire.whole(message, "save", 1 << 62), None)
                if announced is not None:
                    announced.saving.finish()
            elif op == "flushed":
                self.flushed.add((wire.text(message, "name"), wire.whole(message, "step", 10**15)))
            elif op == "note":
                tell(wire.text(message, "text"))
            elif op == "error":
                tell(f"the checkpoint worker: {wire.text(message, 'error')}")
                self._mistakes += 1
                self.retired = self._mistakes >= _MOST_MISTAKES
            self.changed.notify_all()

    def _failed(self, message: dict[str, Any]) -> None:
        """The worker can't save it. Where its disk is at fault, what lies in the lane goes to the
        user's own folder; the lane keeps it meanwhile, for this thread is told what is free."""
        number, error = wire.whole(message, "save", 1 << 62), wire.text(message, "error")
        disk = message.get("disk") is True
        with self.changed:
            self._progress = time.monotonic()
            announced = self.unsaved.get(number)
            if announced is not None and not announced.ready and disk:
                announced.refused = True  # its thread still has the state, and goes another way
                announced = self.unsaved.pop(number)
                self.changed.notify_all()
                return
        if announced is None:
            return
        if disk and announced.whole:
            error = self._write(announced, error)
        if error:
            saving = announced.saving
            tell(f"{saving.name} {saving.step} is not saved: {error}")
        with self.changed:
            self.unsaved.pop(number, None)
            announced.saving.finish(error or None)
            self.changed.notify_all()

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
        length = self.lane.length if self.lane else 0
        offered = (self.lane.fd,) if self.lane else ()
        try:
            channel, answer, fds = connect(self.path, {**self.hello, "bytes": length}, offered)
        except (OSError, wire.WireError):
            return False
        if fds or answer.get("bytes") != length:
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
        if self.lane is not None:
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
                    announced.saving.finish(error or None)
                    self._settle()
                    self.changed.notify_all()

    def _write(self, announced: Announced, refusal: str = "") -> str:
        """Write it from the lane, where its worker is lost, or to the user's folder after a
        ``refusal``; why that was not possible, or nothing."""
        if not announced.whole or announced.rescue is None or self.lane is None:
            return refusal or "its worker was lost before it had been checked"
        place = self.lane.place
        segments = [Segment(at, count, place(position)) for at, position, count in announced.pieces]
        try:
            announced.rescue(Image(segments), bool(refusal))
        except Exception as problem:
            why = refusal or "its worker was lost, and it can't be written:"
            return f"{why} {problem}"
        announced.saving.how = "direct"
        return ""
