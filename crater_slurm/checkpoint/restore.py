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

from crater_slurm.checkpoint import checksum, flush_state, folders, remote
from crater_slurm.checkpoint.remote.catalogue import Catalogue, Stored
from crater_slurm.checkpoint.remote.store import (
    Limiter,
    RemoteError,
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

    Raises RemoteError, NotThereError, StoppedError, and OSError of the cache. What was fetched
    stays in the partial folder for the next try.
    """
    final = layout.step_name(step, name)
    partial = layout.partial_name(final)
    with _opened(spec, store) as away:
        stored = _find(away, name, step, run)
        entries, manifest = _wanted(spec, stored, None if ranks is None else set(ranks))
        event = stop or threading.Event()
        work = _Fetch(away, stored.folder, event, limiter or Unlimited(), progress)
        _fill(spec.folder, partial, work, entries, manifest)
    flush_state.mark_flushed(f"{spec.folder}/{partial}", manifest.run, spec.remote.url)
    folders.publish(spec.folder, partial, final)
    return f"{spec.folder}/{final}"


def place(spec: Spec, name: str, step: int, run: str) -> str | None:
    """The folder of a step at a destination that is a path; None where it is none.

    Raises RemoteError and NotThereError.
    """
    if not spec.remote.url.startswith("/"):
        return None
    with _opened(spec, None) as away:
        return f"{spec.remote.url}/{_find(away, name, step, run).folder}"


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


def _fill(
    parent: str,
    partial: str,
    work: _Fetch,
    entries: list[layout.FileEntry],
    manifest: layout.Manifest,
) -> None:
    top = os.open(parent, _FOLDER)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(partial, _FOLDER_MODE, dir_fd=top)
        folder = os.open(partial, _FOLDER, dir_fd=top)
        try:
            _clear(folder, {entry.name for entry in entries})
            work.files(folder, entries)
            _write_manifest(folder, manifest)
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        os.close(top)


def _find(store: Store, name: str, step: int, run: str) -> Stored:
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
    spec: Spec, stored: Stored, ranks: set[int] | None
) -> tuple[list[layout.FileEntry], layout.Manifest]:
    first = stored.parts[0]
    entries = {
        entry.name: entry
        for part in stored.parts
        for entry in part.files
        if ranks is None or entry.rank in ranks
    }
    chosen = sorted(entries.values(), key=lambda entry: entry.rank)
    missing = (ranks or set()) - {entry.rank for entry in chosen}
    if missing or not chosen:
        raise NotThereError(
            f"Step {stored.step} has {first.world_size} ranks; "
            f"rank {min(missing, default=0)} is none of them."
        )
    manifest = dataclasses.replace(first, files=chosen, node=spec.node, time=stored.time)
    return chosen, manifest


def _clear(folder: int, names: set[str]) -> None:
    """Remove what an earlier try of something else left: it would get the final name, too."""
    with os.scandir(folder) as found:
        old = [entry.name for entry in found]
    for name in old:
        if name not in names:
            os.unlink(name, dir_fd=folder)


def _write_manifest(folder: int, manifest: layout.Manifest) -> None:
    how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(layout.part_name(manifest.ranks), how, _FILE_MODE, dir_fd=folder)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(fd)


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
        if os.preadv(fd, [buffer], start) == count and _agrees(entry, start, buffer):
            self.progress(count)
            return
        self.limiter.take(count)
        for _ in range(2):  # a body may be damaged on the way; what lies there damaged stays so
            self.store.get_range(f"{self.remote_folder}/{entry.name}", start, buffer)
            if _agrees(entry, start, buffer):
                break
        else:
            raise RemoteError(
                f"{self.store.where}: {self.remote_folder}/{entry.name} is damaged between byte "
                f"{start} and {start + count}; an older step may be whole.",
                lasting=True,
            )
        written = 0
        while written < count:
            written += os.pwrite(fd, buffer[written:], start + written)
        self.progress(count)


def _agrees(entry: layout.FileEntry, start: int, data: memoryview) -> bool:
    return checksum.wrong_chunk(entry, start, data) is None


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
