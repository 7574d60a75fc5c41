"""What a folder of a user's holds, counted without trust: no link followed, no mount entered.

A user may put anything there, so every step is relative to an open folder, and the count ends at
a number of entries, a depth and a time. It then says that it saw only a part.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from crater_slurm.node import safefs

_BLOCK = 512
#: More levels than this cost a file descriptor each; what lies deeper is not counted.
_MAX_DEPTH = 48


@dataclass(frozen=True, slots=True)
class Count:
    """Bytes on the drive, and whether everything was seen."""

    bytes: int = 0
    whole: bool = True


@dataclass(slots=True)
class Budget:
    """How much may still be looked at; shared by all folders of one round."""

    entries: int = 500_000
    seconds: float = 20.0
    clock: Callable[[], float] = time.monotonic
    _end: float | None = None

    def take(self) -> bool:
        """Whether one more entry may be looked at."""
        if self._end is None:
            self._end = self.clock() + self.seconds
        self.entries -= 1
        # The clock is asked now and then: it costs as much as an entry.
        return self.entries >= 0 and (self.entries % 256 != 0 or self.clock() < self._end)

    @property
    def spent(self) -> bool:
        return self.entries <= 0 or (self._end is not None and self.clock() >= self._end)


def count(parent: int, name: str, budget: Budget) -> Count:
    """What the folder ``name`` in an open folder holds; nothing when it is gone or no folder."""
    try:
        with safefs.opened(name, parent) as fd:
            home = safefs.mount_id(fd)
            if home != safefs.mount_id(parent):
                return Count(0, whole=False)
            walk = _Walk(home, budget)
            walk.into(fd, 1)
            return Count(walk.bytes, walk.whole)
    except (FileNotFoundError, NotADirectoryError):
        return Count()
    except OSError:
        return Count(0, whole=False)


@dataclass(slots=True)
class _Walk:
    home: int
    budget: Budget
    bytes: int = 0
    whole: bool = True
    #: Files with several names, which count once.
    linked: set[int] = field(default_factory=set)

    def into(self, fd: int, depth: int) -> None:
        with os.scandir(fd) as entries:
            for entry in entries:
                if not self.budget.take():
                    self.whole = False
                    return
                try:
                    self._entry(fd, entry, depth)
                except FileNotFoundError:
                    continue  # the job goes on meanwhile
                except OSError:
                    self.whole = False

    def _entry(self, fd: int, entry: os.DirEntry[str], depth: int) -> None:
        if not entry.is_dir(follow_symlinks=False):
            status = entry.stat(follow_symlinks=False)
            if status.st_nlink > 1:
                if status.st_ino in self.linked:
                    return
                self.linked.add(status.st_ino)
            self.bytes += status.st_blocks * _BLOCK
        elif depth >= _MAX_DEPTH:
            self.whole = False
        else:
            self._folder(fd, entry.name, depth)

    def _folder(self, parent: int, name: str, depth: int) -> None:
        with safefs.opened(name, parent) as child:
            if safefs.mount_id(child) != self.home:
                return  # another file system's, so it fills another drive
            self.bytes += os.fstat(child).st_blocks * _BLOCK
            self.into(child, depth + 1)
