"""Frames between nodes: a JSON header of bounded length, and raw data of a length said before.

Whoever reads a frame says how much data it is ready to take; a longer one ends the connection.
Headers come from another node and may be anything: what is no object with an operation is an error.
"""

from __future__ import annotations

import json
import struct
from typing import Any

MAGIC = b"CRP1"
HEAD = struct.Struct("!4sIQ")
MOST_HEADER = 64 << 10

Header = dict[str, Any]


class TransportError(Exception):
    """A connection is of no more use; a clause for "couldn't"."""


def encode(header: Header, data_bytes: int = 0) -> bytes:
    """The frame's beginning, up to its data."""
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MOST_HEADER:
        raise TransportError(f"send a header of {len(text)} bytes, {MOST_HEADER} at most")
    return HEAD.pack(MAGIC, len(text), data_bytes) + text


def lengths(head: bytes, most_data: int) -> tuple[int, int]:
    """(bytes of the header, bytes of data) of a frame's first 16 bytes."""
    magic, header, data = HEAD.unpack(head)
    if magic != MAGIC:
        raise TransportError("understand the other end: it does not speak this protocol")
    if not 0 < header <= MOST_HEADER:
        raise TransportError(f"take a header of {header} bytes, {MOST_HEADER} at most")
    if data > most_data:
        raise TransportError(f"take {data} bytes of data, {most_data} at most")
    return header, data


def decode(text: bytes | bytearray | memoryview) -> Header:
    """The header of its bytes."""
    try:
        header = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise TransportError("read a header that is no JSON") from error
    if not isinstance(header, dict) or not isinstance(header.get("op"), str):
        raise TransportError("understand a header without an operation")
    return header


def whole(header: Header, key: str, most: int, least: int = 0) -> int:
    """A whole number of a header, from ``least`` to ``most``."""
    value = header.get(key)
    if type(value) is not int or not least <= value <= most:
        raise TransportError(f"use {key}={value!r:.40}: a whole number up to {most} belongs there")
    return value


def text(header: Header, key: str, most: int = 4096) -> str:
    """A text of a header, at most ``most`` characters."""
    value = header.get(key)
    if not isinstance(value, str) or len(value) > most:
        raise TransportError(f"use {key}={value!r:.40}: a text belongs there")
    return value
