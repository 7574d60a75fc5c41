"""Submits a task through crater-scheduler's HTTP API instead of sbatch: where there is no Slurm.

The token never travels in clear: plain http is only for this machine itself. The request may be
repeated, since the server knows a task by its id.
"""

from __future__ import annotations

import json
import os
import stat
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crater_slurm.alldata.sending import ConflictError
from crater_slurm.errors import CraterError, UnavailableError, UsageError

_MOST_BYTES = 4 * 1024 * 1024
_LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})
_FIRST_SECONDS = 1.0
#: What a task can end as.
ENDS = frozenset(
    {"completed", "failed", "cancelled", "timeout", "rejected", "preempted", "unknown"}
)


class ServerError(CraterError):
    """The server refused the task in the words of the message; exit code 1."""


def read_token(file: Path) -> str:
    """The bearer token in a file that nobody else can read. Raises UsageError."""
    try:
        status = file.stat()
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token file {file} can't be read: {error}") from error
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(f"the token file {file} can be read by others; chmod 600 {file}")
    if not text or not text.isascii() or any(c.isspace() or not c.isprintable() for c in text):
        raise UsageError(f"the token file {file} must hold one token and nothing else")
    return text


@dataclass(frozen=True, slots=True)
class Server:
    """crater-scheduler at ``url``. ``timeout_seconds`` is for each answer."""

    url: str
    token: str | None
    timeout_seconds: float = 30
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise UsageError(f"--server {self.url!r} is no address; write https://host:port")
        if parts.scheme == "http" and parts.hostname not in _LOCAL and self.token:
            raise UsageError(f"--server {self.url}: the token would travel in clear; use https")

    def submit(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """POST the task. Raises UsageError (422), ConflictError, ServerError, UnavailableError."""
        return self._ask("POST", "/api/v1/schedule", document)

    def task(self, task_id: str) -> dict[str, Any]:
        return self._ask("GET", f"/api/v1/tasks/{urllib.parse.quote(task_id, safe='')}")

    def wait(
        self, task_id: str, say: Callable[[str], None], steady_seconds: float
    ) -> dict[str, Any]:
        """The task as it ended; a server that is away is waited for."""
        pause, told = _FIRST_SECONDS, ""
        while True:
            try:
                found = self.task(task_id)
                words = str(found.get("status", ""))
            except UnavailableError as error:
                found, words = {}, str(error)
            if words != told:
                say(words)
                told, pause = words, _FIRST_SECONDS
            if found.get("status") in ENDS:
                return found
            self.sleep(pause)
            pause = min(2 * pause, steady_seconds)

    def _ask(
        self, method: str, path: str, document: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        body = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            self.url.rstrip("/") + path, data=body, method=method
        )
        request.add_header("Accept", "application/json")
        if body is not None:
            request.add_header("Content-Type", "application/json")
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        opener = urllib.request.build_opener(_NoRedirect())
        try:
            with opener.open(request, timeout=self.timeout_seconds) as answer:
                return _object(answer.read(_MOST_BYTES), self.url)
        except urllib.error.HTTPError as error:
            raise _refusal(error, self.url) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UnavailableError(
                f"{self.url} does not answer ({reason}); the task may be sent again, the server "
                "knows it by its id"
            ) from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A token is for one server, not for whom that one names."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _object(data: bytes, url: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise UnavailableError(f"{url} answers what is no JSON; is it crater-scheduler?") from error
    if not isinstance(found, dict):
        raise UnavailableError(f"{url} answers no JSON object; is it crater-scheduler?")
    return found


def _refusal(error: urllib.error.HTTPError, url: str) -> CraterError:
    said, refused = _words(error)
    if error.code == 409:
        return ConflictError(said)
    if refused:
        return ServerError(said)
    if error.code in (400, 413, 422):
        return UsageError(said)
    if error.code in (401, 403):
        return ServerError(f"{url} does not take this token ({error.code}): {said}")
    if error.code >= 500 or error.code == 429 or error.code < 400:
        return UnavailableError(f"{url} answers {error.code}: {said}")
    return ServerError(f"{url} answers {error.code}: {said}")


def _words(error: urllib.error.HTTPError) -> tuple[str, bool]:
    """What the server said, in lines that may be printed, and whether Slurm refused the job."""
    try:
        found = json.loads(error.read(_MOST_BYTES))
    except (ValueError, OSError):
        return str(error.reason), False
    told = found.get("detail", found) if isinstance(found, dict) else found
    parts = told if isinstance(told, list) else [told]
    refused = any(isinstance(part, dict) and part.get("code") == "refused" for part in parts)
    lines = [_line(part) for part in parts]
    text = "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)
    return text, refused


def _line(told: Any) -> str:
    if not isinstance(told, dict):
        return str(told)
    value = told.get("value")
    said = f"{told.get('pointer') or 'crater-scheduler'}: {told.get('message', '')}"
    return said if value is None else f"{said}; it is {value}"
