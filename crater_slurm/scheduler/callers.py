"""Who asks the API: a client by its token, or a person by MUNGE; how much, and how often.

A token's scopes say what it may do; MUNGE gives the uid, and a person may do what concerns the own
jobs. Both are counted, so that no caller keeps the others out.
"""

from __future__ import annotations

import hashlib
import math
import pwd
import threading
from collections.abc import Callable
from dataclasses import dataclass

import anyio.to_thread
from fastapi import HTTPException, Request

from crater_slurm.alldata import tokens
from crater_slurm.alldata.budget import Budget
from crater_slurm.config.settings import Scheduler
from crater_slurm.errors import SlurmError, StoreError
from crater_slurm.slurm import munge
from crater_slurm.store.repository import Store

_MOST_CALLERS = 10_000
#: So long a token that was found good is not looked up again: a revoked one works no longer.
_KNOWN_SECONDS = 1.0
#: Wrong credentials of one address: nobody types faster, and each costs a look into the store.
_WRONG_PER_SECOND, _WRONG_AT_ONCE = 2.0, 20


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. ``user`` is whose jobs the caller's tasks are; ``admin`` sees everybody's.

    ``key`` is whose requests are counted: each token's by itself.
    """

    client: str
    scopes: frozenset[str]
    key: str
    user: str | None = None
    admin: bool = False
    person: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A request whose caller is known, with its body."""

    caller: Caller
    body: bytes

    def may(self, scope: str) -> None:
        """Raises 403 when the caller's token does not allow it."""
        if scope not in self.caller.scopes:
            raise HTTPException(
                403, f"the token lacks the scope {scope!r}; make one with it: crater tokens create"
            )


async def limited_body(request: Request, longest: int) -> bytes:
    """The body; 413 as soon as more than ``longest`` bytes are announced or have come."""
    announced = request.headers.get("content-length", "")
    too_long = HTTPException(413, f"the body may have {longest} bytes")
    if announced.isdecimal() and int(announced[:20]) > longest:
        raise too_long
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > longest:
            raise too_long
        parts.append(part)
    return b"".join(parts)


class Callers:
    """Knows callers by what they send; ``call`` is what an endpoint depends on."""

    def __init__(
        self,
        settings: Scheduler,
        store: Callable[[], Store],
        admin_uids: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._open_store = store
        self._admins = admin_uids
        self._clock = clock
        self._lock = threading.Lock()
        self._budgets: dict[str, Budget] = {}
        self._known: dict[str, tuple[Caller, float]] = {}

    async def call(self, request: Request) -> Call:
        """The Call of a request. Raises HTTPException: 401, 413, 429, 503."""
        body = await limited_body(request, self._settings.longest_body_kib * 1024)
        scheme, _, credential = request.headers.get("authorization", "").partition(" ")
        credential = credential.strip()
        address = request.client.host if request.client else "?"
        caller: Caller | None
        if scheme == "Bearer":
            caller = self._known_by(credential)
            if caller is None:
                caller = await anyio.to_thread.run_sync(self._by_token, credential, address)
        elif scheme == "MUNGE":
            caller = await anyio.to_thread.run_sync(self._by_munge, credential, body)
        else:
            raise _unknown("send 'Authorization: Bearer <token>', or MUNGE <credential>")
        settings = self._settings
        self._count(caller.key, settings.requests_per_second, settings.requests_burst)
        return Call(caller, body)

    def _by_token(self, text: str, address: str) -> Caller:
        try:
            token = tokens.known(text, self._open_store(), self._clock())
        except StoreError as error:
            raise HTTPException(503, str(error), {"Retry-After": "5"}) from error
        if token is None:
            self._count(f"wrong {address}", _WRONG_PER_SECOND, _WRONG_AT_ONCE)
            raise _unknown("the token is unknown or revoked")
        caller = Caller(token.client, token.scopes, f"token {token.name}", token.user)
        with self._lock:
            while len(self._known) >= _MOST_CALLERS:
                self._known.pop(next(iter(self._known)))
            self._known[_digest(text)] = caller, self._clock()
        return caller

    def _known_by(self, text: str) -> Caller | None:
        """The caller whose token was found good a moment ago."""
        with self._lock:
            found = self._known.get(_digest(text))
        if found is None:
            return None
        caller, at = found
        return caller if 0 <= self._clock() - at < _KNOWN_SECONDS else None

    def _by_munge(self, credential: str, body: bytes) -> Caller:
        try:
            proof = munge.decode(credential)
        except SlurmError as error:
            raise HTTPException(401, str(error)) from error
        if proof.payload != hashlib.sha256(body).hexdigest():
            raise HTTPException(401, "the credential is for another body")
        try:
            name = pwd.getpwuid(proof.uid).pw_name
        except KeyError as error:
            raise HTTPException(403, f"this machine knows no user {proof.uid}") from error
        admin = proof.uid in self._admins
        scopes = frozenset(tokens.SCOPES)
        client = f"user:{name}"[:64]
        return Caller(client, scopes, client, name, admin, person=True)

    def _count(self, key: str, per_second: float, burst: float) -> None:
        with self._lock:
            budget = self._budgets.get(key)
            if budget is None:
                while len(self._budgets) >= _MOST_CALLERS:
                    self._budgets.pop(next(iter(self._budgets)))
                budget = self._budgets[key] = Budget(per_second, burst, self._clock)
        if wait := budget.wait_seconds():
            after = {"Retry-After": str(max(1, math.ceil(wait)))}
            raise HTTPException(429, f"{per_second:g} requests a second are allowed", after)


def _digest(text: str) -> str:
    """Of a token: the text itself is not kept, and the time to find it says nothing about it."""
    return hashlib.sha256(text.encode()).hexdigest()


def _unknown(words: str) -> HTTPException:
    return HTTPException(401, words, {"WWW-Authenticate": "Bearer"})
