"""Asks crater-scheduler's API as the calling user, proven by MUNGE. Standard library only."""

from __future__ import annotations

import hashlib
import http.client
import json
from typing import Any
from urllib.parse import quote, urlsplit

from crater_slurm.errors import CraterError, UnavailableError
from crater_slurm.slurm import munge


class NotFoundError(CraterError):
    """The scheduler does not know what was asked for; exit code 1."""


def decision(url: str, key: str, timeout_seconds: float = 10) -> dict[str, Any]:
    """The decision record and grants of an id or check nonce.

    Raises NotFoundError, UnavailableError when nobody answers, CraterError otherwise.
    """
    return _get(url, f"/api/v1/decisions/{quote(key, safe='')}", timeout_seconds)


def node_health(url: str, name: str, timeout_seconds: float = 10) -> dict[str, Any]:
    """The newest health that a node reported. Raises as ``decision`` does."""
    return _get(url, f"/api/v1/nodes/{quote(name, safe='')}/health", timeout_seconds)


def cluster_health(url: str, timeout_seconds: float = 30) -> dict[str, Any]:
    """Score, flags and weight of every node that Slurm has. Raises as ``decision`` does."""
    return _get(url, "/api/v1/health", timeout_seconds)


def _get(url: str, path: str, timeout_seconds: float) -> dict[str, Any]:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    make = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = make(parts.hostname or "", parts.port, timeout=timeout_seconds)
    credential = munge.encode(hashlib.sha256(b"").hexdigest())
    try:
        connection.request("GET", path, headers={"Authorization": f"MUNGE {credential}"})
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(
            f"crater-scheduler does not answer at {url} ({error}); is it up? "
            "(systemctl status crater-scheduler)"
        ) from error
    finally:
        connection.close()
    try:
        document: Any = json.loads(body)
    except ValueError as error:
        raise CraterError(f"{url} answered {answer.status} and no JSON") from error
    if answer.status == 404:
        raise NotFoundError(str(document.get("detail", "not found")))
    if answer.status != 200:
        raise CraterError(f"crater-scheduler: {document.get('detail', answer.status)}")
    assert isinstance(document, dict)
    return document
