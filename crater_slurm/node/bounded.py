"""Calls that may hang in the kernel (a dying drive) without taking the caller with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Outcome(Generic[T]):
    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: T | None = None
        self.error: BaseException | None = None


class Bounded:
    """Runs work in threads of its own and waits a limited time. Work that hangs stays behind in
    its thread; once ``limit`` are stuck, further calls fail at once instead of joining them."""

    def __init__(self, limit: int = 4) -> None:
        self._slots = threading.Semaphore(limit)

    def call(self, work: Callable[[], T], seconds: float) -> T:
        """Result of ``work()``, or its exception; TimeoutError when it isn't there in time."""
        end = time.monotonic() + seconds
        if not self._slots.acquire(timeout=seconds / 2):
            raise TimeoutError("earlier calls still hang")
        outcome: _Outcome[T] = _Outcome()

        def run() -> None:
            try:
                outcome.value = work()
            except BaseException as error:
                outcome.error = error
            finally:
                self._slots.release()
                outcome.done.set()

        threading.Thread(target=run, name="bounded", daemon=True).start()
        if not outcome.done.wait(end - time.monotonic()):
            raise TimeoutError(f"no result within {seconds:g} s")
        if outcome.error:
            raise outcome.error
        return outcome.value  # type: ignore[return-value]  # T itself may be None
