"""Asks a Prometheus server's query API, within limits of time and size. Standard library only.

Numbers of an answer that are none, or out of bounds, are left out.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from crater_slurm.errors import ConfigError, UnavailableError

_LONGEST_ANSWER = 64 << 20
#: DCGM says "blank" by numbers near the largest there are.
_LARGEST = 1e15


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of an instant vector."""

    labels: Mapping[str, str]
    value: float


def query(
    url: str, expression: str, *, timeout_seconds: float, token: str | None = None
) -> list[Sample]:
    """The instant vector of a PromQL expression.

    Raises UnavailableError when the server is away, slow, refuses, or answers anything else.
    """
    parts = urlsplit(url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Accept": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    path = f"{parts.path.rstrip('/')}/api/v1/query?{urlencode({'query': expression})}"
    deadline = time.monotonic() + timeout_seconds
    try:
        connection = make(parts.hostname or "", parts.port, timeout=timeout_seconds)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = _read(answer, deadline)
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UnavailableError(f"Prometheus does not answer at {url}: {error}") from error
    return _vector(url, answer.status, body)


def _read(answer: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body; a server that sends a byte a minute is as good as none."""
    body = bytearray()
    while chunk := answer.read1(1 << 16):
        body += chunk
        if len(body) > _LONGEST_ANSWER:
            raise ValueError(f"it sends more than {_LONGEST_ANSWER} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("it sends too slowly")
    return bytes(body)


def _vector(url: str, status: int, body: bytes) -> list[Sample]:
    try:
        document: Any = json.loads(body)
        if status != 200 or document["status"] != "success":
            said = str(document.get("error", ""))[:200]
            raise UnavailableError(f"Prometheus at {url} answers {status}: {said or 'no success'}")
        if document["data"]["resultType"] != "vector":
            raise ValueError("not an instant vector")
        found = [_sample(entry) for entry in document["data"]["result"]]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UnavailableError(
            f"{url} answers {status} and not as Prometheus's query API does; is the address right?"
        ) from error
    return [sample for sample in found if 0 <= sample.value < _LARGEST]


def _sample(entry: Any) -> Sample:
    value = float(entry["value"][1])
    labels = {str(name): str(text) for name, text in entry["metric"].items()}
    return Sample(labels, value if math.isfinite(value) else -1.0)


def read_token(file: Path) -> str:
    """A bearer token from a file that nobody else can read. Raises ConfigError."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, encoding="ascii") as opened:
            facts = os.fstat(opened.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(f"{file} (health.prometheus.token_file) is no regular file")
            if facts.st_mode & 0o077:
                raise ConfigError(f"{file} holds a token and others may read it; chmod 600 {file}")
            token = opened.read(8192).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read health.prometheus.token_file {file}: {error}") from error
    if not token or not all(33 <= ord(c) < 127 for c in token):
        raise ConfigError(f"{file} holds no token of one line")
    return token
