"""Trying again: waits that grow, with chance in them so that many nodes don't come back at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TypeVar

from crater_slurm.checkpoint.remote.store import RemoteError, StoppedError

Result = TypeVar("Result")

MOST_SECONDS = 300.0


def wait_seconds(
    attempt: int, first: float, most: float, chance: Callable[[], float] = random.random
) -> float:
    """Wait after the ``attempt``-th failure in a row: doubles, half of it by chance."""
    whole = min(most, first * float(2 ** min(attempt - 1, 30)))
    return whole * (0.5 + 0.5 * chance())


class Patience:
    """Calls again what failed for a moment, some times; what lasts is raised at once."""

    def __init__(
        self,
        attempts: int = 5,
        first_seconds: float = 0.5,
        most_seconds: float = 20.0,
        sleep: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        self._attempts = attempts
        self._first = first_seconds
        self._most = most_seconds
        self._sleep = sleep

    def call(self, function: Callable[[], Result], stop: threading.Event | None = None) -> Result:
        """The function's result; raises its last RemoteError, or StoppedError."""
        event = stop or threading.Event()
        for attempt in range(1, self._attempts + 1):
            try:
                return function()
            except RemoteError as error:
                if error.lasting or error.missing or attempt == self._attempts:
                    raise
            self._sleep(event, wait_seconds(attempt, self._first, self._most))
            if event.is_set():
                raise StoppedError
        raise AssertionError("attempts is at least 1")
