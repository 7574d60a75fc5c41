"""One rank's file while it is written: made under a name of its own, named when it is whole.

All of it may block and is called from a pool's thread. Nothing is opened through a symbolic link,
nothing that is there already is written into.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os

from crater_slurm.checkpoint import syscalls
from crater_slurm.job import layout

_serial = itertools.count(1)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def padded(length: int) -> int:
    """A length in bytes, up to the next multiple that direct I/O can write."""
    return -(-length // layout.ALIGN) * layout.ALIGN


class OutFile:
    """``name`` in an open folder, of ``size`` bytes. ``fd`` is -1 while it is not open."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.temporary = f".{name}.{os.getpid()}-{next(_serial)}.writing"
        self.fd = -1
        self.direct = True
        self.allocated = True
        self._folder = -1

    def open(self, folder: int) -> None:
        """Make the file and have its room set aside; takes over ``folder``. Raises OSError."""
        self._folder = folder
        try:
            self.fd = os.open(self.temporary, _NEW | os.O_DIRECT, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # A file system without direct I/O has made the file before it said so.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.temporary, dir_fd=folder)
            self.fd = os.open(self.temporary, _NEW, 0o600, dir_fd=folder)
            self.direct = False
        self._allocate()

    def _allocate(self) -> None:
        """So that a full disk is found before it is written to; not all file systems can."""
        if self.size:
            off = ctypes.c_long
            length = off(padded(self.size))
            try:
                syscalls.checked(syscalls.libc.fallocate(self.fd, 0, off(0), length))
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
                    raise
                self.allocated = False

    def go_buffered(self) -> None:
        """Write through the page cache from now on; raises OSError."""
        self.direct = False
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)

    def sync(self) -> None:
        """Cut to size and have it on the disk. Raises OSError."""
        os.ftruncate(self.fd, self.size)
        os.fsync(self.fd)

    def put_in_place(self) -> None:
        """Give it its name, in place of whatever has that. Raises OSError."""
        folder = self._folder
        os.rename(self.temporary, self.name, src_dir_fd=folder, dst_dir_fd=folder)

    def close(self) -> None:
        """Let go; what has not got its name is removed."""
        if self._folder >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.temporary, dir_fd=self._folder)
            os.close(self._folder)
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = self._folder = -1
