"""The flush of one lost node's parts, from the copies that this node keeps of them.

An ordinary flusher whose folder is that of the copies and whose node is the lost one: what it does,
how it fails and what it remembers is the same.
"""

from __future__ import annotations

from collections.abc import Callable

from crater_slurm.checkpoint.flush import Flusher
from crater_slurm.checkpoint.rate import TokenBucket
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.checkpoint.threads import Log
from crater_slurm.job.layout import Manifest


class LostNode:
    """``spec``: the job's, with the lost node's name and the folder of its copies here."""

    def __init__(
        self, spec: Spec, changed: Callable[[], None], log: Log, rate: TokenBucket | None = None
    ) -> None:
        self._flusher = Flusher(spec, lambda _: changed(), log, limiter=rate)
        self._started = False

    def add(self, folder: str, manifest: Manifest) -> None:
        """Bring a part to the destination, and what else lies there of the lost node."""
        self._flusher.add(folder, manifest)
        if not self._started:
            self._started = True
            self._flusher.start()

    def flushed(self, name: str, step: int, run: str) -> bool:
        """Whether it is there, or a newer complete one makes it needless."""
        return self._flusher.safe(name, step, run)

    def stop(self) -> None:
        self._flusher.stop(0)
