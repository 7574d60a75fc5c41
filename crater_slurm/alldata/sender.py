"""Sends one callback over HTTP: authentication, signature, and what an answer means.

No redirect is followed and no proxy of the environment is used: what is sent goes to the address
of the settings or nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crater_slurm import __version__
from crater_slurm.alldata.payload import plain
from crater_slurm.alldata.secrets import read_secret
from crater_slurm.config.alldata import Callback
from crater_slurm.errors import ConfigError
from crater_slurm.store.task_records import StoredCallback

if TYPE_CHECKING:
    import httpx

SIGNATURE = "X-Crater-Signature"
#: Answers after which the same callback would fail again.
_FINAL = frozenset({400, 405, 410, 413, 415, 422})
_LEAST_KEY = 16
_MOST_OF_ANSWER = 65_536


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an attempt. ``status`` is None when nobody answered; then ``error`` says."""

    status: int | None
    error: str = ""
    retry_after_seconds: float | None = None

    @property
    def accepted(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def final(self) -> bool:
        """Whether trying again is of no use."""
        return self.status in _FINAL


def signature(key: str, timestamp: int, body: bytes) -> str:
    """``t=TIME,v1=HEX``: HMAC-SHA256 of ``TIME.BODY``, so that an old one can't be sent again."""
    signed = f"{timestamp}.".encode() + body
    return f"t={timestamp},v1={hmac.new(key.encode(), signed, hashlib.sha256).hexdigest()}"


class Sender:
    """Keeps connections; safe to share between threads. Raises ConfigError for bad settings."""

    def __init__(self, settings: Callback, clock: Callable[[], float] = time.time) -> None:
        import httpx

        if settings.url.startswith("http://") and not settings.allow_http:
            raise ConfigError(
                f"alldata.callback.url is {settings.url}, which anybody on the way can read; use "
                "https, or set alldata.callback.allow_http"
            )
        if settings.user and settings.password_file is None:
            raise ConfigError("alldata.callback.user needs alldata.callback.password_file")
        self._url, self._clock = settings.url, clock
        self._seconds = settings.timeout_seconds
        self._key: str | None = None
        if settings.hmac_key_file:
            name = "alldata.callback.hmac_key_file"
            self._key = read_secret(settings.hmac_key_file, name, _LEAST_KEY)
        auth = None
        if settings.user and settings.password_file:
            secret = read_secret(settings.password_file, "alldata.callback.password_file")
            auth = httpx.BasicAuth(settings.user, secret)
        limits = httpx.Limits(
            max_connections=settings.workers, max_keepalive_connections=settings.workers
        )
        self._client = httpx.Client(
            auth=auth,
            timeout=settings.timeout_seconds,
            limits=limits,
            verify=tls_context(settings),
            trust_env=False,
            headers={"User-Agent": f"crater-slurm/{__version__}"},
        )

    def close(self) -> None:
        self._client.close()

    def send(self, one: StoredCallback) -> Answer:
        """One attempt. Never raises for what the other side does."""
        return self.post(one.payload.encode(), one.event_id, one.status)

    def post(self, body: bytes, event_id: str, status: str) -> Answer:
        """POST a body as the callback of an event."""
        import httpx

        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": event_id,
            "X-Crater-Event-Id": event_id,
            "X-Crater-Status": status,
        }
        if self._key is not None:
            headers[SIGNATURE] = signature(self._key, int(self._clock()), body)
        try:
            with self._client.stream("POST", self._url, content=body, headers=headers) as answer:
                self._read(answer)
                return _answer(answer.status_code, answer.headers)
        except httpx.TimeoutException:
            return Answer(None, f"no answer within {self._seconds:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            return Answer(None, plain(str(error)) or type(error).__name__)

    def _read(self, answer: httpx.Response) -> None:
        """Read the answer's end, so that the connection can be kept; a long one is cut off."""
        deadline, size = time.monotonic() + self._seconds, 0
        for chunk in answer.iter_raw():
            size += len(chunk)
            if size > _MOST_OF_ANSWER or time.monotonic() > deadline:
                return


def tls_context(settings: Callback) -> ssl.SSLContext | bool:
    """Which certificates count. Raises ConfigError for a file that holds none."""
    if settings.ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(settings.ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"alldata.callback.ca_file: {settings.ca_file}: {error}") from error


def _answer(status: int, headers: Mapping[str, str]) -> Answer:
    if 200 <= status < 300:
        return Answer(status)
    if 300 <= status < 400:
        where = plain(headers.get("location", ""))
        return Answer(status, f"answered {status} to {where or 'nowhere'}, which is not followed")
    after = headers.get("retry-after", "")
    seconds = float(after) if after.isdecimal() and len(after) < 7 else None
    return Answer(status, f"answered {status}", seconds)
