"""The signed plan that travels in a job's comment from the submit filter to the nodes.

A user can edit the comment, so nothing in it counts unless the signature verifies under the
cluster's plan key and the uid is the job's own. Compact, because Slurm stops comments at 1,024
characters, and the user's own comment shares that space.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crater_slurm.model.plan import Plan

PREFIX = "crater-plan:"
_TOKEN = re.compile(r"crater-plan:(1\.[A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)(?!\S)")
_ANY = re.compile(r"(?<![ \t])[ \t]*crater-plan:\S*")
_SIGNATURE_BYTES = 16

#: Plan attributes and their one-letter names in the token.
_SHORT = {
    "id": "i",
    "gpus": "g",
    "gpu_type": "y",
    "cpus": "n",
    "memory_mib": "m",
    "memory_bandwidth_gb_s": "b",
    "ssd_iops": "s",
    "cache_gb": "k",
    "numa": "a",
    "domains": "d",
    "precision": "p",
    "checkpoint": "c",
    "shards": "h",
    "slices": "l",
    "gpu_memory_mib": "w",
    "card": "e",
    "checkpoint_keep": "o",
    "checkpoint_keep_every": "f",
    "checkpoint_credentials": "v",
    "stage": "x",
    "ring_gb": "q",
}
#: Those that are texts; the others are numbers.
_TEXTS = frozenset(
    {"id", "gpu_type", "numa", "precision", "checkpoint", "card", "checkpoint_credentials", "stage"}
)


class TokenError(Exception):
    """A token is not genuine or not this job's; the message says why, for the log."""


@dataclass(frozen=True, slots=True)
class SignedPlan:
    """A verified plan with the facts that bind it: user, cluster, time, array or not."""

    plan: Plan
    user_id: int
    cluster: str
    issued: int
    array: bool = False


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _signature(key: bytes, signed: str) -> bytes:
    return hmac.new(key, signed.encode(), hashlib.sha256).digest()[:_SIGNATURE_BYTES]


def sign(signed_plan: SignedPlan, key: bytes) -> str:
    """Token of a plan, such as ``crater-plan:1.eyJ...`` (about 250 characters)."""
    payload: dict[str, Any] = {
        short: getattr(signed_plan.plan, name)
        for name, short in _SHORT.items()
        if getattr(signed_plan.plan, name) not in (None, 0)
    }
    payload |= {"u": signed_plan.user_id, "z": signed_plan.cluster, "t": signed_plan.issued}
    if signed_plan.array:
        payload["r"] = 1
    signed = "1." + _b64(json.dumps(payload, separators=(",", ":"), sort_keys=True).encode())
    return f"{PREFIX}{signed}.{_b64(_signature(key, signed))}"


def find(comment: str) -> str | None:
    """The first well-formed token in a comment, unverified."""
    match = _TOKEN.search(comment)
    return match.group(0) if match else None


def strip(comment: str) -> str:
    """The user's own part of a comment, without anything that looks like a token."""
    return _ANY.sub("", comment).strip()


def read_unverified(comment: str) -> dict[str, Any] | None:
    """Payload of a token for display only; never act on it."""
    match = _TOKEN.search(comment)
    if not match:
        return None
    try:
        payload = json.loads(_unb64(match.group(1)[2:]))
    except ValueError:
        return None
    return payload if isinstance(payload, dict) else None


def verify(comment: str, keys: Sequence[bytes], user_id: int, cluster: str) -> SignedPlan | None:
    """The plan in a comment; None when there is no token.

    ``keys`` are the cluster's plan keys, newest first; all of them verify, so that keys can be
    rotated. Raises TokenError when a token is there and is forged, damaged, another user's or
    another cluster's.
    """
    match = _TOKEN.search(comment)
    if not match:
        if PREFIX in comment:
            raise TokenError("the comment holds a damaged plan token")
        return None
    signed, given = match.groups()
    try:
        given_bytes = _unb64(given)
    except ValueError as error:
        raise TokenError("the signature of the plan token is not base64") from error
    if not any(hmac.compare_digest(_signature(key, signed), given_bytes) for key in keys):
        raise TokenError("the plan token is not signed with this cluster's plan key")
    # Signed by us, so the payload is well-formed; a failure below is a version mismatch.
    try:
        payload = json.loads(_unb64(signed[2:]))
        plan = Plan(**{name: payload[short] for name, short in _SHORT.items() if short in payload})
        result = SignedPlan(plan, payload["u"], payload["z"], payload["t"], bool(payload.get("r")))
    except (ValueError, KeyError, TypeError) as error:
        raise TokenError(f"the plan token can't be read by this version: {error}") from error
    if result.user_id != user_id:
        raise TokenError(f"the plan token belongs to uid {result.user_id}, not to {user_id}")
    if cluster and result.cluster and result.cluster != cluster:
        raise TokenError(f"the plan token is for cluster {result.cluster}, not for {cluster}")
    return result


def plan_fields(payload: dict[str, Any]) -> dict[str, Any]:
    """The plan's attributes in a token's payload, by their long names; for display.

    Anybody may have written the payload, so what is no text or number where one belongs is left
    out.
    """
    return {
        name: payload[short]
        for name, short in _SHORT.items()
        if short in payload and _may_be(name, payload[short])
    }


def _may_be(name: str, value: Any) -> bool:
    if name in _TEXTS:
        return isinstance(value, str) and value.isprintable()
    return type(value) in (int, float)
