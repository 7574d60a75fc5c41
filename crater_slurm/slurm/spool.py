"""Reports of a node to crater-scheduler: some time later if need be, never waited for.

They wait in a spool folder, one file each, and go out in order from one thread: a scheduler that is
down for a day costs nothing but disk. Authenticated by MUNGE, over the body's hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import itertools
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from crater_slurm.errors import SlurmError
from crater_slurm.files import write_atomically
from crater_slurm.slurm import munge

_log = logging.getLogger("crater.spool")

_TIMEOUT_SECONDS = 10
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 300.0
_MOST_WAITING = 10_000
#: Answers after which the same report would fail again: it is dropped, with a log line.
_FINAL = {400, 409, 410, 413, 415, 422}

#: What goes wrong on the way to a scheduler that is away.
_FAILURES = (OSError, http.client.HTTPException, SlurmError)


def post(url: str, body: bytes, credential: str) -> int:
    """HTTP status of a POST, without proxy or redirect. Raises OSError or HTTPException."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OSError(f"{url} is no http or https address")
    secure = parts.scheme == "https"
    connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = connect(parts.hostname, parts.port, timeout=_TIMEOUT_SECONDS)
    try:
        headers = {"Authorization": f"MUNGE {credential}", "Content-Type": "application/json"}
        connection.request("POST", parts.path, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


class Spool:
    """The folder and its thread; ``url`` is where reports go. ``send`` returns at once."""

    def __init__(
        self,
        folder: Path,
        url: str,
        *,
        credential: Callable[[str], str] = munge.encode,
        deliver: Callable[[str, bytes, str], int] = post,
    ) -> None:
        self._folder = folder
        self._url = url
        self._credential = credential
        self._deliver = deliver
        self._incoming: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._serial = itertools.count()
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._thread.start()

    def stop(self) -> None:
        """Spool what is still in memory; the next start sends it."""
        self._stop.set()
        self._incoming.put(None)
        self._thread.join(timeout=_TIMEOUT_SECONDS)

    def send(self, report: Mapping[str, Any]) -> None:
        """Queue a report, which must be JSON data. Never raises."""
        self._incoming.put(dict(report))

    def keep(self, report: Mapping[str, Any]) -> bool:
        """The same, on disk when it returns True, for what must outlive this process."""
        kept = self._write(report)
        self._incoming.put(None)
        return kept

    def waits(self) -> bool:
        """Whether reports of earlier are still here: the scheduler is away, or slow."""
        return not self._incoming.empty() or any(self._folder.glob("[0-9]*.json"))

    def now(self, report: Mapping[str, Any]) -> str:
        """Deliver a report at once, past the spool; why it could not be, or ``""``."""
        try:
            status = self._post(json.dumps(report).encode())
        except _FAILURES as error:
            return str(error)
        return "" if 200 <= status < 300 else f"HTTP status {status}"

    def _post(self, body: bytes) -> int:
        return self._deliver(self._url, body, self._credential(hashlib.sha256(body).hexdigest()))

    def _run(self) -> None:
        wait = _FIRST_WAIT_SECONDS
        timeout: float | None = 0.0
        while True:
            self._spool(timeout)
            if self._stop.is_set():
                self._spool(0.0)
                return
            if self._flush():
                wait, timeout = _FIRST_WAIT_SECONDS, None
            else:
                # New reports end the wait early but are only spooled: the scheduler is not there.
                end = time.monotonic() + wait
                while not self._stop.is_set() and time.monotonic() < end:
                    self._spool(end - time.monotonic())
                wait, timeout = min(wait * 2, _LONGEST_WAIT_SECONDS), 0.0

    def _spool(self, timeout: float | None) -> None:
        """Write waiting reports to disk; waits up to ``timeout`` (None: for ever) for the first."""
        try:
            report = self._incoming.get(timeout is None or timeout > 0, timeout or None)
            while True:
                if report is not None:
                    self._write(report)
                report = self._incoming.get_nowait()
        except queue.Empty:
            pass

    def _write(self, report: Mapping[str, Any]) -> bool:
        name = f"{time.time_ns():020d}-{next(self._serial):06d}.json"
        try:
            write_atomically(self._folder / name, json.dumps(report))
        except OSError as error:
            _log.error("spool: couldn't spool a report: %s", error)
            return False
        return True

    def _flush(self) -> bool:
        """Send the spool in order; False at the first report that has to wait."""
        waiting = sorted(self._folder.glob("[0-9]*.json"))
        for path in waiting[:-_MOST_WAITING]:
            _log.warning("spool: dropped %s, %d are waiting", path.name, len(waiting))
            path.unlink(missing_ok=True)
        for path in waiting[-_MOST_WAITING:]:
            if self._stop.is_set():
                return True
            try:
                body = path.read_bytes()
                status = self._post(body)
            except _FAILURES as error:
                self._complain(str(error))
                return False
            if status in _FINAL:
                _log.warning("spool: the scheduler refused %s with %d", path.name, status)
            elif not 200 <= status < 300:
                self._complain(f"HTTP status {status}")
                return False
            self._complained = False
            with contextlib.suppress(OSError):
                path.unlink()
        return True

    def _complain(self, reason: str) -> None:
        """One line per outage, not one per attempt."""
        if not self._complained:
            _log.warning("spool: couldn't reach %s: %s; reports wait", self._url, reason)
        self._complained = True
