"""One rank's file at the destination, read piece by piece past a cache that can't take it.

A node whose cache is dead can still load what an object store holds: the worker has the way there
and the credentials, the trainer has the memory for its state. Between them lies a small buffer,
which the trainer makes and has touched, so that it counts as the job's memory.
"""

from __future__ import annotations

import dataclasses
import mmap
from typing import Protocol
from weakref import WeakKeyDictionary

from crater_slurm.checkpoint import faults, memory, remote, restore
from crater_slurm.checkpoint.memory import LaneError
from crater_slurm.checkpoint.remote import reading
from crater_slurm.checkpoint.remote.store import Limiter, Store, Unlimited
from crater_slurm.checkpoint.services import AwayFile, Services
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.checkpoint.threads import Mailbox, Pool
from crater_slurm.job import layout, wire
from crater_slurm.job.layout import CHUNK_BYTES
from crater_slurm.job.wire import WireError

_AT_ONCE = 8
_MOST_BUFFER = 64 << 20
#: Readers of one node; more ranks than that wait for none: they are refused.
_MOST_OPEN = 64
_MOST_RANKS = 10**6
_MOST_AT = 1 << 60


class Stored:
    """An ``AwayFile`` in a store. ``manifest`` has its one file."""

    def __init__(
        self, store: Store, url: str, folder: str, manifest: layout.Manifest, limiter: Limiter
    ) -> None:
        self.manifest = manifest
        self.where = f"{url}/{folder}"
        self._store, self._folder, self._limiter = store, folder, limiter

    def read(self, start: int, into: memoryview) -> None:
        entry = self.manifest.files[0]
        reading.get_chunk(self._store, self._folder, entry, start, into, self._limiter)

    def __del__(self) -> None:
        self._store.close()


def open_file(
    spec: Spec, name: str, step: int, run: str, rank: int, limiter: Limiter | None = None
) -> Stored:
    """A rank's file of a complete step. Raises RemoteError and NotThereError."""
    store = remote.open_store(spec.remote, spec.home)
    found = restore.find(store, name, step, run)
    for part in found.parts:
        for entry in part.files:
            if entry.rank == rank:
                whole = dataclasses.replace(part, files=[entry])
                return Stored(store, spec.remote.url, found.folder, whole, limiter or Unlimited())
    raise restore.NotThereError(f"Step {step} of run {run} has no rank {rank}.")


class Reader(Protocol):
    """Who reads: a trainer's connection."""

    def send(self, message: dict[str, object], fds: tuple[int, ...] = ()) -> None: ...


class _Open:
    """One reader's buffer and, once it is found, the file."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.view = memoryview(buffer)
        self.slots = len(buffer) // CHUNK_BYTES
        self.file: AwayFile | None = None
        self.busy: set[int] = set()


class Streams:
    """All readers of the worker. The main thread alone touches it; the store is asked in a pool."""

    def __init__(self, services: Services, mailbox: Mailbox) -> None:
        self._services = services
        self._pool = Pool("crater-stream", _AT_ONCE, mailbox)
        self._open: WeakKeyDictionary[Reader, _Open] = WeakKeyDictionary()

    def open(self, reader: Reader, message: dict[str, object], fds: list[int]) -> None:
        """Find a file and say what it is: its manifest is put into the buffer. Raises WireError."""
        name, run = wire.text(message, "name", "step"), wire.text(message, "run")
        step = wire.whole(message, "step", 10**15 - 1)
        rank = wire.whole(message, "rank", _MOST_RANKS)
        if len(self._open) >= _MOST_OPEN:
            raise WireError(f"read more than {_MOST_OPEN} files past the cache at once")
        if not fds:
            raise WireError("read a file past the cache without a buffer")
        try:
            one = _Open(memory.buffer(fds[0], _MOST_BUFFER))
        except LaneError as error:
            raise WireError(f"use a buffer: {error}") from error
        self._open[reader] = one

        def then(found: AwayFile | None, error: Exception | None) -> None:
            answer: dict[str, object] = {"op": "streaming", "bytes": 0, "error": None}
            if found is None or error is not None:
                what = f"{name} {step} can't be read at the destination"
                answer["error"] = faults.sentence(what, error or OSError(), name)[:1000]
                self._open.pop(reader, None)
            else:
                answer |= _introduce(found, one)
            reader.send(answer)

        self._pool.ask(lambda: self._services.open_away(name, step, run, rank), then)

    def piece(self, reader: Reader, message: dict[str, object]) -> None:
        """Read one chunk into a slot of the buffer. Raises WireError."""
        one = self._open.get(reader)
        if one is None or one.file is None:
            raise WireError("read a piece of a file that is not open")
        file, size = one.file, one.file.manifest.files[0].size
        slot = wire.whole(message, "slot", one.slots - 1)
        at = wire.whole(message, "at", min(_MOST_AT, size - 1))
        if at % CHUNK_BYTES or slot in one.busy:
            raise WireError(f"read a piece at {at} into slot {slot}: chunks, one for each slot")
        count = min(CHUNK_BYTES, size - at)
        one.busy.add(slot)

        def work() -> int:
            # Not into the trainer's memory at once: it could change what was just compared.
            data = memoryview(bytearray(count))
            file.read(at, data)
            one.view[slot * CHUNK_BYTES : slot * CHUNK_BYTES + count] = data
            return count

        def then(done: int | None, error: Exception | None) -> None:
            one.busy.discard(slot)
            said = faults.sentence("A piece can't be read", error, file.where) if error else None
            reader.send({"op": "piece", "slot": slot, "bytes": done or 0, "error": said})

        self._pool.ask(work, then)


def _introduce(found: AwayFile, one: _Open) -> dict[str, object]:
    text = found.manifest.to_json().encode()
    if len(text) > len(one.view):
        return {"error": f"The manifest of {found.where} has {len(text)} bytes: too many."}
    one.view[: len(text)] = text
    one.file = found
    return {"bytes": len(text), "folder": found.where}
