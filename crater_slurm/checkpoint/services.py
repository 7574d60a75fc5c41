"""What lies beyond the node's own cache, as the worker sees it: destination, copies, datasets.

The worker works without any of it: this module's ``Nothing`` is what a job without a destination
has. Calls of ``Services`` may block and are made in a pool's thread, except where it says so.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Protocol

from crater_slurm.checkpoint.folder import LocalStep
from crater_slurm.job.layout import Manifest


class AwayFile(Protocol):
    """One rank's file at the destination. ``manifest`` names it alone, ``where`` is its folder."""

    manifest: Manifest
    where: str

    def read(self, start: int, into: memoryview) -> None:
        """Fill a buffer with one chunk, compared with its sum. Raises any error with a sentence."""


class Services(Protocol):
    """What is done beyond saving into the cache."""

    def start(self) -> None:
        """Begin, after the rights were given up. In the main thread; does not block."""

    def stop(self) -> None:
        """End soon; what is left undone is found again by the next worker. Does not block."""

    def peer(self, plain: socket.socket, node: str, may_put: bool) -> None:
        """A connection of another node's worker, which is now this one's. Main thread; does not
        block."""

    def saved(self, folder: str, manifest: Manifest) -> None:
        """A part has its final name. In the main thread; does not block."""

    def ended(self) -> None:
        """The job is over: what it prefetched or waits for is of no use. Does not block."""

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do. Any thread; does not block."""

    def flushed(self, name: str, step: int, run: str) -> bool:
        """Whether this node's part is safe at the destination; True without one. Not blocking."""

    def arrived(self, name: str, step: int, run: str) -> bool:
        """Whether this node's part really lies at the destination: one that is needless there
        does not, and without a destination none does. Not blocking."""

    def error(self, name: str, step: int, run: str) -> str:
        """Why a step is not at the destination; empty when nothing is wrong. Not blocking."""

    def counters(self) -> dict[str, float]:
        """Figures for the daemon. Not blocking."""

    def removable(self, steps: Sequence[LocalStep], over_bytes: int) -> list[LocalStep]:
        """Local steps that may be removed by the rules of keeping; with ``over_bytes`` also those
        that may go because so much room is missing. Oldest first."""

    def available(self, name: str) -> list[tuple[int, str, float]]:
        """(step, run, time) of what can be brought here from elsewhere."""

    def fetch(self, name: str, step: int, run: str, ranks: list[int] | None) -> tuple[str, str]:
        """Bring a step here: its folder, and where from (peer, remote). Raises OSError, or any
        error with a sentence."""

    def open_away(self, name: str, step: int, run: str, rank: int) -> AwayFile:
        """A rank's file where the destination has it, for a cache that can't take it. Raises
        OSError, or any error with a sentence."""

    def stage(self, path: str) -> str:
        """Where the local copy of a dataset is. Raises OSError, or any error with a sentence."""

    def command(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer a question of ``crater checkpoints`` that the worker itself doesn't know."""


class Nothing:
    """No destination, no copies, no datasets."""

    idle = True

    def start(self) -> None:
        return None

    def stop(self) -> None:
        return None

    def peer(self, plain: socket.socket, node: str, may_put: bool) -> None:
        plain.close()

    def saved(self, folder: str, manifest: Manifest) -> None:
        return None

    def ended(self) -> None:
        return None

    def flushed(self, name: str, step: int, run: str) -> bool:
        return True

    def arrived(self, name: str, step: int, run: str) -> bool:
        return False

    def error(self, name: str, step: int, run: str) -> str:
        return ""

    def counters(self) -> dict[str, float]:
        return {}

    def removable(self, steps: Sequence[LocalStep], over_bytes: int) -> list[LocalStep]:
        return []

    def available(self, name: str) -> list[tuple[int, str, float]]:
        return []

    def fetch(self, name: str, step: int, run: str, ranks: list[int] | None) -> tuple[str, str]:
        raise FileNotFoundError(2, "there is no destination to bring it from")

    def open_away(self, name: str, step: int, run: str, rank: int) -> AwayFile:
        raise FileNotFoundError(2, "there is no destination to read it from")

    def stage(self, path: str) -> str:
        raise FileNotFoundError(2, f"{path} was not asked for in this job's stage list")

    def command(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"error": f"The worker knows no operation {message.get('op')!s:.40}."}
