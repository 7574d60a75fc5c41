"""One step's way to the destination: its files, then its manifest, read back.

What was begun is noted beside the step and gone on with; nothing here decides which step goes, or
what becomes of one that fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from crater_slurm.checkpoint import flush_state
from crater_slurm.checkpoint.flush_state import PENDING, Step
from crater_slurm.checkpoint.remote import catalogue
from crater_slurm.checkpoint.remote.store import (
    Limiter,
    RemoteError,
    Source,
    StoppedError,
    Store,
    Transfer,
)
from crater_slurm.job import layout

_FILES_AT_ONCE = 2


class Carrier:
    """Brings steps there. ``stop`` breaks off."""

    def __init__(
        self,
        limiter: Limiter,
        stop: threading.Event,
        log: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._limiter, self._stop, self._log, self._clock = limiter, stop, log, clock

    def tidy(self, store: Store, steps: Iterable[Step]) -> None:
        """Give up what earlier workers of this node began and nobody can go on with."""
        active, own = set(), set()
        for step in steps:
            noted = step.note.files if step.state == PENDING else {}
            active |= {n["upload"] for n in noted.values() if isinstance(n.get("upload"), str)}
            manifest = step.manifest
            for run in ("", manifest.run):
                folder = layout.step_name(manifest.step, manifest.name, run)
                # A folder's files that are gone on with stay: their keys are not ours to clear.
                own |= {f"{folder}/{f.name}" for f in manifest.files if f.name not in noted}
        try:
            count = store.tidy(own, active)
        except RemoteError as error:  # perhaps not allowed to list; the flush itself may be
            self._log("warning", f"What earlier uploads left stays there: {error}")
            return
        if count:
            self._log("info", f"{store.where}: gave up {count} uploads that broke off.")

    def give_up(self, store: Store, step: Step) -> None:
        """Drop what was begun of a step."""
        manifest = step.manifest
        for name, note in step.note.files.items():
            if name in {file.name for file in manifest.files}:
                for run in ("", manifest.run):
                    folder = layout.step_name(manifest.step, manifest.name, run)
                    store.discard(f"{folder}/{name}", note)

    def bring(self, store: Store, step: Step) -> None:
        """Bring a part there whole. Raises RemoteError, SourceError, StoppedError."""
        folder = catalogue.place(store, step.manifest)
        name, text = layout.part_name(step.manifest.ranks), step.manifest.to_json()
        if store.get_text(f"{folder}/{name}") not in (None, text):
            # Saved before by this run: its manifest would not fit the files that come now.
            store.delete(folder, [name])
        with ThreadPoolExecutor(_FILES_AT_ONCE, "crater-file") as pool:
            ways = [pool.submit(self._file, store, step, folder, e) for e in step.manifest.files]
            errors = [error for way in ways if (error := way.exception())]
        if errors:
            raise next((e for e in errors if not isinstance(e, StoppedError)), errors[0])
        store.put_text(f"{folder}/{name}", text)
        if store.get_text(f"{folder}/{name}") != text:
            raise RemoteError(f"{store.where}: the manifest of {step.title} is not what was put.")
        step.note.flushed = True
        self._keep(step)

    def _file(self, store: Store, step: Step, folder: str, entry: layout.FileEntry) -> None:
        key = f"{folder}/{entry.name}"
        note = step.note.files.setdefault(entry.name, {})
        if note.get("done") is True:
            there = store.head(key)
            if there is not None and there.size == entry.size:
                step.progress(entry.size, self._clock())
                return
        note.pop("done", None)
        transfer = Transfer(
            resume=note,
            keep=lambda: self._keep(step),
            progress=lambda count: step.progress(count, self._clock()),
            stop=self._stop,
            limiter=self._limiter,
        )
        with Source(step.folder, entry) as source:
            store.put_file(source, key, entry, transfer)
        note.clear()
        note["done"] = True
        self._keep(step)

    def _keep(self, step: Step) -> None:
        try:
            with step.lock:
                step.note.write(step.folder)
        except OSError as error:  # a full cache must not stop what empties it
            self._log("warning", f"{step.title}: couldn't write {flush_state.NAME}: {error}.")
