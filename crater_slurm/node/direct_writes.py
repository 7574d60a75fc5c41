"""Notices large files that a job with checkpoints writes elsewhere on this node's disks.

Such writes bypass the cache and stop the training for as long as the disk takes. Only /proc is
looked at, now and then: files that are open for writing at that moment. What is opened and closed
between two looks is missed. Nothing is intercepted and no process is touched.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.config.direct_writes import DirectWrites
from crater_slurm.files import read_text
from crater_slurm.node.jobs import JobRecord
from crater_slurm.node.proc_mounts import (
    MountPoint,
    fs_path,
    holding,
    is_below,
    local_disk,
    mount_points,
)

#: One look at one job costs no more than this.
_MOST_PROCESSES, _MOST_FILES = 512, 4096
#: What is told of a job, and remembered of it.
MOST_TOLD, _MOST_REMEMBERED = 5, 1024
_CHECKPOINT = re.compile(
    r"\.(pt|pth|ckpt|safetensors|distcp|bin)(\.(tmp|part|incomplete))?\Z", re.I
)
_MB = 10**6


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A regular file that a process has open for writing. ``position`` is None where it does not
    say how much was written: opened for appending, or for reading too."""

    path: str
    device: int
    inode: int
    size: int
    position: int | None


class DirectWriteWatch:
    """Remembers how large files were at the first look. Used from one thread."""

    def __init__(self, settings: DirectWrites, proc: Path = Path("/proc")) -> None:
        self._settings = settings
        self._proc = proc
        self._first: dict[str, dict[tuple[int, int], int]] = {}
        self.found = 0

    def wanted(self, record: JobRecord) -> bool:
        """Whether a job is looked at: it wants checkpoints or saves some, and was not told yet."""
        asked = (record.plan or {}).get("checkpoint") not in (None, "off")
        return (
            self._settings.direct_writes == "warn"
            and (asked or bool(record.checkpoints.get("used")))
            and bool(record.folders)
            and not record.direct_writes
        )

    def look(self, record: JobRecord, pids: list[int]) -> list[str]:
        """What a job writes beside its cache, a sentence for each file; mostly nothing."""
        mounts = mount_points(read_text(self._proc / "self/mountinfo") or "")
        holders = [(holding(folder, mounts), folder) for folder in record.folders.values()]
        own = [fs_path(point, folder) for point, folder in holders if point]
        seen = self._first.setdefault(record.job_id, {})
        told: list[str] = []
        for file, spot in self._open_files(pids, mounts):
            if any(spot.device == o.device and is_below(spot.path, o.path) for o in own):
                continue
            key = (file.device, file.inode)
            first = seen.get(key)
            if first is None and len(seen) < _MOST_REMEMBERED:
                seen[key] = file.size
            # A file that was written from its beginning has grown by as much as was written.
            grown = max(file.size - (file.size if first is None else first), file.position or 0)
            if grown >= self._threshold(file.path) and len(told) < MOST_TOLD:
                told.append(f"{_shown(file.path)} ({grown / 1e9:.3g} GB)")
        self.found += len(told)
        return told

    def keep(self, job_ids: Iterable[str]) -> None:
        """Forget all jobs but these."""
        wanted = set(job_ids)
        self._first = {job: seen for job, seen in self._first.items() if job in wanted}

    def _threshold(self, path: str) -> int:
        named = _CHECKPOINT.search(path)
        settings = self._settings
        return _MB * (settings.direct_write_checkpoint_mb if named else settings.direct_write_mb)

    def _open_files(
        self, pids: list[int], mounts: Mapping[int, MountPoint]
    ) -> Iterator[tuple[OpenFile, MountPoint]]:
        """Files on local disks that processes have open for writing, each once, up to a limit."""
        left, known = _MOST_FILES, set()
        for pid in pids[:_MOST_PROCESSES]:
            folder = f"{self._proc}/{pid}"
            try:
                numbers = os.listdir(f"{folder}/fd")[:left]  # noqa: PTH208  names are all we need
            except OSError:
                continue
            left -= len(numbers)
            points: dict[int, MountPoint] | None = None
            for number in numbers:
                how = _opened_for_writing(read_text(f"{folder}/fdinfo/{number}") or "")
                if how is None:
                    continue
                if points is None:
                    points = mount_points(read_text(f"{folder}/mountinfo") or "")
                point = points.get(how[0])
                # Asked of nothing but a local disk: another file system may never answer.
                if point is None or not local_disk(point, mounts):
                    continue
                file = _file(f"{folder}/fd/{number}", how[1])
                if file and (file.device, file.inode) not in known:
                    known.add((file.device, file.inode))
                    yield file, fs_path(point, file.path)


def _opened_for_writing(text: str) -> tuple[int, int | None] | None:
    """Mount id and position of a descriptor that writes, from its fdinfo; None for others."""
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        flags, mount = int(values["flags"].strip(), 8), int(values["mnt_id"])
        position = int(values["pos"])
    except (KeyError, ValueError):
        return None
    how = flags & os.O_ACCMODE
    if how == os.O_RDONLY or flags & getattr(os, "O_PATH", 0):
        return None
    written_through = how == os.O_WRONLY and not flags & os.O_APPEND
    return mount, position if written_through else None


def _file(link: str, position: int | None) -> OpenFile | None:
    try:
        status = Path(link).stat()
        path = os.readlink(link)  # noqa: PTH115  a Path would lose the name's own bytes
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_nlink == 0:
        return None
    return OpenFile(path, status.st_dev, status.st_ino, status.st_size, position)


def _shown(path: str) -> str:
    """A user's file name for a log and a message: printable, and not endless."""
    text = "".join(c if c.isprintable() else "?" for c in path)
    return text if len(text) <= 120 else "..." + text[-117:]


def sentence(files: list[str]) -> str:
    """What a job is told."""
    return (
        f"this job writes large files to this node's disk beside its cache: {'; '.join(files)}. "
        "checkpoint.save() of crater_slurm.job is faster, or write below "
        "$CRATER_CHECKPOINT_PATH ($CRATER_CACHE_PATH for other files)"
    )
