"""Delivers callbacks from the outbox: in order for each task, at least once, and never in a rush.

Several schedulers may share the outbox; a claim with a lease says who has a callback in hand. While
nobody answers at all, one callback at a time is tried, with growing waits, and the others keep
their attempts: an hour of silence makes nothing dead.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from crater_slurm.alldata.sender import Answer
from crater_slurm.config.alldata import Callback
from crater_slurm.errors import StoreError
from crater_slurm.guard import Guard
from crater_slurm.store.repository import Store
from crater_slurm.store.task_records import StoredCallback

_log = logging.getLogger("crater.alldata.deliver")
#: How often the outbox is asked for what another scheduler wrote, or what is due again.
_IDLE_SECONDS = 1.0
#: So many failures in a row without any answer are an outage; fewer happen to any network.
_OUTAGE = 3

Send = Callable[[StoredCallback], Answer]


def wait_seconds(settings: Callback, failures: int, chance: Callable[[], float]) -> float:
    """Wait before the next try after so many failures; between half and all of it, by chance."""
    longest = settings.longest_wait_seconds
    full = min(longest, settings.first_wait_seconds * 2.0 ** min(failures - 1, 40))
    return full * (0.5 + 0.5 * chance())


class Deliverer:
    """Threads that send. ``wake`` when something was written; ``told`` hears each outcome."""

    def __init__(
        self,
        settings: Callback,
        store: Callable[[], Store],
        send: Send,
        *,
        owner: str,
        clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
        told: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._settings = settings
        self._open_store = store
        self._send = send
        self._owner = owner
        self._clock = clock
        self._chance = chance
        self._told = told
        self._lock = threading.Lock()
        self._silences = 0
        self._silent_until = 0.0
        self._under_way = 0
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._guard = Guard(_log, "callbacks wait")
        self._pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="callback")
        self._thread = threading.Thread(target=self._run, name="callbacks", daemon=True)

    @property
    def problem(self) -> str:
        """What went wrong in the last round; empty when it went well."""
        return self._guard.problem

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish what is under way; what is left is delivered by the next start."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)
        self._pool.shutdown(wait=True, cancel_futures=True)
        try:
            self._open_store().release_callbacks(self._owner)
        except StoreError as error:
            _log.warning("claimed callbacks can't be given back: %s", error)

    def wake(self) -> None:
        self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            if not self._guard.run(self.begin):
                self._wake.wait(_IDLE_SECONDS)

    def begin(self) -> int:
        """Claim what is due and give it to the threads; how many those are. Raises StoreError."""
        claimed = self._claim()
        for one in claimed:
            self._pool.submit(self._in_thread, one)
        return len(claimed)

    def run_due(self) -> int:
        """Claim what is due and deliver it here and now, one after the other; how many."""
        claimed = self._claim()
        for one in claimed:
            self._in_thread(one)
        return len(claimed)

    def _claim(self) -> list[StoredCallback]:
        now = self._clock()
        with self._lock:
            free = self._settings.workers - self._under_way
            if self._silences:
                # Nobody answers: one at a time finds out whether somebody does again.
                free = 1 if now >= self._silent_until and not self._under_way else 0
        if free <= 0:
            return []
        lease = max(self._settings.lease_seconds, 2 * self._settings.timeout_seconds)
        claimed = self._open_store().claim_callbacks(self._owner, now, lease, free)
        with self._lock:
            self._under_way += len(claimed)
        return claimed

    def _in_thread(self, one: StoredCallback) -> None:
        try:
            self._finish(one, self._send(one))
        except StoreError as error:
            # The lease ends by itself, and it is sent once more.
            _log.warning("callback %s: how it went can't be noted: %s", one.event_id, error)
        except Exception:
            _log.exception("callback %s failed", one.event_id)
        finally:
            with self._lock:
                self._under_way -= 1
            self._wake.set()

    def _finish(self, one: StoredCallback, answer: Answer) -> None:
        now = self._clock()
        store = self._open_store()
        if self._heard(answer, now):
            store.hasten_callbacks(now)
        if answer.accepted:
            outcome, next_try = "delivered", None
        elif answer.final or one.attempts + 1 >= self._settings.attempts:
            outcome, next_try = "dead", None
            _log.error(
                "task %s: the callback %r (%s) is dead after %d attempts: %s; "
                "crater callbacks retry %s",
                *(one.task_id, one.status, one.event_id, one.attempts + 1, answer.error),
                one.event_id,
            )
        else:
            outcome = "waiting"
            wait = wait_seconds(self._settings, one.attempts + 1, self._chance)
            if answer.retry_after_seconds is not None:
                longest = self._settings.longest_wait_seconds
                wait = max(wait, min(answer.retry_after_seconds, longest))
            next_try = now + wait
        store.finish_callback(
            one.number,
            self._owner,
            delivery=outcome,
            now=now,
            next_try=next_try,
            http_status=answer.status,
            error=answer.error,
        )
        self._told("failed" if outcome == "waiting" else outcome)

    def _heard(self, answer: Answer, now: float) -> bool:
        """Note whether anybody answers; True when somebody does again after an outage."""
        with self._lock:
            if answer.status is not None:
                again, self._silences = self._silences >= _OUTAGE, 0
                return again
            self._silences += 1
            wait = wait_seconds(self._settings, self._silences, self._chance)
            self._silent_until = now + wait
            if self._silences == 1:
                _log.warning("the platform does not hear callbacks: %s; they wait", answer.error)
            return False
