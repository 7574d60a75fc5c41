"""A rank's file that lies beyond the node, read through its worker past a cache that is dead.

The worker puts one chunk after the other into a small buffer of this process's own memory; from
there it goes to its place. So a state is loaded within the memory that it takes itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time

from crater_slurm.job import layout, wire
from crater_slurm.job.contact import connect
from crater_slurm.job.lane import Lane, prefault
from crater_slurm.job.layout import CHUNK_BYTES
from crater_slurm.job.tensorfile import DamagedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SLOTS = 4
#: How long the worker may take to find the file, and for one chunk, with its own tries.
PATIENCE_SECONDS = 600.0


class Stream:
    """A source for ``tensorfile.File``. ``entry``: the file by its manifest. Thread-safe."""

    def __init__(self, path: str, hello: dict[str, Any], wish: dict[str, Any]) -> None:
        """Ask for the file that ``wish`` names (name, step, run, rank). Raises OSError,
        wire.WireError or layout.LayoutError."""
        self._buffer = _buffer()
        try:
            self._channel, _, fds = connect(path, {**hello, "bytes": 0})
        except BaseException:
            self._buffer.close()
            raise
        for fd in fds:
            os.close(fd)
        self._changed = threading.Condition()
        self._free = list(range(SLOTS))
        self._done: dict[int, str | None] = {}
        self._lost = ""
        self._last: tuple[int, bytes] = (-1, b"")
        try:
            self._channel.send({"op": "stream", **wish}, [self._buffer.fd])
            self._introduce(self._answer("streaming"), wish)
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._listen, daemon=True, name="crater-stream")
        self._thread.start()

    def _introduce(self, answer: dict[str, Any], wish: dict[str, Any]) -> None:
        if answer.get("error"):
            raise wire.WireError(str(answer["error"])[:1000])
        count = wire.whole(answer, "bytes", SLOTS * CHUNK_BYTES)
        self.manifest = layout.Manifest.from_json(bytes(self._buffer.memory[:count]))
        self.folder = wire.text(answer, "folder", "")
        (self.entry,) = self.manifest.files[:1]
        asked = (wish["name"], wish["step"], wish["run"], wish["rank"])
        told = (self.manifest.name, self.manifest.step, self.manifest.run, self.entry.rank)
        if asked != told:
            raise wire.WireError(f"read {asked}: the worker told of {told}")
        self.path, self.size = f"{self.folder}/{self.entry.name}", self.entry.size

    def _answer(self, operation: str) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            self._channel.socket.settimeout(max(0.01, end - time.monotonic()))
            message, fds = self._channel.receive()
            for fd in fds:
                os.close(fd)
            if message["op"] == operation:
                self._channel.socket.settimeout(None)
                return message
            if message["op"] == "error":
                raise wire.WireError(str(message.get("error", ""))[:300])

    def _listen(self) -> None:
        """Hand the worker's answers to who waits for them."""
        try:
            while True:
                message = self._channel.receive()[0]
                if message["op"] == "error":
                    raise wire.WireError(str(message.get("error", ""))[:300])
                if message["op"] == "piece":
                    slot = wire.whole(message, "slot", SLOTS - 1)
                    error = message.get("error")
                    with self._changed:
                        self._done[slot] = str(error)[:1000] if error else None
                        self._changed.notify_all()
        except (OSError, wire.WireError) as error:
            with self._changed:
                self._lost = str(error) or "the worker is gone"
                self._changed.notify_all()

    def read(self, view: memoryview, at: int) -> int:
        """Fill a view from a place in the file, as far as the file goes. Raises DamagedError."""
        done = 0
        while done < len(view) and at + done < self.size:
            number, inside = divmod(at + done, CHUNK_BYTES)
            whole = inside == 0 and len(view) - done >= min(
                CHUNK_BYTES, self.size - number * CHUNK_BYTES
            )
            chunk = memoryview(self._chunk(number, keep=not whole))[inside:]
            count = min(len(chunk), len(view) - done)
            view[done : done + count] = chunk[:count]
            done += count
        return done

    def _chunk(self, number: int, *, keep: bool) -> bytes:
        """One chunk; the last one that was asked for in pieces (the header) is kept."""
        known = self._last
        if known[0] == number:
            return known[1]
        with self._changed:
            self._wait(lambda: bool(self._free))
            slot = self._free.pop()
        try:
            with self._changed:
                message = {"op": "piece", "slot": slot, "at": number * CHUNK_BYTES}
                self._channel.send(message)
                self._wait(lambda: slot in self._done)
                error = self._done.pop(slot)
            if error:
                raise DamagedError(f"{self.path} can't be read: {error}")
            count = min(CHUNK_BYTES, self.size - number * CHUNK_BYTES)
            data = bytes(self._buffer.memory[slot * CHUNK_BYTES : slot * CHUNK_BYTES + count])
        except (OSError, wire.WireError) as error:
            raise DamagedError(f"{self.path} can't be read: {error}") from error
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()
        if keep:
            self._last = number, data
        return data

    def _wait(self, test: Any) -> None:
        """Until it holds. Raises DamagedError where the worker is gone."""
        if not self._changed.wait_for(lambda: self._lost or test(), PATIENCE_SECONDS) or self._lost:
            raise DamagedError(f"{self.path} can't be read: {self._lost or 'no answer came'}")

    def close(self) -> None:
        """Hang up; the buffer goes with it."""
        with contextlib.suppress(OSError):
            self._channel.socket.shutdown(2)
        thread = getattr(self, "_thread", None)
        if thread is not None:
            thread.join(5.0)
        self._channel.close()
        self._buffer.close()


def _buffer() -> Lane:
    """Memory that the worker may write to, touched here; its size can't change any more."""
    if not hasattr(os, "memfd_create"):
        raise OSError(38, "this Python has no memfd")
    fd = os.memfd_create("crater-stream", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SLOTS * CHUNK_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    lane = Lane(fd, SLOTS * CHUNK_BYTES)
    prefault(lane, 1)
    return lane
