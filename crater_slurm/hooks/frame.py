"""The frame that every crater socket speaks: pairs of byte strings, small enough for Lua.

``CRATER1 <length>\\n`` followed by ``length`` bytes: netstrings (``5:hello,``), alternating key
and value. Keys may repeat and order is kept. Binary safe, no escaping, and a few lines in any
language, which is the point: one end runs inside slurmctld on Lua 5.1.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

MAGIC = b"CRATER1 "
#: A batch script's header plus the job's fields; slurmctld itself stops scripts at 4 MiB.
MAX_BODY = 1 << 20


class FrameError(Exception):
    """The bytes are no frame, or one that is too long."""


def encode(pairs: "Iterable[tuple[str | bytes, str | bytes]]") -> bytes:
    """Frame of an iterable of (key, value) pairs; str is sent as UTF-8, surrogates kept."""
    parts = []
    for pair in pairs:
        for item in pair:
            if isinstance(item, str):
                item = item.encode("utf-8", "surrogateescape")
            parts.append(b"%d:%s," % (len(item), item))
    body = b"".join(parts)
    return b"%s%d\n%s" % (MAGIC, len(body), body)


def decode_body(body: bytes) -> "list[tuple[str, str]]":
    """Pairs of a frame's body; raises FrameError on anything but complete netstrings."""
    items = []
    position = 0
    end = len(body)
    while position < end:
        colon = body.find(b":", position, position + 10)
        digits = body[position:colon] if colon > 0 else b""
        if not digits.isdigit():
            raise FrameError("no length at byte %d" % position)
        start = colon + 1
        stop = start + int(digits)
        if body[stop : stop + 1] != b",":
            raise FrameError("no comma at byte %d" % stop)
        items.append(body[start:stop].decode("utf-8", "surrogateescape"))
        position = stop + 1
    if len(items) % 2:
        raise FrameError("a key without a value")
    return list(zip(items[::2], items[1::2]))


def header_length(line: bytes) -> int:
    """Body length of a header line (without its newline); raises FrameError."""
    if not line.startswith(MAGIC) or not line[len(MAGIC) :].isdigit() or len(line) > 20:
        raise FrameError("not a crater frame: %r" % line[:40])
    length = int(line[len(MAGIC) :])
    if length > MAX_BODY:
        raise FrameError("a frame of %d bytes, more than %d" % (length, MAX_BODY))
    return length


def receive(connection: "socket.socket") -> "list[tuple[str, str]]":
    """Read one frame from a connected socket; its own timeout applies to each read.

    Raises FrameError when the peer closes early or sends something else, OSError from the socket.
    """
    data = b""
    while b"\n" not in data:
        if len(data) > 32:
            raise FrameError("not a crater frame: %r" % data[:40])
        chunk = connection.recv(65536)
        if not chunk:
            raise FrameError("the connection ended before a frame" if not data else "half a frame")
        data += chunk
    line, _, rest = data.partition(b"\n")
    length = header_length(line)
    chunks = [rest]
    size = len(rest)
    while size < length:
        chunk = connection.recv(65536)
        if not chunk:
            raise FrameError("half a frame: %d of %d bytes" % (size, length))
        chunks.append(chunk)
        size += len(chunk)
    body = b"".join(chunks)
    if len(body) != length:
        raise FrameError("%d bytes after the frame" % (len(body) - length))
    return decode_body(body)
