"""What saves and steps work with: the drain, the pools, the folder, and the job's own bounds."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from crater_slurm.checkpoint.disk import Block, Drain
from crater_slurm.checkpoint.folder import Folder
from crater_slurm.checkpoint.outfile import OutFile
from crater_slurm.checkpoint.rate import TokenBucket
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.checkpoint.threads import Log, Mailbox, Pool
from crater_slurm.job.layout import FileEntry, Manifest

_GIB = 1 << 30


class QuotaError(Exception):
    """The job may not keep that much on this node; a clause."""


class Room:
    """The job's quota: what lies in the folder, and what is being written, never exceed it.

    ``drop_more(bytes)`` removes old steps that may go, to make room; called in a pool's thread.
    """

    def __init__(self, folder: Folder, quota_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self.drop_more: Callable[[int], None] = lambda _: None
        self._folder = folder
        self._lock = threading.Lock()
        self._promised: dict[OutFile, int] = {}

    def admit(self, out: OutFile, folder_name: str) -> None:
        """Make a file and set its room aside. Raises QuotaError or OSError."""
        if not self.quota_bytes:
            self._open(out, folder_name)
            return
        with self._lock:
            self._check(out.size)
            self._open(out, folder_name)
            if not out.allocated:  # the file system shows it only as it is written
                self._promised[out] = out.size

    def _open(self, out: OutFile, folder_name: str) -> None:
        """Set room on the disk aside; where it is full, old steps that may go make some."""
        try:
            out.open(self._folder.partial(folder_name))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            out.close()
            self.drop_more(out.size)
            out.open(self._folder.partial(folder_name))

    def check(self, size: int = 0) -> None:
        """Whether ``size`` more bytes are within the quota. Raises QuotaError."""
        if self.quota_bytes:
            with self._lock:
                self._check(size)

    def _check(self, size: int) -> None:
        for attempt in ("as it is", "after a clean-up"):
            used = self._folder.used_bytes() + sum(list(self._promised.values()))
            over = used + size - self.quota_bytes
            if over <= 0:
                return
            if attempt == "as it is":
                self.drop_more(over)
        raise QuotaError(
            f"it needs {_amount(size)}, and of the {_amount(self.quota_bytes)} that a job may keep "
            f"on a node {_amount(used)} are used; keep fewer steps, or ask for a larger quota"
        )

    def release(self, out: OutFile) -> None:
        """A file is whole, or gone."""
        self._promised.pop(out, None)


def _amount(size: int) -> str:
    """Bytes for people."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / (1 << 20):.1f} MiB"


@dataclass
class Tools:
    """One worker's. ``clerk`` has one thread: what it is asked for happens in that order."""

    spec: Spec
    folder: Folder
    room: Room
    drain: Drain
    clerk: Pool
    files: Pool
    hashers: Pool
    log: Log
    counters: Counter[str] = field(default_factory=Counter)
    #: From a part's first ``begin`` to its final name, of all parts.
    drain_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time

    def manifest(
        self, name: str, step: int, world: int, files: list[FileEntry], run: str
    ) -> Manifest:
        """The part's manifest, of the files that this node's ranks saved in a start of ``run``."""
        spec = self.spec
        return Manifest(
            step=step,
            world_size=world,
            files=sorted(files, key=lambda file: file.rank),
            name=name,
            run=run,
            job_id=spec.job_id,
            cluster=spec.cluster,
            node=spec.node,
            time=self.now(),
        )


def make_tools(spec: Spec, mailbox: Mailbox, written: Callable[[Block], None], log: Log) -> Tools:
    """The tools of a worker; nothing of them has a thread before it is used."""
    cores = len(os.sched_getaffinity(0))
    folder = Folder(spec.folder)
    return Tools(
        spec=spec,
        folder=folder,
        room=Room(folder, spec.quota_bytes),
        drain=Drain(written, TokenBucket(spec.rate_bytes_s), log, spec.engine),
        clerk=Pool("crater-clerk", 1, mailbox),
        files=Pool("crater-files", 4, mailbox),
        hashers=Pool("crater-sums", min(4, cores), mailbox),
        log=log,
    )
