"""Tells a running job something, in its own output: ``scontrol notify``, beside all other work.

A message costs slurmctld one request, so each is sent once, by a thread that nobody waits for. What
can't be told is logged, and stands in the job's record anyway.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from crater_slurm.config.settings import Slurm
from crater_slurm.errors import SlurmError
from crater_slurm.slurm.client import Client

_log = logging.getLogger("crater.node.notices")
_TIMEOUT_SECONDS = 10.0
_MOST_AT_ONCE = 4
_LONGEST = 500

Send = Callable[[str, str], None]


def sender(settings: Slurm) -> Send:
    """Sends a text to a job's standard error by scontrol. Raises SlurmError."""
    client = Client(bin_dir=settings.bin_dir, conf=settings.conf, timeout_seconds=_TIMEOUT_SECONDS)

    def send(job_id: str, text: str) -> None:
        client.run("scontrol", "notify", job_id, text)

    return send


class Notices:
    """``tell`` returns at once; of too many at a time the rest is only logged."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._slots = threading.Semaphore(_MOST_AT_ONCE)

    def tell(self, job_id: str, text: str) -> None:
        """Say one printable line to a job."""
        line = "crater: " + "".join(c if c.isprintable() else "?" for c in text)[:_LONGEST]
        if not self._slots.acquire(blocking=False):
            _log.warning("notices: too many at once, job %s was not told: %s", job_id, line)
            return
        threading.Thread(target=self._run, args=(job_id, line), name="notice", daemon=True).start()

    def _run(self, job_id: str, line: str) -> None:
        try:
            self._send(job_id, line)
        except SlurmError as error:
            _log.warning("notices: couldn't tell job %s %r: %s", job_id, line, error)
        finally:
            self._slots.release()
