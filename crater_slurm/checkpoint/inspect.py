"""What lies in a place with checkpoints, and whether it is whole: any folder, or an object store.

A folder is read as a destination is, so all that is said here holds for a node's cache, a shared
file system and an object store alike. Nothing here changes what it looks at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from crater_slurm.checkpoint import checksum, restore
from crater_slurm.checkpoint.remote.catalogue import Catalogue, Stored
from crater_slurm.checkpoint.remote.store import RemoteError, Store, pieces
from crater_slurm.checkpoint.spec import Remote, Spec
from crater_slurm.job import layout

Row = dict[str, Any]
Parts = list[tuple[str, layout.Manifest]]
_MOST_FILES = 200


def steps(store: Store) -> list[Row]:
    """Each run's step that has a part there, newest first. Raises RemoteError."""
    return [row(stored) for stored in Catalogue(store).steps()]


def row(stored: Stored) -> Row:
    """A step in figures; the size is that of the parts that are there."""
    return {
        "name": stored.name,
        "step": stored.step,
        "run": stored.run,
        "time": stored.time,
        "bytes": sum(part.size for part in stored.parts),
        "ranks": len({rank for part in stored.parts for rank in part.ranks}),
        "world": stored.parts[0].world_size,
        "parts": len(stored.parts),
        "complete": stored.complete,
        "folder": stored.folder,
    }


def find(store: Store, name: str, step: int | None, run: str | None) -> list[Stored]:
    """The runs' saves of a step that are there, the newest first; of the newest complete step when
    none is asked for. Raises RemoteError."""
    there = [s for s in Catalogue(store).steps(name) if run in (None, s.run)]
    if step is None:
        newest = next((s.step for s in there if s.complete), None)
        return [s for s in there if s.step == newest]
    return [s for s in there if s.step == step]


def show(stored: Stored) -> Row:
    """A step with its parts and files; of very many files only the first."""
    files = [
        {"file": file.name, "rank": file.rank, "bytes": file.size, "node": part.node}
        for part in stored.parts
        for file in part.files
    ]
    files.sort(key=lambda file: (file["rank"], file["file"]))
    parts = [
        {
            "manifest": layout.part_name(part.ranks),
            "node": part.node,
            "job": part.job_id,
            "time": part.time,
            "ranks": len(part.ranks),
            "bytes": part.size,
        }
        for part in stored.parts[:_MOST_FILES]
    ]
    return {**row(stored), "manifests": parts, "files": files[:_MOST_FILES], "all": len(files)}


def verify(
    store: Store, stored: Stored, progress: Callable[[int], None] = lambda count: None
) -> list[str]:
    """What is wrong with a step's files by its manifests' checksums; every byte is read."""
    wrong = []
    for part in stored.parts:
        for file in part.files:
            if problem := _file(store, f"{stored.folder}/{file.name}", file, progress):
                wrong.append(f"{stored.folder}: {problem}")
    return wrong


def _file(store: Store, key: str, file: layout.FileEntry, progress: Callable[[int], None]) -> str:
    try:
        there = store.head(key)
        if there is None or there.size != file.size:
            has = "is not there" if there is None else f"has {there.size} bytes"
            return f"{file.name} {has}, its manifest says {file.size} bytes"
        for start, count in pieces(file.size, layout.CHUNK_BYTES):
            buffer = memoryview(bytearray(count))
            store.get_range(key, start, buffer)
            progress(count)
            if checksum.wrong_chunk(file, start, buffer) is not None:
                return f"{file.name} is damaged between byte {start} and {start + count}"
    except RemoteError as error:
        return f"{file.name}: {error}"
    return ""


def copy(
    store: Store, stored: Stored, folder: str, progress: Callable[[int], None] = lambda count: None
) -> str:
    """Bring a complete step into a folder, every chunk compared as it comes; where it is then.

    Raises RemoteError, NotThereError, and OSError of the folder.
    """
    os.makedirs(folder, exist_ok=True)
    spec = _spec(stored.parts, folder, Remote(url=store.where))
    return restore.fetch(spec, stored.name, stored.step, stored.run, store=store, progress=progress)


def left(store: Store, folder: str, remote: Remote, home: str) -> Iterator[tuple[Spec, Parts]]:
    """Each job's parts in a folder, and what a worker would be told that flushes them."""
    jobs: dict[str, Parts] = {}
    for stored in Catalogue(store).steps():
        for part in stored.parts:
            jobs.setdefault(part.job_id, []).append((f"{folder}/{stored.folder}", part))
    for parts in jobs.values():
        yield _spec((part for _, part in parts), folder, remote, home), parts


def _spec(parts: Iterable[layout.Manifest], folder: str, remote: Remote, home: str = "") -> Spec:
    first = next(iter(parts))
    return Spec(
        job_id=first.job_id,
        cluster=first.cluster,
        user="",
        uid=os.getuid(),
        gid=os.getgid(),
        node=first.node,
        run=first.run,
        folder=folder,
        home=home,
        remote=remote,
    )
