"""The read latency of the cache drive, measured a little all the time.

A few reads of 4 KiB at queue depth 1, past the page cache, from a file of the probe's own: the same
measurement as the calibration's, so that the two can be compared. It writes once, 64 MiB, and only
where there is plenty of room.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = 4096
_FILE_BYTES = 64 << 20
_READS = 48
#: At most this long is spent on one sample; a hung drive costs the thread that asks.
_BUDGET_SECONDS = 0.25
_FREE_FACTOR = 20
_NAME = ".crater-probe-latency"


@dataclass(slots=True)
class LatencyProbe:
    """Reads from a file in ``folder``, which is made when first asked. ``problem`` says why not."""

    folder: Path
    problem: str = ""
    _clock: Callable[[], int] = time.perf_counter_ns
    _buffer: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, _BLOCK))

    def sample(self) -> float | None:
        """Median of a few reads, µs; None with ``problem`` set when it can't be measured."""
        try:
            fd = self._open()
        except OSError as error:
            self.problem = f"the read latency below {self.folder} is not watched: {error.strerror}"
            return None
        try:
            times = self._read(fd)
        except OSError as error:
            self.problem = f"reading below {self.folder} failed: {error.strerror}"
            return None
        finally:
            os.close(fd)
        self.problem = ""
        return round(statistics.median(times) / 1000, 1) if times else None

    def _open(self) -> int:
        flags = os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC
        path = self.folder / _NAME
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            self._fill(path)
            fd = os.open(path, flags)
        status = os.fstat(fd)
        if status.st_size < _FILE_BYTES or status.st_uid != os.geteuid():
            os.close(fd)
            raise OSError(0, f"{path} is not the probe's own file; remove it")
        return fd

    def _fill(self, path: Path) -> None:
        """Random data: a drive may answer for blocks of zeros without a look at its flash."""
        space = os.statvfs(self.folder)
        if space.f_bavail * space.f_frsize < _FREE_FACTOR * _FILE_BYTES:
            raise OSError(0, "too little space is free there")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            for _ in range(_FILE_BYTES // (1 << 20)):
                os.write(fd, random.randbytes(1 << 20))  # noqa: S311 - no secret
            os.fsync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(fd)

    def _read(self, fd: int) -> list[int]:
        times: list[int] = []
        end = self._clock() + int(_BUDGET_SECONDS * 1e9)
        for _ in range(_READS):
            place = random.randrange(_FILE_BYTES // _BLOCK) * _BLOCK  # noqa: S311
            begin = self._clock()
            os.preadv(fd, [self._buffer], place)
            after = self._clock()
            times.append(after - begin)
            if after > end:
                break
        return times
