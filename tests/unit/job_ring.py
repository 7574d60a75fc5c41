"""What stands between a trainer and a real checkpoint worker: the daemon's socket, and nothing
else of it. It takes a trainer's connection, reads ``open`` and hands both on."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import Any

from checkpoint_worker import Daemon, a_spec

from crater_slurm.job import wire


class Gate:
    """A real worker behind a path for ``CRATER_RING``. ``limit``: room for a lane, in bytes."""

    def __init__(self, tmp: Path, folder: Path, limit: int = 1 << 40, **spec: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.daemon = Daemon(tmp, a_spec(folder, **spec))
        self.daemon.start()
        self.limit = limit
        self.path = str(tmp / "ring.sock")
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(self.path)
        self._server.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                channel = wire.Channel(self._server.accept()[0])
                message, fds = channel.receive()
            except (OSError, wire.WireError):
                if self._server.fileno() < 0:
                    return
                continue
            lane = {"op": "lane", "open": message, "limit": self.limit, "pid": os.getpid()}
            with contextlib.suppress(OSError):  # no worker: the trainer sees its connection end
                self.daemon.send(lane, (channel.fileno(), *fds))
            channel.close()
            for fd in fds:
                os.close(fd)

    def restart(self) -> None:
        """A worker after a killed one, as a daemon starts it."""
        self.daemon.start()

    def stop(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.daemon.stop()
