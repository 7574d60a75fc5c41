"""Tasks of a platform, what it is told of them and its tokens, as plain data.

Times are seconds since 1970, None where nothing happened yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTask:
    """A task as it is taken in; ``body`` is JSON text, ``token`` what its job will carry.

    With ``attempt`` whoever keeps it is about to have its job submitted.
    """

    client: str
    task_id: str
    body_hash: str
    body: str
    user: str
    token: str
    source: str
    state: str
    time: float
    look: float | None = None
    attempt: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTask:
    """A task as the store has it. ``sequence`` is that of its newest callback."""

    number: int
    client: str
    task_id: str
    body_hash: str
    user: str
    token: str
    source: str
    state: str
    settled: bool
    sequence: int
    job_id: int | None
    plan_id: str | None
    restarts: int
    created: float
    changed: float
    attempt: float | None
    submitted: float | None
    started: float | None
    ended: float | None
    look: float | None
    exit_code: str | None
    reason: str
    resources: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCallback:
    """One thing to tell of a task; ``payload`` is the JSON text that is sent, byte for byte."""

    event_id: str
    sequence: int
    status: str
    time: float
    payload: str
    delivery: str = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCallback:
    """A callback as the store has it, with its task's names."""

    number: int
    event_id: str
    task: int
    client: str
    task_id: str
    sequence: int
    status: str
    time: float
    payload: str
    delivery: str
    attempts: int
    next_try: float
    http_status: int | None
    error: str
    done: float | None


#: What may have become of a callback. ``off``: nobody wanted to be told when it was written.
DELIVERIES = ("waiting", "delivered", "dead", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiToken:
    """A client's token without its secret; ``scopes`` are words, ``user`` whom its jobs run as."""

    name: str
    key: str
    client: str
    scopes: frozenset[str]
    user: str | None
    salt: str
    digest: str
    created: float
    used: float | None = None
    revoked: float | None = None
