"""Fetches the platform's queue, for a platform that can't send. Off unless a site says otherwise.

What is fetched goes the same way inward as what is sent: the same task fetched a thousand times is
one job. A task that can't become a job is told as rejected, once.
"""

from __future__ import annotations

import json
import logging
import random
import re
import threading
from collections.abc import Callable
from typing import Any

from crater_slurm.alldata.document import TaskError
from crater_slurm.alldata.intake import ConflictError, Intake
from crater_slurm.alldata.payload import plain
from crater_slurm.alldata.run_as import UserError
from crater_slurm.alldata.secrets import read_secret
from crater_slurm.alldata.submission import RefusedError
from crater_slurm.config.alldata import AllData
from crater_slurm.errors import ConfigError, CraterError, UnavailableError
from crater_slurm.guard import Guard

_log = logging.getLogger("crater.alldata.poll")
_TIMEOUT_SECONDS = 30.0
_LONGEST_ANSWER = 16 << 20
_LONGEST_WAIT_SECONDS = 300.0
_TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_MOST_SEEN = 50_000

Fetch = Callable[[], bytes]


class HttpQueue:
    """GET api_url/tasks. Raises ConfigError for settings that can't be right."""

    def __init__(self, settings: AllData) -> None:
        import httpx

        if not settings.api_url:
            raise ConfigError("alldata.poll needs alldata.api_url")
        if settings.api_url.startswith("http://") and not settings.callback.allow_http:
            raise ConfigError(
                f"alldata.api_url is {settings.api_url}, and a token would be sent readable; use "
                "https, or set alldata.callback.allow_http"
            )
        headers = {"Accept": "application/json"}
        if settings.token_file:
            secret = read_secret(settings.token_file, "alldata.token_file")
            headers["Authorization"] = f"Bearer {secret}"
        from crater_slurm.alldata.sender import tls_context

        self._url = settings.api_url.rstrip("/") + "/tasks"
        self._client = httpx.Client(
            timeout=_TIMEOUT_SECONDS,
            headers=headers,
            trust_env=False,
            verify=tls_context(settings.callback),
        )

    def __call__(self) -> bytes:
        """The queue's JSON. Raises UnavailableError."""
        import httpx

        try:
            with self._client.stream("GET", self._url) as answer:
                if answer.status_code != 200:
                    raise UnavailableError(f"{self._url} answers {answer.status_code}")
                parts, size = [], 0
                for part in answer.iter_bytes():
                    size += len(part)
                    if size > _LONGEST_ANSWER:
                        raise UnavailableError(f"{self._url} sends more than {_LONGEST_ANSWER} B")
                    parts.append(part)
                return b"".join(parts)
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            words = plain(str(error)) or type(error).__name__
            raise UnavailableError(f"{self._url} does not answer: {words}") from error

    def close(self) -> None:
        self._client.close()


class Poller:
    """The thread; ``fetch`` gives the queue's JSON."""

    def __init__(
        self,
        settings: AllData,
        intake: Intake,
        fetch: Fetch,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._intake = intake
        self._fetch = fetch
        self._chance = chance
        self._failures = 0
        #: What was taken in by now, so that the store is not asked for each of them every time.
        self._seen: dict[str, int] = {}
        self._guard = Guard(_log, "the platform's queue is not read")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poll", daemon=True)

    @property
    def problem(self) -> str:
        """What went wrong in the last round; empty when it went well."""
        return self._guard.problem

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.wait(self.wait_seconds()):
            self.round()

    def round(self) -> None:
        """Ask once, and remember what goes wrong."""
        self._guard.run(self.poll)
        self._failures = self._failures + 1 if self.problem else 0

    def wait_seconds(self) -> float:
        """Until the next question: the interval, and ever longer while it goes wrong."""
        own = self._settings.poll_interval_seconds
        if not self._failures:
            return own
        longest = max(own, _LONGEST_WAIT_SECONDS)
        return min(longest, own * 2.0 ** min(self._failures, 20)) * (0.5 + 0.5 * self._chance())

    def poll(self) -> int:
        """Read the queue once and take its tasks in; how many were new. Raises CraterError."""
        document = _read(self._fetch())
        fresh = 0
        for one in document:
            if self._stop.is_set():
                break
            fresh += self._take(one)
        return fresh

    def _take(self, one: Any) -> bool:
        text = json.dumps(one)
        key = hash(text)
        task_id = one.get("task_id") if isinstance(one, dict) else None
        name = task_id if isinstance(task_id, str) and _TASK_ID.fullmatch(task_id) else ""
        if name and self._seen.get(name) == key:
            return False
        fresh = False
        try:
            client = self._settings.poll_client
            fresh = self._intake.take(client, text, user=None, source="poll").fresh
        except (TaskError, UserError) as error:
            self._reject(name, text, error)
        except RefusedError as error:
            _log.info("task %s: %s", name, error)
        except ConflictError as error:
            _log.error("%s", error)
        if name:
            self._remember(name, key)
        return fresh

    def _reject(self, name: str, text: str, error: CraterError) -> None:
        _log.error("a task of the queue (%s) is rejected: %s", name or "without an id", error)
        if name:
            self._intake.reject(self._settings.poll_client, name, text, str(error))

    def _remember(self, name: str, key: int) -> None:
        self._seen[name] = key
        while len(self._seen) > _MOST_SEEN:
            self._seen.pop(next(iter(self._seen)))


def _read(data: bytes) -> list[Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnavailableError("the platform's queue is no JSON") from error
    tasks = document.get("tasks") if isinstance(document, dict) else document
    if not isinstance(tasks, list):
        raise UnavailableError('the platform\'s queue is no {"tasks": [...]}')
    return tasks
