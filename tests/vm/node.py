# SPDX-License-Identifier: Apache-2.0
"""The project's own files in a guest: its source tree, and its node daemon started from it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import GuestError
from .guest import Guest
from .slurm import CGROUP_ROOT

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = "/opt/crater"
PUSHED = ("crater_slurm", "prolog", "job_submit", "templates", "etc", "pyproject.toml")
"""pyproject.toml goes along: by it the package knows that its hooks and templates lie beside it."""

BED = "/opt/crater-vm"
"""Where the bed's own programs lie in the guest."""

CONFIG = "/etc/crater/crater.yaml"
SOCKET = "/run/crater/node.sock"
"""Where the package itself looks for its settings, and listens when they say nothing else."""

LOG = "/var/log/crater-node.log"
PID_FILE = "/run/crater-node.pid"
SERVICE_CGROUP = f"{CGROUP_ROOT}/system.slice/crater-io-daemon.service"
START_SECONDS = 300
"""Patience for the daemon's start: importing its libraries takes many seconds when emulated."""


def push_source(guest: Guest) -> None:
    """Put the repository's own files at /opt/crater, in place of what was pushed before.

    What Python has compiled stays, and is used where its source is the same: to compile the
    daemon anew takes an emulated machine longer than all else at its start.
    """
    guest.check(f"mkdir -p {SOURCE} && find {SOURCE} -type f ! -path '*/__pycache__/*' -delete")
    guest.push([path for name in PUSHED if (path := REPOSITORY / name).exists()], SOURCE)


@dataclasses.dataclass(frozen=True)
class NodeDaemon:
    """The running node daemon of a guest."""

    guest: Guest
    socket: str
    command: str
    """What runs it, in bash."""

    def start(self) -> None:
        """Start it, also once more after its end. Raises GuestError with its log when it ends or
        makes no socket."""
        self.guest.check(
            f"""
            rm -f {shlex.quote(self.socket)} {PID_FILE}
            mkdir -p {Path(self.socket).parent} {SERVICE_CGROUP}
            (
                echo $BASHPID >{SERVICE_CGROUP}/cgroup.procs
                echo $BASHPID >{PID_FILE}
                cd /
                exec env PYTHONPATH={SOURCE}:{BED} {self.command} </dev/null >>{LOG} 2>&1
            ) &
            """
        )
        _await_socket(self)

    @property
    def pid(self) -> int:
        """The daemon's process in the guest."""
        return int(self.guest.read(PID_FILE))

    def alive(self) -> bool:
        """Return whether its process is there (a zombie is not)."""
        state = f"grep -q '^State:.[^ZX]' /proc/$(cat {PID_FILE})/status"
        return self.guest.run(state).rc == 0

    def log(self) -> str:
        """Return all that it has written to its output so far."""
        return self.guest.read(LOG)

    def stop(self, signal: str = "TERM") -> None:
        """Send it a signal and wait until it has ended. Raises GuestError if it does not."""
        self.guest.run(f"kill -{signal} $(cat {PID_FILE})")
        gone = f"! grep -q '^State:.[^ZX]' /proc/$(cat {PID_FILE})/status"
        self.guest.wait_for(gone, 30, what=f"the node daemon to end by SIG{signal}")


@contextlib.contextmanager
def crater_node(
    guest: Guest,
    settings: Mapping[str, Any],
    *,
    module: str = "crater_slurm.node",
    arguments: Sequence[str] = ("--foreground",),
) -> Iterator[NodeDaemon]:
    """Run the node daemon of this working tree in the guest until the block is left.

    `settings` becomes the configuration file (JSON, which is YAML too). The daemon runs as root in
    a cgroup of its own, as systemd would run it, so that the memory it uses is not the root's.
    Raises GuestError with its log when it ends or makes no socket.
    """
    socket = str(settings.get("node", {}).get("socket", SOCKET))
    push_source(guest)
    guest.write(CONFIG, json.dumps(dict(settings), indent=2) + "\n")
    guest.logs = [*guest.logs, *([] if LOG in guest.logs else [LOG])]
    guest.check(f"rm -f {LOG}")
    daemon = NodeDaemon(guest, socket, shlex.join(["/usr/bin/python3", "-m", module, *arguments]))
    try:
        daemon.start()
        yield daemon
    finally:
        if daemon.alive():
            daemon.stop()
        guest.check(f"echo 1 >{SERVICE_CGROUP}/cgroup.kill")  # what it may have left behind


def _await_socket(daemon: NodeDaemon) -> None:
    """Wait for the socket, but no longer than the daemon lives."""
    guest, ended = daemon.guest, f"[ -e {PID_FILE} ] && ! [ -e /proc/$(cat {PID_FILE}) ]"
    guest.wait_for(
        f"[ -S {shlex.quote(daemon.socket)} ] || {{ {ended}; }}",
        START_SECONDS,
        what=f"the node daemon's socket {daemon.socket}",
    )
    if not daemon.alive():
        raise GuestError(f"the node daemon ended at its start:\n{daemon.log()}")
