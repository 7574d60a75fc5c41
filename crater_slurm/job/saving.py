"""What save() gives back, and the error that it raises when nothing can be written at all."""

from __future__ import annotations

import sys
import threading


class CheckpointError(RuntimeError):
    """A checkpoint can't be written or read; says what was asked, what is there, what to do."""


class Saving:
    """A save on its way to disk. The state itself may be changed as soon as ``save`` has returned.

    ``error`` is None, or the sentence that says why this step is not saved; ``how`` is ``ring``,
    ``direct`` or ``none`` (another rank's matter).
    """

    def __init__(self, step: int, name: str = "step", how: str = "ring") -> None:
        self.step = step
        self.name = name
        self.how = how
        self.error: str | None = None
        self._over = threading.Event()

    def done(self) -> bool:
        """Whether this node's part of the step has its final name, or has failed."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is saved; False after ``timeout`` seconds, or when it has failed."""
        return self._over.wait(timeout) and self.error is None

    def finish(self, error: str | None = None) -> None:
        """Say how it ended; only the first word counts."""
        if not self._over.is_set():
            self.error = error
            self._over.set()

    def __repr__(self) -> str:
        state = self.error or ("saved" if self.done() else "being saved")
        return f"<Saving {self.name} {self.step}: {state}>"


_told: set[str] = set()


def tell(text: str) -> None:
    """A line for the user's output, each text once."""
    if text in _told or len(_told) > 1000:
        return
    _told.add(text)
    clean = "".join(c if c.isprintable() else " " for c in text[:500])
    print(f"crater: {clean}", file=sys.stderr, flush=True)
