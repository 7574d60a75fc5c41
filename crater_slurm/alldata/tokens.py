"""API tokens: made once and shown once, known by a salted hash afterwards.

A token is ``crt_KEY_SECRET``: the key finds it, the secret proves it. The secret is 256 random
bits, so one round of SHA-256 is as good as any slow hash, and a request is not held up by it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable

from crater_slurm.errors import UsageError
from crater_slurm.store.repository import Store
from crater_slurm.store.task_records import ApiToken

#: What a token may allow, and the meaning of it.
SCOPES = {
    "submit": "send tasks",
    "read": "see the client's own tasks, and estimates",
    "cancel": "cancel the client's own tasks",
    "nodes": "see nodes",
}
_TOKEN = re.compile(r"crt_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_USER = re.compile(r"[a-z_][a-z0-9_.-]{0,31}")


def create(
    name: str, client: str, scopes: Iterable[str], user: str | None, now: float
) -> tuple[ApiToken, str]:
    """A new token and the text that its client sends. Raises UsageError for what can't be."""
    for what, text in (("name", name), ("client", client)):
        if not _NAME.fullmatch(text):
            raise UsageError(
                f"{text!r} can't be a token's {what}; use lower-case letters, digits and _ . -, "
                "at most 64"
            )
    if user is not None and not _USER.fullmatch(user):
        raise UsageError(f"{user!r} is no name of a cluster user")
    wanted = frozenset(scopes)
    if unknown := sorted(wanted - SCOPES.keys()):
        raise UsageError(f"there is no scope {unknown[0]!r}; valid are {', '.join(SCOPES)}")
    if not wanted:
        raise UsageError(f"a token needs a scope; valid are {', '.join(SCOPES)}")
    key, secret, salt = secrets.token_hex(8), secrets.token_urlsafe(32), secrets.token_hex(16)
    token = ApiToken(
        name=name,
        key=key,
        client=client,
        scopes=wanted,
        user=user,
        salt=salt,
        digest=_digest(salt, secret),
        created=now,
    )
    return token, f"crt_{key}_{secret}"


def known(text: str, store: Store, now: float) -> ApiToken | None:
    """The token that a client sent; None when it is none, or no longer. Raises StoreError."""
    parts = _TOKEN.fullmatch(text)
    if parts is None:
        return None
    token = store.token_by_key(parts.group(1))
    # The hash is worked out in any case: the time says nothing about which keys there are.
    digest = _digest(token.salt if token else "", parts.group(2))
    if token is None or not hmac.compare_digest(digest, token.digest) or token.revoked is not None:
        return None
    store.token_used(token, now)
    return dataclasses.replace(token, digest="", salt="")


def _digest(salt: str, secret: str) -> str:
    return hashlib.sha256(f"{salt}:{secret}".encode()).hexdigest()
