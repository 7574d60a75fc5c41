"""How fast a job may write: one bucket for its drain, flush, restores and staging together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: What may go at once after a pause, in seconds of the rate.
_BURST_S = 0.25
#: A rate that changes is noticed this soon by those who wait.
_LOOK_S = 0.5


class TokenBucket:
    """Bytes that may be moved now. ``rate_bytes_s`` 0 is no limit and may change at any time.

    Thread-safe: the drain asks and goes on with other things, others wait.
    """

    def __init__(
        self,
        rate_bytes_s: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate_bytes_s = rate_bytes_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._filled_at = clock()
        self._tokens = rate_bytes_s * _BURST_S

    def set_rate(self, rate_bytes_s: int) -> None:
        """Fill at another rate from now on."""
        with self._lock:
            self.rate_bytes_s = rate_bytes_s
            self._filled_at = self._clock()
            self._tokens = max(0.0, min(self._tokens, rate_bytes_s * _BURST_S))

    def ask(self, length: int) -> float:
        """Seconds until these bytes may go; 0: now, and they are counted. They may be more than
        what is there: the next ones wait for the debt."""
        with self._lock:
            if not self.rate_bytes_s:
                return 0.0
            now = self._clock()
            grown = self._tokens + (now - self._filled_at) * self.rate_bytes_s
            self._tokens = min(grown, self.rate_bytes_s * _BURST_S)
            self._filled_at = now
            # A debt of less than a byte is a rounding error; a wait for it might never end.
            if self._tokens <= -1:
                return -self._tokens / self.rate_bytes_s
            self._tokens -= length
            return 0.0

    def take(self, count: int) -> None:
        """Count bytes, after waiting until they may go.

        They are paid in parts of what may go at once, so that others who wait, above all a save,
        come in between: a large file on its way to the cache is no debt of theirs.
        """
        while count > 0:
            burst = int(self.rate_bytes_s * _BURST_S) or count
            part = min(count, burst)
            while delay := self.ask(part):
                self._sleep(min(delay, _LOOK_S))
            count -= part
