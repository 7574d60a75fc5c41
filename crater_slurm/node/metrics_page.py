"""Serves the daemon's metrics by HTTP. Anybody may ask, so nobody may tie the daemon up.

A few questions at a time, each with a time limit; the rest is hung up on. A port that is taken
costs the page and not the daemon. prometheus_client is loaded only where a page is wanted.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from crater_slurm.node.metrics import families
from crater_slurm.node.services import Services

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_log = logging.getLogger("crater.node.metrics")
_MOST_AT_ONCE = 8
_TIMEOUT_SECONDS = 5.0


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_SECONDS

    def log_message(self, format: str, *arguments: Any) -> None:
        """A scrape every few seconds is no news."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int]) -> None:
        self._slots = threading.Semaphore(_MOST_AT_ONCE)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # WSGIServer would ask the name service for the host's full name, which may take long.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "crater-io-daemon", self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever hangs up or dribbles is no fault of ours."""
        _log.debug("metrics: couldn't answer %s", client_address, exc_info=True)


class Page:
    """``workers`` tells how many checkpoint workers run."""

    def __init__(self, services: Services, workers: Callable[[], int] = lambda: 0) -> None:
        self._services = services
        self._workers = workers
        self._server: _Server | None = None

    def start(self) -> None:
        """Serve at ``node.listen``, in threads."""
        listen = self._services.settings.node.listen
        if not listen:
            return
        host, _, port = listen.rpartition(":")
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app

            registry = CollectorRegistry()
            registry.register(self)
            self._server = _Server((host.strip("[]") or "0.0.0.0", int(port)))  # noqa: S104
            self._server.set_app(make_wsgi_app(registry))
        except (ImportError, OSError, ValueError, OverflowError) as error:
            _log.error("metrics: none at %s: %s (setting node.listen)", listen, error)
            return
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def stop(self) -> None:
        """Stop listening; a scrape under way is left to itself."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for family in families(self._services, self._workers):
            yield family.metric()
