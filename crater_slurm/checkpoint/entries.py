"""What is known, on disk, of a step that is being written: one small file per finished rank.

``.rank-00002.of-4.json`` in a partial folder says that rank 2's file is whole and on the disk, and
that 4 ranks of this node save the step: it is a manifest of that one file. A worker that comes
after a killed one finishes from these what can be finished. The files lie in the user's folder, so
what they say is checked like any manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import stat
from dataclasses import dataclass

from crater_slurm.job import layout
from crater_slurm.job.layout import FileEntry, LayoutError, Manifest

_NAME = re.compile(r"\.rank-([0-9]{5,7})\.of-([0-9]{1,7})\.json\Z")
#: A manifest of 1 TiB has 2 MiB of checksums.
_MOST_BYTES = 64 << 20
_MOST_KNOWN = 10_000
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Entry:
    """One rank's finished file, of a step that ``local`` ranks of this node save."""

    rank: int
    local: int
    manifest: Manifest

    @property
    def name(self) -> str:
        return f".rank-{self.rank:05d}.of-{self.local}.json"

    @property
    def file(self) -> FileEntry:
        return self.manifest.files[0]


def put(folder: int, name: str, text: str, *, durable: bool) -> None:
    """Write a small file whole: under another name, fsync, rename. Raises OSError."""
    temporary = f".{name}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)
    fd = os.open(temporary, _NEW, 0o600, dir_fd=folder)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(fd)
    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def get(folder: int, name: str) -> str:
    """A small file's text. Raises OSError, for what is no regular file as well."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(name, flags, dir_fd=folder)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise OSError(22, "it is no small file", name)
        return file.read().decode("utf-8", "replace")


def write(folder: int, entry: Entry) -> None:
    """Note a finished rank. A power cut may cost the note, never make a wrong one of it."""
    put(folder, entry.name, entry.manifest.to_json(), durable=False)


def forget(folder: int, entry: Entry) -> None:
    """Remove a note."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(entry.name, dir_fd=folder)


def read(folder: int) -> list[Entry]:
    """The notes of an open partial folder whose files are there. Raises OSError."""
    found = []
    for name in sorted(os.listdir(folder)):
        match = _NAME.match(name)
        manifest = _manifest(folder, name) if match else None
        if not match or not manifest or len(manifest.files) != 1:
            continue
        if manifest.ranks == [int(match.group(1))] and files_are_there(folder, manifest):
            found.append(Entry(int(match.group(1)), int(match.group(2)), manifest))
    return found


def read_parts(folder: int) -> list[Manifest]:
    """The parts' manifests in an open folder; damaged ones are left out. Raises OSError."""
    names = [name for name in sorted(os.listdir(folder)) if layout.is_part(name)]
    return [found for name in names if (found := _manifest(folder, name)) is not None]


class Known:
    """Manifests read before, without their sums: there may be thousands, and they don't change."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], Manifest] = {}

    def read_parts(self, folder: int) -> list[Manifest]:
        """As ``read_parts``, but the files' sums are left out. Raises OSError."""
        return [
            found
            for name in sorted(os.listdir(folder))
            if layout.is_part(name) and (found := self._get(folder, name)) is not None
        ]

    def _get(self, folder: int, name: str) -> Manifest | None:
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return None
        key = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
        found = self._found.pop(key, None)
        if found is None and (read := _manifest(folder, name)) is not None:
            files = [dataclasses.replace(file, sums=[]) for file in read.files]
            found = dataclasses.replace(read, files=files)
        if found is not None:
            self._found[key] = found  # the latest last
            while len(self._found) > _MOST_KNOWN:
                del self._found[next(iter(self._found))]
        return found


def _manifest(folder: int, name: str) -> Manifest | None:
    try:
        return Manifest.from_json(get(folder, name))
    except (OSError, LayoutError, RecursionError):
        return None


def files_are_there(folder: int, manifest: Manifest) -> bool:
    """Whether a manifest's files are regular and of the size it says."""
    for file in manifest.files:
        try:
            status = os.stat(file.name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return False
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
            return False
    return True


def joined(found: list[Entry]) -> Manifest | None:
    """The part that these ranks make up, when they are all of this node's; else None."""
    if not found or len({(e.local, _identity(e.manifest)) for e in found}) != 1:
        return None
    if len(found) != found[0].local or len({e.file.name for e in found}) != len(found):
        return None
    first = max((e.manifest for e in found), key=lambda manifest: manifest.time)
    files = [e.file for e in sorted(found, key=lambda entry: entry.rank)]
    values = {key: value for key, value in vars(first).items() if key != "files"}
    return Manifest(files=files, **values)


def _identity(manifest: Manifest) -> tuple[object, ...]:
    return (manifest.name, manifest.step, manifest.run, manifest.world_size)


def changed_at(folder: int) -> float:
    """When something in an open folder last changed, as time.time(). Raises OSError."""
    latest = os.fstat(folder).st_mtime
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            latest = max(latest, os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime)
    return latest
