"""Work in other threads, answers in the main thread: a pool, and the mailbox it answers to.

The worker's state belongs to its main thread alone. What may block (files, checksums) is handed
to a pool; what came of it is done in the main thread, one answer after another. Threads are
daemons and started on first use: a disk that hangs never keeps the process from ending.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")
Log = Callable[[str, str], None]


class Mailbox:
    """Calls that other threads want made in the main thread; readable when there are some."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._rung = False

    def fileno(self) -> int:
        return self._event

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        """Have a call made in the main thread; from any thread."""
        self._calls.append((call, arguments))
        if not self._rung:
            self._rung = True
            os.eventfd_write(self._event, 1)

    def run(self) -> None:
        """Make the calls; one that fails is told and does not stop the others."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        self._rung = False  # before the calls: one posted from now on rings anew
        while self._calls:
            call, arguments = self._calls.popleft()
            try:
                call(*arguments)
            except Exception:  # a defect of ours must not end the other ranks' saves
                self._log("error", traceback.format_exc())


class Pool:
    """Threads that do what may block. ``ask`` answers in the main thread."""

    def __init__(self, name: str, most: int, mailbox: Mailbox) -> None:
        self.name, self.most, self._mailbox = name, most, mailbox
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads = 0
        self.busy = 0

    def ask(
        self,
        work: Callable[[], Result],
        then: Callable[[Result | None, Exception | None], None],
    ) -> None:
        """Do ``work`` in a thread, then ``then(result, error)`` in the main thread."""

        def whole() -> None:
            result, error = None, None
            try:
                result = work()
            except Exception as failed:  # told to whoever asked
                error = failed
            self._mailbox.post(self._answer, then, result, error)

        self.busy += 1
        self._work.put(whole)
        if self._threads < min(self.most, self.busy):
            self._threads += 1
            threading.Thread(target=self._run, name=self.name, daemon=True).start()

    def _answer(self, then: Callable[..., None], result: object, error: Exception | None) -> None:
        self.busy -= 1
        then(result, error)

    def _run(self) -> None:
        while True:
            self._work.get()()
