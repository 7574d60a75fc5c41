"""What crater-probe serve costs while it runs, and what a scrape of its metrics costs.

The budget is under 1 % of one core. It samples every second here, fifteen times as often as by
default, so that a minute shows it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from bench.table import show

SECONDS = 60
_PORT = 29193
_TICKS = os.sysconf("SC_CLK_TCK")


def run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "probe": {
                "listen": f"127.0.0.1:{_PORT}",
                "state_dir": f"{folder}/state",
                "sample_seconds": 1,
                "publish_seconds": 3600,
            },
            "node": {"profile": f"{folder}/profile.json", "cache": {"mount_point": folder}},
        }
        config = Path(folder) / "crater.yaml"
        config.write_text(json.dumps(settings))
        daemon = subprocess.Popen(
            [sys.executable, "-m", "crater_slurm.sensor"],
            env={**os.environ, "CRATER_CONFIG": str(config)},
            stderr=subprocess.DEVNULL,
        )
        try:
            rows = _measure(daemon.pid)
        finally:
            daemon.terminate()
            daemon.wait(timeout=10)
    show("crater-probe serve (`python -m bench probe`)", ["", "CPU of one core, %"], rows)


def _measure(pid: int) -> list[list[str]]:
    _wait()
    time.sleep(2)
    sampling = _percent(pid, lambda: time.sleep(SECONDS), SECONDS)

    def scrape() -> None:
        for _ in range(10):
            urllib.request.urlopen(f"http://127.0.0.1:{_PORT}/metrics").read()
            time.sleep(1)

    both = _percent(pid, scrape, 10)
    return [
        ["a sample a second", f"{sampling:.2f}"],
        ["a sample every 15 s (the default), from that", f"{sampling / 15:.2f}"],
        ["a sample and a scrape a second", f"{both:.2f}"],
    ]


def _percent(pid: int, work: object, seconds: float) -> float:
    assert callable(work)
    before, begin = _ticks(pid), time.monotonic()
    work()
    return 100 * (_ticks(pid) - before) / _TICKS / (time.monotonic() - begin)


def _ticks(pid: int) -> int:
    """Clock ticks of the process and the children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return sum(int(value) for value in fields[11:15])


def _wait() -> None:
    for _ in range(100):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{_PORT}/metrics").read()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit("crater-probe serve does not start")
