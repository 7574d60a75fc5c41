"""How often something may be done: so often a second in the long run, so often at once."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Budget:
    """A bucket that fills with time; safe to share between threads."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        self._left = burst
        self._at = clock()

    def take(self) -> bool:
        """Whether it may be done now; if so it is counted."""
        return self.wait_seconds() == 0.0

    def wait_seconds(self) -> float:
        """0 and counted when it may be done now; else how long until it may."""
        with self._lock:
            now = self._clock()
            passed = max(0.0, now - self._at)
            self._left = min(self._burst, self._left + passed * self._per_second)
            self._at = now
            if self._left >= 1.0:
                self._left -= 1.0
                return 0.0
            return (1.0 - self._left) / self._per_second
