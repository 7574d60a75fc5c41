"""How many tasks are being taken in just now; answering those who send them goes first.

A task that was taken in is safe, and its job can wait: a platform that sends many at once shall not
wait for each sbatch, and the submissions shall not take the processors from those that come.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Submissions at a time for whoever waits for them: a slow slurmctld must not hold up what else is
#: asked, and more than this machine can do at once only makes each of them longer.
SUBMISSIONS = min(24, max(4, 2 * (os.cpu_count() or 1)))
#: More than these would wait too long for their turn.
_MOST = 5 * SUBMISSIONS
#: Each submission lets a crowd go first for so long, so that none waits for ever.
_LONGEST_SECONDS = 1.0


class Crowd:
    """Safe to share between threads; it is a crowd when more than ``most`` are there."""

    def __init__(self, most: int = _MOST) -> None:
        self.most = most
        self._there = 0
        self._changed = threading.Condition()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Be one of them."""
        with self._changed:
            self._there += 1
        try:
            yield
        finally:
            with self._changed:
                self._there -= 1
                if self._there == self.most:
                    self._changed.notify_all()

    @property
    def large(self) -> bool:
        """Whether nobody more should wait for a turn."""
        return self._there > self.most

    def let_by(self, seconds: float = _LONGEST_SECONDS) -> None:
        """Wait while it is large, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self.large, seconds)
