"""Which steps are at a destination, read from their manifests, and which place a new one gets.

What lies there may have been written by anybody: a manifest that can't be read, that names another
step, or whose files are not all there with their sizes, makes no checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from crater_slurm.checkpoint import keep
from crater_slurm.checkpoint.remote.store import CLAIM, Listed, Store, is_ours
from crater_slurm.job import layout

_AT_ONCE = 8
_MOST_CACHED = 50_000


@dataclass(frozen=True)
class Stored:
    """One run's parts of a step in one folder; ``files`` are all that lie in the folder."""

    folder: str
    name: str
    step: int
    run: str
    parts: tuple[layout.Manifest, ...]
    files: tuple[str, ...]
    complete: bool

    @property
    def time(self) -> float:
        """When the last part was saved."""
        return max((float(part.time) for part in self.parts), default=0.0)

    @property
    def job_id(self) -> str:
        return self.parts[0].job_id

    @property
    def item(self) -> keep.Item:
        """The step as the rules see it: what is complete here is safe."""
        return keep.Item(self.name, self.step, self.run, self.time, complete=self.complete)


class Catalogue:
    """Reads a destination; remembers manifests that have not changed since."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[tuple[str, str, int, float], layout.Manifest | None] = {}
        self._lock = threading.Lock()

    def steps(self, name: str = "") -> list[Stored]:
        """All steps that have a part, newest first; only those of a name, when one is given."""
        folders = [
            folder
            for folder in self._store.list_steps()
            if (parsed := layout.parse_step_name(folder)) and name in ("", parsed[0])
        ]
        with ThreadPoolExecutor(_AT_ONCE, "crater-list") as pool:
            found = [stored for group in pool.map(self.read, folders) for stored in group]
        return sorted(found, key=lambda stored: keep.age(stored.item), reverse=True)

    def read(self, folder: str) -> list[Stored]:
        """The runs that have parts in a step's folder."""
        parsed = layout.parse_step_name(folder)
        if parsed is None:
            return []
        name, step, _ = parsed
        files = self._store.list_files(folder)
        groups: dict[tuple[str, int], list[layout.Manifest]] = {}
        for manifest in self._manifests(folder, files):
            if (manifest.name, manifest.step) == (name, step):
                groups.setdefault((manifest.run, manifest.world_size), []).append(manifest)
        sizes = {file.name: file.size for file in files}
        return [
            Stored(
                *(folder, name, step, run, tuple(parts), tuple(sizes)),
                complete=layout.covers(parts) and _all_there(parts, sizes),
            )
            for (run, _), parts in groups.items()
        ]

    def _manifests(self, folder: str, files: list[Listed]) -> Iterator[layout.Manifest]:
        for file in files:
            if not layout.is_part(file.name):
                continue
            key = (folder, file.name, file.size, file.time)
            with self._lock:
                if len(self._known) > _MOST_CACHED:
                    self._known.clear()
                known = key in self._known
            if not known:
                text = self._store.get_text(f"{folder}/{file.name}")
                self._known[key] = _manifest(text)
            manifest = self._known.get(key)
            if manifest is not None:
                yield manifest


def _manifest(text: str | None) -> layout.Manifest | None:
    try:
        return layout.Manifest.from_json(text) if text is not None else None
    except (layout.LayoutError, RecursionError):
        return None


def _all_there(parts: list[layout.Manifest], sizes: dict[str, int]) -> bool:
    return all(sizes.get(file.name) == file.size for part in parts for file in part.files)


def place(store: Store, manifest: layout.Manifest) -> str:
    """Folder at the destination for this run's step: ``step-N``, or ``step-N.<run>``.

    The first run to come claims ``step-N``; all its nodes then find their own run there. Another
    run never writes into it, for two runs' files under one name would make a false checkpoint.
    """
    plain = layout.step_name(manifest.step, manifest.name)
    own = layout.step_name(manifest.step, manifest.name, manifest.run)
    owner = store.get_text(f"{plain}/{CLAIM}")
    if owner is None:
        there = Catalogue(store).read(plain)
        if any(stored.run != manifest.run for stored in there):
            return own  # put there without a claim, by a trainer itself or by hand
        owner = store.claim(f"{plain}/{CLAIM}", manifest.run)
    return plain if owner == manifest.run else own


def outdated(stored: Stored, newer: Stored) -> bool:
    """Whether a step of another run may go because ``newer`` is the same step, complete.

    An incomplete one may still become complete, unless this job's restart ended the run itself.
    """
    if not newer.complete or (stored.name, stored.step) != (newer.name, newer.step):
        return False
    if stored.run == newer.run:
        return False
    return stored.time < newer.time if stored.complete else earlier(stored.run, newer.run)


def earlier(run: str, than: str) -> bool:
    """Whether a run is an earlier one of the same job: a restart of it comes after the one before,
    and so does, within a restart, another start of the training."""
    job, *mine = run.split(".")
    other_job, *other = than.split(".")
    if not job or job != other_job or not all(n.isdecimal() for n in (*mine, *other)):
        return False
    return [int(n) for n in mine] < [int(n) for n in other]


def remove(store: Store, folder: str) -> None:
    """Delete a step's folder: what crater puts there, manifests first."""
    store.delete(folder, [f.name for f in store.list_files(folder) if is_ours(f.name)])


def remove_part(store: Store, folder: str, part: layout.Manifest) -> None:
    """Delete one node's part of a step, and the folder when nothing else is in it."""
    store.delete(folder, [layout.part_name(part.ranks), *(file.name for file in part.files)])
    if [file.name for file in store.list_files(folder)] == [CLAIM]:
        store.delete(folder, [CLAIM])
