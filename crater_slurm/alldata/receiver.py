"""What a platform has to do with callbacks: check who sends, drop repeats, keep the order.

The fake AllData server is made of it, and so are tests of others: it keeps all that came and says
what was wrong with it. Pure but for its lock; time comes from outside.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_SIGNATURE = re.compile(r"t=(\d{1,12}),v1=([0-9a-f]{64})")
#: A signature that is older than this may be somebody's who listened.
_OLDEST_SECONDS = 300
STATUSES = frozenset(
    {
        *("scheduled", "running", "completed", "failed", "cancelled", "timeout", "preempted"),
        *("requeued", "rejected", "flushed", "unknown"),
    }
)
_MOST_KEPT = 100_000


@dataclass(slots=True)
class Received:
    """One POST that came: its verdict, and what is wrong with it in plain words."""

    time: float
    body: dict[str, Any]
    event_id: str
    repeat: bool = False
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "time": self.time,
            "event_id": self.event_id,
            "repeat": self.repeat,
            "problems": self.problems,
            "body": self.body,
        }


class NotOursError(Exception):
    """The sender did not prove who it is; the message says how."""


class Receiver:
    """Takes callbacks. ``user`` and ``password`` are Basic authentication's, ``key`` HMAC's."""

    def __init__(self, user: str = "", password: str = "", key: str = "") -> None:
        self._user, self._password, self._key = user, password, key
        self._lock = threading.Lock()
        self.received: list[Received] = []
        self._bodies: dict[str, str] = {}
        self._sequences: dict[str, int] = {}
        self.refused = 0

    def check(self, headers: Mapping[str, str], body: bytes, now: float) -> None:
        """Raises NotOursError unless authentication and signature are right."""
        try:
            if self._user:
                self._check_user(headers.get("authorization", ""))
            if self._key:
                self._check_signature(headers.get("x-crater-signature", ""), body, now)
        except NotOursError:
            with self._lock:
                self.refused += 1
            raise

    def _check_user(self, given: str) -> None:
        scheme, _, text = given.partition(" ")
        try:
            user, _, password = base64.b64decode(text, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            user = password = ""
        right = hmac.compare_digest(user.encode(), self._user.encode())
        right &= hmac.compare_digest(password.encode(), self._password.encode())
        if scheme != "Basic" or not right:
            raise NotOursError("no Basic authentication, or another user or password")

    def _check_signature(self, given: str, body: bytes, now: float) -> None:
        found = _SIGNATURE.fullmatch(given)
        if not found:
            raise NotOursError("no X-Crater-Signature: t=...,v1=...")
        signed = f"{found.group(1)}.".encode() + body
        right = hmac.new(self._key.encode(), signed, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(right, found.group(2)):
            raise NotOursError("the signature is of another key or body")
        if abs(now - int(found.group(1))) > _OLDEST_SECONDS:
            raise NotOursError("the signature is old")

    def take(self, body: bytes, now: float) -> Received:
        """Keep a callback, with whatever is wrong with it. ValueError when it is no JSON object."""
        document = json.loads(body)
        if not isinstance(document, dict):
            raise ValueError("no JSON object")
        with self._lock:
            one = Received(now, document, str(document.get("event_id")))
            text = body.decode()
            before = self._bodies.get(one.event_id)
            one.repeat = before is not None
            if before is not None:
                if before != text:
                    one.problems.append("a repeat with another content")
            else:
                self._bodies[one.event_id] = text
                one.problems += self._judge(document)
            self.received.append(one)
            del self.received[:-_MOST_KEPT]
        return one

    def _judge(self, document: Mapping[str, Any]) -> list[str]:
        if document.get("test") is True:
            return []  # what "crater callbacks test" sends
        found = []
        task, sequence = str(document.get("task_id")), document.get("sequence")
        if document.get("status") not in STATUSES:
            found.append(f"the status {document.get('status')!r} is unknown")
        expected = self._sequences.get(task, 0) + 1
        if sequence != expected:
            found.append(f"sequence {sequence!r} instead of {expected}: lost or out of order")
        if isinstance(sequence, int):
            self._sequences[task] = sequence
        return found

    def problems(self) -> list[str]:
        """All that was wrong so far."""
        with self._lock:
            return [
                f"{one.body.get('task_id')}: {problem}"
                for one in self.received
                for problem in one.problems
            ]

    def statuses(self, task_id: str) -> list[str]:
        """What was told of a task, repeats left out."""
        with self._lock:
            return [
                str(one.body["status"])
                for one in self.received
                if one.body.get("task_id") == task_id and not one.repeat
            ]

    def forget(self) -> None:
        """Begin anew."""
        with self._lock:
            self.received.clear()
            self._bodies.clear()
            self._sequences.clear()
            self.refused = 0
