"""What the daemons tell systemd that started them."""

from __future__ import annotations

import logging
import os
import socket

_log = logging.getLogger("crater")


def notify(state: str) -> None:
    """``READY=1`` or ``STOPPING=1``; nothing where systemd did not ask. Never raises."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as datagram:
            datagram.connect(address)
            datagram.send(state.encode())
    except OSError as error:
        _log.warning("couldn't notify systemd: %s", error)
