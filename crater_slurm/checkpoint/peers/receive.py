"""A part on its way in: each piece is checked against the manifest before it is written, and the
part gets its final name when all are there, on disk.

What a cut connection left is used by the next one: pieces that are there and fit are not sent
again. Several connections may bring pieces of one part.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading

from crater_slurm.checkpoint.peers.checks import (
    pieces,
    put_in_place,
    read_piece,
    sync_folder,
    write_all,
)
from crater_slurm.checkpoint.sums import crc32
from crater_slurm.job import layout
from crater_slurm.job.layout import CHUNK_BYTES, FileEntry, Manifest

#: Bytes written to one file between two waits for the disk, so that memory does not fill with
#: what is yet to be written.
_SYNC_BYTES = 128 << 20


class DamagedError(Exception):
    """A piece is not what the manifest says; a clause."""


class Incoming:
    """One part that is being received into ``place``. Methods may be called by several threads."""

    def __init__(self, place: str, manifest: Manifest) -> None:
        self.manifest = manifest
        step = layout.step_name(manifest.step, manifest.name, manifest.run)
        self.partial_name = layout.partial_name(step)
        self._final = os.path.join(place, step)
        self._partial = os.path.join(place, self.partial_name)
        self._lock = threading.Lock()
        self._unsynced = [0] * len(manifest.files)
        self._fds: list[int] = []
        for path in (place, self._partial):
            os.makedirs(path, mode=0o700, exist_ok=True)
        self._drop_strangers()
        try:
            for entry in manifest.files:
                self._fds.append(self._open(entry))
        except OSError:
            self.close()
            raise
        self._have = [
            _good_pieces(fd, entry) for fd, entry in zip(self._fds, manifest.files, strict=True)
        ]

    def _drop_strangers(self) -> None:
        """The folder holds nothing but this manifest's files when it gets its final name."""
        wanted = {entry.name for entry in self.manifest.files}
        for name in os.listdir(self._partial):
            if name not in wanted:
                path = os.path.join(self._partial, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)

    def _open(self, entry: FileEntry) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(os.path.join(self._partial, entry.name), flags, 0o600)
        if os.fstat(fd).st_size != entry.size:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, entry.size)
            if entry.size:
                os.posix_fallocate(fd, 0, entry.size)
        return fd

    def missing(self) -> list[list[int]]:
        """[file, piece] of what has not come yet."""
        with self._lock:
            return [
                [number, piece]
                for number, have in enumerate(self._have)
                for piece, there in enumerate(have)
                if not there
            ]

    def write(self, file: int, piece: int, view: memoryview) -> None:
        """Take a piece. Raises DamagedError, or OSError by the disk."""
        entry = self.manifest.files[file]
        at = piece * CHUNK_BYTES
        expected = min(CHUNK_BYTES, entry.size - at)
        if len(view) != expected or f"{crc32(view):08x}" != entry.sums[piece]:
            raise DamagedError(f"{entry.name} came damaged at byte {at}")
        write_all(self._fds[file], view, at)
        with self._lock:
            self._have[file][piece] = True
            self._unsynced[file] += len(view)
            full = self._unsynced[file] >= _SYNC_BYTES
            if full:
                self._unsynced[file] = 0
        if full:
            os.fdatasync(self._fds[file])

    def commit(self) -> str:
        """Give the part its final name, durably, and return its folder. Raises DamagedError while
        pieces are missing, or OSError."""
        if left := len(self.missing()):
            raise DamagedError(f"{left} pieces have not come")
        for fd in self._fds:
            os.fsync(fd)
        name = layout.part_name(self.manifest.ranks)
        with open(os.path.join(self._partial, name), "w", encoding="utf-8") as file:
            file.write(self.manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._partial)
        put_in_place(self._partial, self._final)
        return self._final

    def close(self) -> None:
        """Close the files; what has come stays for a next try."""
        while self._fds:
            with contextlib.suppress(OSError):
                os.close(self._fds.pop())


def _good_pieces(fd: int, entry: FileEntry) -> list[bool]:
    """Which pieces of a file are there already. A file without any data is not read."""
    have = [False] * len(entry.sums)
    if not os.fstat(fd).st_blocks or not _has_data(fd):
        return have
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(1, entry.size))))
    for number, at, length in pieces(entry):
        view = buffer[:length]
        have[number] = read_piece(fd, view, at) and f"{crc32(view):08x}" == entry.sums[number]
    return have


def _has_data(fd: int) -> bool:
    """Space that was only reserved reads as zeros and is, to the kernel, a hole or data."""
    with contextlib.suppress(OSError):
        return os.lseek(fd, 0, os.SEEK_DATA) >= 0
    return False
