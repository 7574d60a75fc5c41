"""Tickets: by which one node's worker may bring or fetch a job's parts on another node.

The daemon (root) signs a ticket with the cluster's plan key; the worker, which runs as the user,
gets only the ticket. Its first half says who may do what and travels in the open; its second half,
the signature, never travels: both ends use it as the key of a challenge, so that who listens on
the network gains nothing, and an address taken over by somebody else is no partner. Standard
library only, no I/O: nodes and workers share it. It refuses to guess: what does not verify is None
or an error with the reason.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Plan tokens are signed with the same key over texts that begin with "1.": never with this.
PREFIX = "crater-peer-1."
MOST_CHARACTERS = 4096
_BODY = re.compile(r"crater-peer-1\.[A-Za-z0-9_-]{1,4000}\Z")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_JOB = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


class TicketError(Exception):
    """A ticket does not count; the message is a sentence for the log and, once it is known to be
    this cluster's, for its owner."""


class EndedError(TicketError):
    """A genuine ticket is over."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """``node`` issued it. ``partners`` may be written to; reading needs only that the other node
    had the same job of the same user. ``expires``: Unix time."""

    job_id: str
    cluster: str
    uid: int
    node: str
    partners: tuple[str, ...]
    expires: int


def is_node(text: object) -> bool:
    """Whether a text may be a node's name, and so part of a path."""
    return isinstance(text, str) and bool(_NODE.match(text)) and ".." not in text


def issue(ticket: Ticket, key: bytes) -> str:
    """The ticket as a worker gets it: ``crater-peer-1.PAYLOAD.SECRET``."""
    payload = {
        "j": ticket.job_id,
        "z": ticket.cluster,
        "u": ticket.uid,
        "n": ticket.node,
        "p": list(ticket.partners),
        "e": ticket.expires,
    }
    body = PREFIX + _b64(json.dumps(payload, separators=(",", ":"), sort_keys=True).encode())
    if len(body) > MOST_CHARACTERS - 96:
        raise TicketError(f"A ticket can't name {len(ticket.partners)} partners; name fewer.")
    return f"{body}.{_b64(_secret(body, key))}"


def split(text: str) -> tuple[str, bytes]:
    """(half for the network, secret half) of a worker's ticket. Raises TicketError."""
    body, _, secret = text.rpartition(".")
    try:
        key = base64.urlsafe_b64decode(secret + "=" * (-len(secret) % 4))
    except ValueError as error:
        raise TicketError("The ticket is damaged: its signature is not base64.") from error
    if not _BODY.match(body) or len(key) != 32:
        raise TicketError("The ticket is damaged, or of another version of crater-slurm.")
    return body, key


def prove(secret: bytes, *words: str) -> str:
    """Proof of holding a secret, about these words; they hold both ends' fresh numbers."""
    return hmac.new(secret, json.dumps(words).encode(), hashlib.sha256).hexdigest()


def check(
    body: str, proof: str, words: Sequence[str], keys: Sequence[bytes], now: float
) -> tuple[Ticket, bytes]:
    """The ticket and its secret, when ``proof`` was made with the secret that one of our keys
    gives it. Raises TicketError when it is forged, damaged or over."""
    if not _BODY.match(body):
        raise TicketError("It is no ticket.")
    for key in keys:
        secret = _secret(body, key)
        if hmac.compare_digest(prove(secret, *words), proof):
            break
    else:
        raise TicketError("The ticket is not signed with this cluster's plan key.")
    ticket = _read(body)
    if ticket.expires <= now:
        raise EndedError(f"The ticket of job {ticket.job_id} ended at {ticket.expires}.")
    return ticket, secret


def _read(body: str) -> Ticket:
    """Signed by us, so a failure is a version that does not fit."""
    try:
        text = body[len(PREFIX) :]
        data = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        ticket = Ticket(data["j"], data["z"], data["u"], data["n"], tuple(data["p"]), data["e"])
    except (ValueError, KeyError, TypeError) as error:
        raise TicketError(f"The ticket can't be read by this version: {error}.") from error
    whole = type(ticket.uid) is int and type(ticket.expires) is int
    named = all(is_node(node) for node in (ticket.node, *ticket.partners))
    if not whole or not named or not (isinstance(ticket.job_id, str) and _JOB.match(ticket.job_id)):
        raise TicketError("The ticket can't be read by this version.")
    return ticket


def _secret(body: str, key: bytes) -> bytes:
    return hmac.new(key, body.encode(), hashlib.sha256).digest()


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
