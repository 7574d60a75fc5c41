"""Signals while a task is sent and waited for: never in the middle of a submission."""

from __future__ import annotations

import signal
from typing import Any


class Stopped(Exception):  # noqa: N818 - no error, somebody wanted it
    """A signal came while it was waited."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """SIGTERM and SIGINT wait while a task is being sent, and end the waiting afterwards."""

    def __init__(self) -> None:
        self._raise = self._deaf = False
        self._pending: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pending is not None:
            # Nobody waited, so it takes effect now that it is known what was sent.
            signal.raise_signal(self._pending)

    def listen(self) -> None:
        """From now on a signal raises Stopped; one that came before does so at once."""
        self._raise = True
        if self._pending is not None:
            number, self._pending = self._pending, None
            raise Stopped(number)

    def hold(self) -> None:
        """A further signal changes nothing: the job is being cancelled already."""
        self._raise, self._deaf = False, True

    def _heard(self, number: int, _: object) -> None:
        if self._raise:
            raise Stopped(number)
        if not self._deaf:
            self._pending = number
