"""``crater-probe serve``: run the sensor and its metrics page until a signal."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

from prometheus_client import CollectorRegistry, start_http_server

from crater_slurm import systemd
from crater_slurm.config.settings import Settings
from crater_slurm.probe.profile import node_name
from crater_slurm.sensor.metrics import NodeCollector
from crater_slurm.sensor.sensor import Sensor

_log = logging.getLogger("crater.probe")
#: Behind the node's jobs.
_NICE = 5


def serve(settings: Settings, name: str | None = None) -> None:
    """Until SIGTERM or SIGINT; SIGHUP scans at once. Raises CraterError when it can't start."""
    os.nice(_NICE)
    sensor = Sensor(settings, name or node_name())
    sensor.start()
    stop = threading.Event()
    wake = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stop.set()
        wake.set()

    def scan_now(_number: int, _frame: FrameType | None) -> None:
        sensor.rescan.set()
        wake.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGHUP, scan_now)
    _show_metrics(settings.probe.listen, sensor)
    wait = sensor.turn()
    systemd.notify("READY=1")
    while not stop.is_set():
        if wake.wait(wait):
            wake.clear()
        if not stop.is_set():
            wait = sensor.turn()
    sensor.stop()


def _show_metrics(listen: str, sensor: Sensor) -> None:
    """Start the page; a port that is taken costs the metrics and not the reports."""
    if not listen:
        return
    host, _, port = listen.rpartition(":")
    registry = CollectorRegistry()
    registry.register(NodeCollector(lambda: sensor.picture))
    try:
        start_http_server(int(port), host.strip("[]") or "0.0.0.0", registry)  # noqa: S104
    except (OSError, ValueError, OverflowError) as error:
        _log.error("no metrics at %s: %s (setting probe.listen)", listen, error)
