"""A folder of a shared file system as a destination: NFS, Lustre, GPFS, all with fsync and rename.

Each file is written as ``.NAME.partial``, fsynced, renamed; no lock is taken, none is needed. A
partial file found later is gone on with as far as its bytes agree with the manifest. Links are not
followed below the destination's own folder, and a folder that lost its mount is not written into.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from crater_slurm.checkpoint.remote import files
from crater_slurm.checkpoint.remote.retry import Patience
from crater_slurm.checkpoint.remote.store import (
    CLAIM,
    Listed,
    RemoteError,
    Source,
    Stat,
    Transfer,
    is_ours,
    pieces,
)
from crater_slurm.job import layout

Result = TypeVar("Result")

OPTIONS = {
    "mount": "folder that must be a mount point, so that nothing lands below a missing mount",
    "verify": "auto, read_back",
}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER_MODE = 0o750
_SYNC_BYTES = 256 << 20
_LASTING = {
    errno.EROFS: "it is read-only",
    errno.EACCES: "access denied",
    errno.EPERM: "access denied",
    errno.ELOOP: "a symbolic link is in the way",
    errno.ENOTDIR: "something that is no folder is in the way",
    errno.EISDIR: "a folder is in the way",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EFBIG: "files can't be that large there",
}
_PASSING = {
    errno.ENOSPC: "it is full",
    errno.EDQUOT: "the quota is used up",
    errno.ESTALE: "the file server forgot the file",
    errno.ENOENT: "the folder is gone",
}


class PathStore:
    """Steps in a folder, which is made when its parent can be written."""

    def __init__(
        self, root: str, options: dict[str, Any], patience: Patience | None = None
    ) -> None:
        self._root = root
        self._mount = str(options.get("mount", ""))
        self._read_back = options.get("verify", "auto") == "read_back"
        self._patience = patience or Patience(attempts=3, first_seconds=0.2)
        self._device: int | None = None

    @property
    def where(self) -> str:
        return self._root

    def list_steps(self) -> list[str]:
        def work() -> list[str]:
            with self._top() as top, os.scandir(top) as entries:
                names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
            return sorted(name for name in names if layout.parse_step_name(name))

        return self._or(work, [], "list steps")

    def list_files(self, step: str) -> list[Listed]:
        def work() -> list[Listed]:
            found = []
            with self._step(step) as folder, os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode) and not entry.name.startswith("."):
                            found.append(Listed(entry.name, status.st_size, status.st_mtime))
            return sorted(found, key=lambda file: file.name)

        return self._or(work, [], f"list {step}")

    def put_file(
        self, source: Source, key: str, entry: layout.FileEntry, transfer: Transfer
    ) -> None:
        step, _, name = key.partition("/")

        def work() -> None:
            with self._step(step, create=True) as folder:
                partial = layout.partial_name(name)
                fd = files.open_own(partial, folder)
                try:
                    self._copy(source, fd, entry, transfer)
                    files.sync(fd, partial, folder)
                    if self._read_back:
                        self._compare(fd, entry, key)
                finally:
                    os.close(fd)
                os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)

        self._do(work, f"write {key}")

    def _copy(self, source: Source, fd: int, entry: layout.FileEntry, transfer: Transfer) -> None:
        at = files.agreed(fd, entry)
        os.ftruncate(fd, at)
        transfer.progress(at)
        unsynced = 0
        for start, count in pieces(entry.size, layout.CHUNK_BYTES):
            if start < at:
                continue
            transfer.check()
            transfer.limiter.take(count)
            files.write(fd, source.read(start, count), start)
            transfer.progress(count)
            unsynced += count
            if unsynced >= _SYNC_BYTES:  # so that dirty pages of others don't wait behind ours
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, start + count, os.POSIX_FADV_DONTNEED)
                unsynced = 0

    def _compare(self, fd: int, entry: layout.FileEntry, key: str) -> None:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        at = files.agreed(fd, entry)
        if at != entry.size:
            os.ftruncate(fd, 0)
            raise RemoteError(f"{self._root}: {key} differs after byte {at} when read back.")

    def put_text(self, key: str, text: str) -> None:
        step, _, name = key.partition("/")

        def work() -> None:
            with self._step(step, create=True) as folder:
                files.put_partial(name, text, folder)
                os.rename(layout.partial_name(name), name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
                if files.get_text(name, folder) != text:
                    raise RemoteError(f"{self._root}: {key} differs when read back.")

        self._do(work, f"write {key}")

    def claim(self, key: str, text: str) -> str:
        step, _, name = key.partition("/")

        def work() -> str:
            with self._step(step, create=True) as folder:
                # A name of its own, since other nodes of the job may do the same now.
                temporary = files.own_partial(name)
                files.remove([temporary], folder)
                files.put_partial(name, text, folder, temporary)
                try:
                    with contextlib.suppress(FileExistsError):
                        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                finally:
                    os.unlink(temporary, dir_fd=folder)
                files.remove(files.own_partials(name, folder, dead=True), folder)
                os.fsync(folder)
                return files.get_text(name, folder)

        return self._do(work, f"write {key}")

    def get_text(self, key: str) -> str | None:
        step, _, name = key.partition("/")

        def work() -> str:
            with self._step(step) as folder:
                return files.get_text(name, folder)

        return self._or(work, None, f"read {key}")

    def get_range(self, key: str, start: int, into: memoryview) -> None:
        step, _, name = key.partition("/")

        def work() -> None:
            with self._step(step) as folder:
                fd = os.open(name, os.O_RDONLY | files.FLAGS, dir_fd=folder)
                try:
                    if files.read(fd, start, into) != len(into):
                        raise RemoteError(f"{self._root}: {key} ends early.", lasting=True)
                finally:
                    os.close(fd)

        self._do(work, f"read {key}")

    def head(self, key: str) -> Stat | None:
        step, _, name = key.partition("/")

        def work() -> Stat | None:
            with self._step(step) as folder:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                return Stat(status.st_size) if stat.S_ISREG(status.st_mode) else None

        return self._or(work, None, f"look at {key}")

    def delete(self, step: str, names: list[str]) -> None:
        def work() -> None:
            with self._top() as top:
                with self._step(step) as folder:
                    # Manifests first: without them nobody takes what is left for a checkpoint.
                    for name in sorted(filter(is_ours, names), key=lambda n: not layout.is_part(n)):
                        files.remove([name, layout.partial_name(name)], folder)
                    # Of a process that was killed, perhaps on a node that never comes back.
                    files.remove(files.own_partials(CLAIM, folder), folder)
                with contextlib.suppress(OSError):
                    os.rmdir(step, dir_fd=top)

        self._or(work, None, f"delete {step}")

    def discard(self, key: str, resume: dict[str, Any]) -> None:
        del resume
        step, _, name = key.partition("/")

        def work() -> None:
            with self._step(step) as folder:
                os.unlink(layout.partial_name(name), dir_fd=folder)

        self._or(work, None, f"delete {key}")

    def tidy(self, own: set[str], active: set[str]) -> int:
        del active
        for key in own:
            self.discard(key, {})
        return 0

    def close(self) -> None:
        return None

    # What follows is the same for all.

    @contextlib.contextmanager
    def _top(self, *, create: bool = False) -> Iterator[int]:
        if self._mount and not os.path.ismount(self._mount):
            raise RemoteError(f"{self._root}: {self._mount} is not mounted.")
        if create and self._device is None:
            os.makedirs(self._root, _FOLDER_MODE, exist_ok=True)
        # The destination itself may be reached by the site's own links.
        fd = os.open(self._root, _FOLDER & ~os.O_NOFOLLOW)
        try:
            device = os.fstat(fd).st_dev
            if self._device not in (None, device):
                raise RemoteError(
                    f"{self._root} is on another file system than before; its mount is missing."
                )
            self._device = device
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _step(self, step: str, *, create: bool = False) -> Iterator[int]:
        with self._top(create=create) as top:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(step, _FOLDER_MODE, dir_fd=top)
                    os.fsync(top)
            fd = os.open(step, _FOLDER, dir_fd=top)
            try:
                yield fd
            finally:
                os.close(fd)

    def _do(self, work: Callable[[], Result], what: str) -> Result:
        def once() -> Result:
            try:
                return work()
            except OSError as error:
                raise self._error(error, what) from error

        return self._patience.call(once)

    def _or(self, work: Callable[[], Result], absent: Result, what: str) -> Result:
        try:
            return self._do(work, what)
        except RemoteError as error:
            if not error.missing:
                raise
            return absent

    def _error(self, error: OSError, what: str) -> RemoteError:
        number = error.errno or 0
        reason = _LASTING.get(number) or _PASSING.get(number) or error.strerror or "it failed"
        return RemoteError(
            f"{self._root}: couldn't {what}: {reason}.",
            lasting=number in _LASTING,
            missing=number == errno.ENOENT,
        )
