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

from crater_slurm.checkpoint import checksum
from crater_slurm.checkpoint.remote.retry import Patience
from crater_slurm.checkpoint.remote.store import (
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
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FILE_MODE, _FOLDER_MODE = 0o640, 0o750
_SYNC_BYTES = 256 << 20
_MOST_TEXT = 64 << 20
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
                fd = _open_own(partial, folder)
                try:
                    self._copy(source, fd, entry, transfer)
                    _sync(fd, partial, folder)
                    if self._read_back:
                        self._compare(fd, entry, key)
                finally:
                    os.close(fd)
                os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)

        self._do(work, f"write {key}")

    def _copy(self, source: Source, fd: int, entry: layout.FileEntry, transfer: Transfer) -> None:
        at = _agreed(fd, entry)
        os.ftruncate(fd, at)
        transfer.progress(at)
        unsynced = 0
        for start, count in pieces(entry.size, layout.CHUNK_BYTES):
            if start < at:
                continue
            transfer.check()
            transfer.limiter.take(count)
            _write(fd, source.read(start, count), start)
            transfer.progress(count)
            unsynced += count
            if unsynced >= _SYNC_BYTES:  # so that dirty pages of others don't wait behind ours
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, start + count, os.POSIX_FADV_DONTNEED)
                unsynced = 0

    def _compare(self, fd: int, entry: layout.FileEntry, key: str) -> None:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        at = _agreed(fd, entry)
        if at != entry.size:
            os.ftruncate(fd, 0)
            raise RemoteError(f"{self._root}: {key} differs after byte {at} when read back.")

    def put_text(self, key: str, text: str) -> None:
        step, _, name = key.partition("/")

        def work() -> None:
            with self._step(step, create=True) as folder:
                _put_partial(name, text, folder)
                os.rename(layout.partial_name(name), name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
                if _get_text(name, folder) != text:
                    raise RemoteError(f"{self._root}: {key} differs when read back.")

        self._do(work, f"write {key}")

    def claim(self, key: str, text: str) -> str:
        step, _, name = key.partition("/")

        def work() -> str:
            with self._step(step, create=True) as folder:
                # A name of its own, since other nodes of the job may do the same now.
                temporary = f".{name}.{os.uname().nodename[:64]}.{os.getpid()}.partial"
                _put_partial(name, text, folder, temporary)
                try:
                    with contextlib.suppress(FileExistsError):
                        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                finally:
                    os.unlink(temporary, dir_fd=folder)
                os.fsync(folder)
                return _get_text(name, folder)

        return self._do(work, f"write {key}")

    def get_text(self, key: str) -> str | None:
        step, _, name = key.partition("/")

        def work() -> str:
            with self._step(step) as folder:
                return _get_text(name, folder)

        return self._or(work, None, f"read {key}")

    def get_range(self, key: str, start: int, into: memoryview) -> None:
        step, _, name = key.partition("/")

        def work() -> None:
            with self._step(step) as folder:
                fd = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
                try:
                    if _read(fd, start, into) != len(into):
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
                        for one in (name, layout.partial_name(name)):
                            with contextlib.suppress(FileNotFoundError):
                                os.unlink(one, dir_fd=folder)
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


def _open_own(name: str, folder: int) -> int:
    """A file of our own to write, made or gone on with; raises OSError or RemoteError."""
    fd = os.open(name, os.O_RDWR | os.O_CREAT | _FILE, _FILE_MODE, dir_fd=folder)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
        os.close(fd)
        raise RemoteError(
            f"{name} is there already and is no plain file of uid {os.geteuid()} alone "
            f"(uid {status.st_uid}, {status.st_nlink} names); remove it.",
            lasting=True,
        )
    return fd


def _put_partial(name: str, text: str, folder: int, temporary: str = "") -> None:
    partial = temporary or layout.partial_name(name)
    fd = _open_own(partial, folder)
    try:
        os.ftruncate(fd, 0)
        _write(fd, text.encode(), 0)
        _sync(fd, partial, folder)
    finally:
        os.close(fd)


def _get_text(name: str, folder: int) -> str:
    fd = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
    with os.fdopen(fd, "rb") as file:
        return file.read(_MOST_TEXT).decode("utf-8", "replace")


def _sync(fd: int, name: str, folder: int) -> None:
    try:
        os.fsync(fd)
    except OSError:
        # The kernel may have dropped pages that it still shows: none of the file can be trusted.
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise


def _agreed(fd: int, entry: layout.FileEntry) -> int:
    """How many bytes from the file's beginning are what the manifest says, in whole chunks."""
    size = os.fstat(fd).st_size
    buffer = memoryview(bytearray(min(layout.CHUNK_BYTES, max(1, min(size, entry.size)))))
    for start, count in pieces(entry.size, layout.CHUNK_BYTES):
        if start + count > size or _read(fd, start, buffer[:count]) != count:
            return start
        if checksum.wrong_chunk(entry, start, buffer[:count]) is not None:
            return start
    return entry.size


def _read(fd: int, start: int, into: memoryview) -> int:
    got = 0
    while got < len(into):
        count = os.preadv(fd, [into[got:]], start + got)
        if not count:
            break
        got += count
    return got


def _write(fd: int, data: bytes | bytearray, start: int) -> None:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], start + done)
