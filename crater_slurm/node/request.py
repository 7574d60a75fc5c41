"""One question of a hook and its answer, free of sockets: what the context modules work on.

Everything in ``env`` came over a socket that anyone may open. It is worth as much as the peer's
credentials: root's Prolog is Slurm's word, a TaskProlog's is the user's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

#: A name that is safe as one path component: no separator, no control character, no leading dot.
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}\Z")


class RequestError(Exception):
    """The question can't be answered; the message reads after "couldn't"."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is on the other end, by the kernel's word (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Request:
    """A hook's question: its operation, the variables it sent, and who sent it."""

    operation: str
    env: dict[str, str]
    peer: Peer

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, str]], peer: Peer) -> Request:
        """Request of a frame's pairs; unknown keys are ignored: newer hooks may send more."""
        operation = ""
        env: dict[str, str] = {}
        for key, value in pairs:
            if key == "op":
                operation = value
            elif key.startswith("env."):
                env[key[4:]] = value
        return cls(operation, env, peer)

    def plain(self, name: str, default: str | None = None) -> str:
        """A variable that becomes part of a path; raises RequestError unless it is harmless."""
        value = self.env.get(name) or default
        if value is None:
            raise RequestError(f"go on without {name}, which the hook did not send")
        if not _PLAIN.match(value):
            raise RequestError(f"use {name}={value!r:.80}: only letters, digits and ._- are taken")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """A variable that is a whole number, zero or more; raises RequestError otherwise."""
        value = self.env.get(name) or (None if default is None else str(default))
        if value is None:
            raise RequestError(f"go on without {name}, which the hook did not send")
        if not (value.isascii() and value.isdigit() and len(value) < 12):
            raise RequestError(f"use {name}={value!r:.80}: it must be a number")
        return int(value)


@dataclass(slots=True)
class Answer:
    """What the hook is told, and what the daemon still does once the hook has gone."""

    status: str = "ok"
    exit: int = 0
    lines: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    afterwards: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def error(cls, text: str) -> Answer:
        """The hook goes on without us, with a line in its syslog."""
        return cls(status="error", logs=[f"couldn't {text}"])

    def pairs(self) -> list[tuple[str, str]]:
        """The answer as frame pairs."""
        return [
            ("status", self.status),
            ("exit", str(self.exit)),
            *(("line", line) for line in self.lines),
            *(("log", line) for line in self.logs),
        ]
