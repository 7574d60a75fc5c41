"""Counts of what the cache served: crater_io_daemon_cache_hit_ratio is made of them."""

from __future__ import annotations

import threading


class Counters:
    """Thread-safe. A hit is a restore or a staged path that was served from the node itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hits = 0
        self._misses = 0

    def served(self, *, local: bool) -> None:
        """Count one restore, or one question for a staged path."""
        with self._lock:
            if local:
                self._hits += 1
            else:
                self._misses += 1

    def as_dict(self) -> dict[str, int]:
        """For the ``state`` message."""
        with self._lock:
            return {"cache_hits": self._hits, "cache_misses": self._misses}
