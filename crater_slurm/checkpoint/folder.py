"""The job's checkpoint folder: partial folders, final names, what is there, what can be finished.

All of it blocks and is called from one pool thread, with the job's user's rights. Folders are
opened without following symbolic links and everything inside is done relative to them, so a link
in the way is at worst removed, never gone through. Nothing complete is ever removed by guess.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from crater_slurm.checkpoint import entries, finishing, sums
from crater_slurm.checkpoint.trees import open_folder, remove, tree_bytes
from crater_slurm.job import layout
from crater_slurm.job.layout import FileEntry, Manifest

#: Begins the name of what is being restored: apart from what is being saved, which may be the same
#: step, and from what is swept.
RESTORING = ".restoring-"
#: Without waiting for what a fifo's other end does.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True)
class LocalStep:
    """A step that has its final name: the parts that lie here, of one run, without their sums."""

    folder: str
    name: str
    step: int
    run: str
    parts: tuple[Manifest, ...]

    @property
    def bytes(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def time(self) -> float:
        return max(part.time for part in self.parts)

    @property
    def ranks(self) -> set[int]:
        return {rank for part in self.parts for rank in part.ranks}

    def own(self, node: str) -> bool:
        """Whether a node's own part is among them: another's is flushed by others."""
        return any(part.node == node for part in self.parts)

    def ranks_of(self, node: str) -> set[int]:
        """Ranks whose files a node's own parts hold."""
        return {rank for part in self.parts if part.node == node for rank in part.ranks}

    def ranks_since(self, since: float) -> set[int]:
        """Ranks of the parts that were saved at ``since`` or later."""
        return {rank for part in self.parts if part.time >= since for rank in part.ranks}

    def damage(self, ranks: Collection[int] | None) -> str:
        """What is wrong with the files of these ranks, or all; empty when nothing is. A trainer
        reads what it sees in the cache by itself, so who asks has mostly found it damaged."""
        for part in layout.read_parts(self.folder):
            for file in part.files if part.run == self.run else ():
                path = f"{self.folder}/{file.name}"
                asked = ranks is None or file.rank in ranks
                if asked and (wrong := layout.check_file(path, file, sums.crc32)):
                    return wrong
        return ""

    @property
    def whole(self) -> bool:
        """Whether every rank of the world lies here."""
        return layout.covers(list(self.parts))


@dataclass(frozen=True)
class Leftover:
    """A partial folder found at the start: what of it is safe on disk, and when it changed."""

    name: str
    changed_at: float
    kept: dict[int, entries.Entry] = field(default_factory=dict)


class Folder:
    """The folder at ``path``. Methods raise OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._known = entries.Known()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        fd = open_folder(self.path)
        try:
            yield fd
        finally:
            os.close(fd)

    def file(self, name: str) -> str:
        """Path of something in it."""
        return os.path.join(self.path, name)

    def partial(self, name: str) -> int:
        """An open partial folder of a step's final name, made when it is not there."""
        with self._opened() as parent:
            for _ in range(3):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(layout.partial_name(name), 0o700, dir_fd=parent)
                try:
                    return open_folder(layout.partial_name(name), parent)
                except FileNotFoundError:
                    continue  # removed meanwhile
                except OSError as error:
                    if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                        raise
                    os.unlink(layout.partial_name(name), dir_fd=parent)
            raise FileExistsError(errno.EEXIST, "it can't be made", layout.partial_name(name))

    def record(self, name: str, entry: entries.Entry) -> None:
        """Note in the partial folder that a rank's file is whole and on disk."""
        fd = self.partial(name)
        try:
            entries.write(fd, entry)
        finally:
            os.close(fd)

    def take(self, name: str, file: str, rank: int, size: int) -> FileEntry:
        """Sum a file that the trainer wrote into the partial folder itself, and sync it."""
        folder = self.partial(name)
        try:
            fd = os.open(file, _READ, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                raise ValueError(f"{file} has {status.st_size} bytes, not the {size} announced")
            os.fsync(fd)
            return FileEntry(file, rank, size, sums.file_sums(fd, size))
        finally:
            os.close(fd)

    def finish(self, name: str, manifest: Manifest, restored: str = "", since: float = 0.0) -> str:
        """Give a step whose files are all on disk its final name; the name.

        Where ranks of the same run have written themselves into the step already, without a
        worker, and not before ``since``, their files stay and these join them. A step that was
        ``restored``, into the folder of that name, never replaces another run's: it is then called
        after its run.
        """
        hidden = restored or layout.partial_name(name)
        mine = ""
        with self._opened() as parent:
            partial = open_folder(hidden, parent)
            try:
                for file in manifest.files:
                    status = os.stat(file.name, dir_fd=partial, follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
                        raise OSError(errno.EIO, f"{file.name} has been changed")
                for target in (name, f"{name}.{manifest.run}"):
                    there = [s for s in self._read_final(parent, target) if s.run == manifest.run]
                    others = there[0].ranks_since(since) if there else set()
                    if others - set(manifest.ranks):
                        taken = {file.name for part in there[0].parts for file in part.files}
                        finishing.join(parent, partial, target, manifest, others, taken)
                        remove(hidden, parent)
                        return target
                    mine = target if there else mine
                finishing.complete(partial, manifest)
            finally:
                os.close(partial)
            if restored and mine:  # it was damaged here, or not all of it was
                finishing.put_in_place(parent, hidden, mine)
                return mine
            if restored:
                return finishing.give_free_name(parent, hidden, name, manifest.run)
            finishing.put_in_place(parent, hidden, name)
            return name

    def find(self, name: str, step: int, run: str) -> LocalStep | None:
        """What lies here of a run's step."""
        same = (s for s in self.scan() if (s.name, s.step, s.run) == (name, step, run))
        return max(same, key=lambda s: len(s.ranks), default=None)

    def remove(self, name: str) -> None:
        """Remove a complete step: first its final name goes, so that it is never half there."""
        with self._opened() as parent:
            try:
                aside = finishing.set_aside(parent, name)
            except FileNotFoundError:
                return
            os.fsync(parent)
            remove(aside, parent)

    def withdraw(self, name: str, ranks: dict[int, str]) -> None:
        """Remove finished files (by rank) and their notes from a partial folder.

        What else is there may be a trainer's, who writes by itself by now; the folder stays.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._opened() as parent:
            fd = open_folder(layout.partial_name(name), parent)
            try:
                for entry in entries.read(fd):
                    if entry.rank in ranks:
                        entries.forget(fd, entry)
                for file in ranks.values():
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(file, dir_fd=fd)
            finally:
                os.close(fd)

    def drop_unused(self, name: str, since: float) -> bool:
        """Remove a partial folder, unless something in it has changed after ``since``."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._opened() as parent:
            fd = open_folder(layout.partial_name(name), parent)
            try:
                if entries.changed_at(fd) > since:
                    return False
            finally:
                os.close(fd)
            remove(layout.partial_name(name), parent)
        return True

    def clean(self, run: str) -> list[LocalStep]:
        """After the job: finish what can be, remove what can't; the steps that are there."""
        self.recover(run)
        self.drop_all()
        return self.scan()

    def drop_all(self) -> None:
        """Remove all partial folders: nobody is left who could finish one."""
        with contextlib.suppress(FileNotFoundError), self._opened() as parent:
            for name in os.listdir(parent):
                if layout.is_partial(name) or name.startswith(RESTORING):
                    with contextlib.suppress(OSError):
                        remove(name, parent)

    def scan(self) -> list[LocalStep]:
        """The steps with a final name whose manifests can be read and whose files are there."""
        found = []
        with contextlib.suppress(FileNotFoundError), self._opened() as parent:
            for name in sorted(os.listdir(parent)):
                step = layout.parse_step_name(name)
                if step is not None:
                    with contextlib.suppress(OSError):
                        found += self._read(parent, name)
        return found

    def _read(self, parent: int, name: str) -> list[LocalStep]:
        fd = open_folder(name, parent)
        try:
            runs: dict[str, list[Manifest]] = {}
            for part in self._known.read_parts(fd):
                if entries.files_are_there(fd, part):
                    runs.setdefault(part.run, []).append(part)
        finally:
            os.close(fd)
        path = self.file(name)
        return [
            LocalStep(path, parts[0].name, parts[0].step, run, tuple(parts))
            for run, parts in runs.items()
            if layout.parse_step_name(name)[:2] == (parts[0].name, parts[0].step)  # type: ignore[index]
        ]

    def recover(self, run: str) -> list[Leftover]:
        """Finish the partial folders that can be finished; what is there of the others.

        Where the step is there already, the present ``run``'s counts, else the newer one.
        """
        left = []
        with contextlib.suppress(FileNotFoundError), self._opened() as parent:
            for partial in sorted(os.listdir(parent)):
                if layout.is_partial(partial):
                    with contextlib.suppress(OSError):
                        left += self._recover(parent, partial, run)
        return left

    def _recover(self, parent: int, partial: str, run: str) -> list[Leftover]:
        name = partial[1:-8]
        fd = open_folder(partial, parent)
        try:
            changed_at = entries.changed_at(fd)
            kept = {e.rank: e for e in entries.read(fd)}
            parts = [p for p in entries.read_parts(fd) if entries.files_are_there(fd, p)]
        finally:
            os.close(fd)
        whole = parts[0] if len(parts) == 1 else entries.joined(list(kept.values()))
        if whole and layout.step_name(whole.step, whole.name) == name:
            if self._worth(parent, name, whole, run):
                self.finish(name, whole)
                return []
            kept = {}  # an older one of a step that is there: of no use
        return [Leftover(name, changed_at, kept)]

    def _worth(self, parent: int, name: str, whole: Manifest, run: str) -> bool:
        """Whether a whole part, found in a partial folder, is newer than what has the name."""
        finals = self._read_final(parent, name)
        finals += self._read_final(parent, f"{name}.{whole.run}")
        same = [step for step in finals if step.run == whole.run]
        if same:
            return not any(step.ranks >= set(whole.ranks) for step in same)
        newest = max(
            ((layout.is_of_run(step.run, run), step.time) for step in finals), default=(False, 0.0)
        )
        return newest < (layout.is_of_run(whole.run, run), whole.time)

    def _read_final(self, parent: int, name: str) -> list[LocalStep]:
        try:
            return self._read(parent, name)
        except (FileNotFoundError, NotADirectoryError):  # also for a link in the way
            return []

    def used_bytes(self) -> int:
        """Bytes on disk of all that lies in the folder."""
        try:
            with self._opened() as fd:
                return tree_bytes(fd)
        except FileNotFoundError:
            return 0
