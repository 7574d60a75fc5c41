"""The way back: complete steps at the destination, and bringing one of them into the node's cache.

Every chunk is compared with the manifest as it arrives; chunks that an earlier try left in the
partial folder are compared too, and not fetched again when they agree. The step gets its final name
last, like one that was saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import NamedTuple

from crater_slurm.checkpoint import flush_state, remote, trees
from crater_slurm.checkpoint.folder import RESTORING, Folder, LocalStep
from crater_slurm.checkpoint.remote import reading
from crater_slurm.checkpoint.remote.catalogue import Catalogue, Stored
from crater_slurm.checkpoint.remote.store import (
    Limiter,
    StoppedError,
    Store,
    Unlimited,
    pieces,
)
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.job import layout

_AT_ONCE = 8
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Available(NamedTuple):
    """A complete step at the destination; ``time`` is when it was saved."""

    step: int
    run: str
    time: float


class NotThereError(Exception):
    """The step that was asked for is not, or no longer, complete at the destination; a sentence."""


def available(spec: Spec, name: str, store: Store | None = None) -> list[Available]:
    """Complete steps at the destination, newest first. Raises RemoteError."""
    if not spec.remote.url:
        return []
    with _opened(spec, store) as away:
        found = Catalogue(away).steps(name)
    return [Available(s.step, s.run, s.time) for s in found if s.complete]


def fetch(
    spec: Spec,
    name: str,
    step: int,
    run: str,
    ranks: Iterable[int] | None = None,
    *,
    store: Store | None = None,
    stop: threading.Event | None = None,
    limiter: Limiter | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> str:
    """Bring a step into the cache: all ranks, or some; the folder that it has then.

    Ranks of that run that are here and good are not fetched, others join them. Raises RemoteError,
    NotThereError, StoppedError, and OSError of the cache. What was fetched stays in a folder of its
    own for the next try. One at a time in a cache: who comes second finds what the first brought.
    """
    cache = Folder(spec.folder)
    hidden = f"{RESTORING}{layout.step_name(step, name, run)}"
    with _opened(spec, store) as away:
        stored = find(away, name, step, run)
        there = cache.find(name, step, run)
        asked = None if ranks is None else set(ranks)
        if there is not None and there.damage(asked):
            # All of it anew: what is mended in place would change under a reader's eyes.
            stored_ranks = {rank for part in stored.parts for rank in part.ranks}
            asked = None if asked is None else asked | (there.ranks & stored_ranks)
            there = None
        wanted = _wanted(spec, stored, asked, there)
        if wanted is None:
            assert there is not None
            return there.folder
        event = stop or threading.Event()
        work = _Fetch(away, stored.folder, event, limiter or Unlimited(), progress)
        _fill(spec.folder, hidden, work, wanted)
    final = cache.finish(layout.step_name(step, name), wanted, hidden)
    if there is None:  # what it joined may have been saved here, and still be to flush
        flush_state.mark_flushed(cache.file(final), wanted.run, spec.remote.url)
    _tidy(spec.folder)
    return cache.file(final)


def _tidy(folder: str) -> None:
    """Remove what earlier tries of other steps left: a newer one is here."""
    top = os.open(folder, _FOLDER)
    try:
        for name in os.listdir(top):
            if name.startswith(RESTORING):
                with contextlib.suppress(OSError):
                    trees.remove(name, top)
    finally:
        os.close(top)


def place(spec: Spec, name: str, step: int, run: str) -> str | None:
    """The folder of a step at a destination that is a path; None where it is none.

    Raises RemoteError and NotThereError.
    """
    if not spec.remote.url.startswith("/"):
        return None
    with _opened(spec, None) as away:
        return f"{spec.remote.url}/{find(away, name, step, run).folder}"


@contextlib.contextmanager
def _opened(spec: Spec, store: Store | None) -> Iterator[Store]:
    if store is not None:
        yield store
        return
    own = remote.open_store(spec.remote, spec.home)
    try:
        yield own
    finally:
        own.close()


def _fill(parent: str, hidden: str, work: _Fetch, wanted: layout.Manifest) -> None:
    top = os.open(parent, _FOLDER)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(hidden, _FOLDER_MODE, dir_fd=top)
        folder = os.open(hidden, _FOLDER, dir_fd=top)
        try:
            _clear(folder, {entry.name for entry in wanted.files})
            work.files(folder, wanted.files)
        finally:
            os.close(folder)
    finally:
        os.close(top)


def find(store: Store, name: str, step: int, run: str) -> Stored:
    """A complete step of a run. Raises RemoteError and NotThereError."""
    known = Catalogue(store)
    for folder in (layout.step_name(step, name), layout.step_name(step, name, run)):
        for stored in known.read(folder):
            if stored.run == run and stored.complete:
                return stored
    raise NotThereError(
        f"Step {step} of run {run} is not complete at {store.where}; "
        "`crater checkpoints list` shows what is."
    )


def _wanted(
    spec: Spec, stored: Stored, ranks: set[int] | None, there: LocalStep | None
) -> layout.Manifest | None:
    """The part that is to be fetched; None when all of it is there."""
    first = stored.parts[0]
    files = {
        entry.name: (entry, part.node)
        for part in stored.parts
        for entry in part.files
        if ranks is None or entry.rank in ranks
    }
    missing = (ranks or set()) - {entry.rank for entry, _ in files.values()}
    if missing or not files:
        raise NotThereError(
            f"Step {stored.step} has {first.world_size} ranks; "
            f"rank {min(missing, default=0)} is none of them."
        )
    here = there.ranks if there else set()
    chosen = sorted(
        ((entry, node) for entry, node in files.values() if entry.rank not in here),
        key=lambda pair: pair[0].rank,
    )
    if not chosen:
        return None
    # A part that joins this node's own is not this node's: it is at the destination already.
    node = spec.node if there is None else chosen[0][1]
    entries = [entry for entry, _ in chosen]
    return dataclasses.replace(first, files=entries, node=node, time=stored.time)


def _clear(folder: int, names: set[str]) -> None:
    """Remove what an earlier try of something else left: it would get the final name, too."""
    with os.scandir(folder) as found:
        old = [entry.name for entry in found]
    for name in old:
        if name not in names:
            os.unlink(name, dir_fd=folder)


@dataclasses.dataclass(frozen=True, slots=True)
class _Fetch:
    store: Store
    remote_folder: str
    stop: threading.Event
    limiter: Limiter
    progress: Callable[[int], None]

    def files(self, folder: int, entries: list[layout.FileEntry]) -> None:
        """Fetch files into an open folder, their chunks side by side, and fsync them."""
        fds: dict[str, int] = {}
        try:
            for entry in entries:
                fds[entry.name] = _open_file(folder, entry)
            self._chunks(fds, entries)
            for fd in fds.values():
                os.fsync(fd)
        finally:
            for fd in fds.values():
                os.close(fd)

    def _chunks(self, fds: dict[str, int], entries: list[layout.FileEntry]) -> None:
        failed = threading.Event()

        def one(entry: layout.FileEntry, start: int, count: int) -> None:
            if self.stop.is_set() or failed.is_set():
                raise StoppedError
            self._chunk(fds[entry.name], entry, start, count)

        with ThreadPoolExecutor(_AT_ONCE, "crater-fetch") as pool:
            waiting = [
                pool.submit(one, entry, start, count)
                for entry in entries
                for start, count in pieces(entry.size, layout.CHUNK_BYTES)
            ]
            done, _ = wait(waiting, return_when=FIRST_EXCEPTION)
            errors = [error for future in done if (error := future.exception())]
            if errors:
                failed.set()
                pool.shutdown(cancel_futures=True)
                raise next((e for e in errors if not isinstance(e, StoppedError)), errors[0])

    def _chunk(self, fd: int, entry: layout.FileEntry, start: int, count: int) -> None:
        buffer = memoryview(bytearray(count))
        if os.preadv(fd, [buffer], start) == count and reading.agrees(entry, start, buffer):
            self.progress(count)
            return
        reading.get_chunk(self.store, self.remote_folder, entry, start, buffer, self.limiter)
        written = 0
        while written < count:
            written += os.pwrite(fd, buffer[written:], start + written)
        self.progress(count)


def _open_file(folder: int, entry: layout.FileEntry) -> int:
    how = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(entry.name, how, _FILE_MODE, dir_fd=folder)
    try:
        os.ftruncate(fd, entry.size)
        if entry.size:  # a full disk is found now, not at the end
            os.posix_fallocate(fd, 0, entry.size)
    except OSError:
        os.close(fd)
        raise
    return fd
