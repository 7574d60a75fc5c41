"""How fast a job may write: a token bucket, filled at the rate, emptied by each block."""

from __future__ import annotations

import time
from collections.abc import Callable

#: What may go at once after a pause, in seconds of the rate.
_BURST_S = 0.25


class TokenBucket:
    """Bytes that may be written now. ``rate_bytes_s`` 0 is no limit and may change at any time."""

    def __init__(self, rate_bytes_s: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate_bytes_s = rate_bytes_s
        self._clock = clock
        self._filled_at = clock()
        self._tokens = rate_bytes_s * _BURST_S

    def set_rate(self, rate_bytes_s: int) -> None:
        """Fill at another rate from now on."""
        self.rate_bytes_s = rate_bytes_s
        self._filled_at = self._clock()
        self._tokens = max(0.0, min(self._tokens, rate_bytes_s * _BURST_S))

    def delay_s(self) -> float:
        """Seconds until the next block may go; 0 for now."""
        if not self.rate_bytes_s:
            return 0.0
        now = self._clock()
        grown = self._tokens + (now - self._filled_at) * self.rate_bytes_s
        self._tokens = min(grown, self.rate_bytes_s * _BURST_S)
        self._filled_at = now
        # A debt of less than a byte is a rounding error, and a wait for it might never end.
        return max(0.0, -self._tokens / self.rate_bytes_s) if self._tokens <= -1 else 0.0

    def take(self, length: int) -> None:
        """Count a block. It may be larger than what is there: the next ones wait for the debt."""
        if self.rate_bytes_s:
            self._tokens -= length
