"""The services of a lab: what runs where, and starting, stopping and signalling one of them."""

from __future__ import annotations

import importlib.util
import os
import signal as signals
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from crater_slurm import paths
from crater_slurm.errors import LabError, nearest
from crater_slurm.lab import cgroups
from crater_slurm.lab.namespaces import Namespaces
from crater_slurm.lab.places import INSIDE, Folders

#: A service as people name it: "slurmctld", "scheduler", or a pair such as ("node", "a1").
ServiceName = str | tuple[str, str]

#: From fork to exec takes milliseconds, but an emulated machine under load takes its time.
_START_SECONDS = 30
# Writes its own number before it becomes the service, so that the service can be found.
_LAUNCH = 'echo $$ > "$0.new" && mv "$0.new" "$0" && exec "$@"'


@dataclass(frozen=True, slots=True)
class Service:
    """One daemon: its command, and the node it belongs to (None: the controller)."""

    name: str
    argv: tuple[str, ...]
    node: str | None = None
    machine_side: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def key(name: ServiceName) -> str:
    """``("node", "a1")`` and ``node@a1`` are the same service."""
    return name if isinstance(name, str) else "@".join(name)


def munged() -> Service:
    inside = Folders(INSIDE)
    argv = (
        "munged",
        "--foreground",
        "--force",  # it runs as root, which is right in a lab only
        f"--key-file={inside.munge}/munge.key",
        f"--seed-file={inside.munge}/munged.seed",
        f"--log-file={inside.munge}/munged.log",
        "--socket=/run/munge/munge.socket.2",
        "--pid-file=/run/munge/munged.pid",
    )
    return Service("munged", argv)


def slurmctld(*, clean: bool = False) -> Service:
    """slurmctld; ``clean`` ignores saved state, of which a new lab has none."""
    return Service("slurmctld", ("slurmctld", "-D", *(["-c"] if clean else [])))


def mariadb() -> Service:
    """The database of a lab with accounting; what it forgets in a crash, a lab does not miss."""
    inside = Folders(INSIDE).database
    argv = ("mariadbd", "--no-defaults", f"--datadir={inside}", "--user=root",
            "--bind-address=127.0.0.1", "--port=3306", f"--socket={inside}/socket",
            f"--pid-file={inside}/pid", "--innodb-flush-log-at-trx-commit=0",
            "--innodb-lock-wait-timeout=900")  # fmt: skip
    return Service("mariadb", argv, machine_side=True)


def slurmdbd() -> Service:
    return Service("slurmdbd", ("slurmdbd", "-D"))


def slurmd(node: str) -> Service:
    return Service(f"slurmd@{node}", ("slurmd", "-D", "-N", node), node)


def scheduler() -> Service | None:
    """crater-scheduler beside slurmctld, if this installation has it."""
    return _python("scheduler", "crater_slurm.scheduler", None)


def node_daemon(node: str) -> Service | None:
    """crater-io-daemon of a node, if this installation has it."""
    return _python(f"node@{node}", "crater_slurm.node", node)


def probe(node: str) -> Service | None:
    """crater-probe of a node. It reads the machine that the lab is on, not the node's profile."""
    return _python(f"probe@{node}", "crater_slurm.sensor", node)


def _python(name: str, module: str, node: str | None) -> Service | None:
    if importlib.util.find_spec(f"{module}.__main__") is None:
        return None
    environment = {"PYTHONPATH": str(paths.PACKAGE.parent), "PYTHONUNBUFFERED": "1"}
    if node:
        environment["SLURMD_NODENAME"] = node
    argv = (sys.executable, "-m", module, "--foreground")
    return Service(name, argv, node, True, environment)


@dataclass(frozen=True, slots=True)
class Supervisor:
    """Starts and stops the services of one running lab."""

    folders: Folders
    namespaces: Namespaces
    before_start: Callable[[], None] | None = None

    def start(self, service: Service) -> int:
        """Start a service and return its process number inside the lab. LabError if it runs."""
        if self.pid(service.name) is not None:
            raise LabError(f"{service.name} runs already")
        file = self._pid_file(service.name)
        file.unlink(missing_ok=True)
        inside = Folders(INSIDE).pids / file.name
        command = self.namespaces.command(
            ["sh", "-c", _LAUNCH, str(inside), *service.argv],
            node=service.node,
            machine_side=service.machine_side,
            cwd=str(INSIDE),
            environment=service.environment,
            detach=True,
            group=_own_group(service),
        )
        with self.output(service.name).open("ab") as output:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=self.before_start,
                check=False,
            )
        if done.returncode or not _appears(file, _START_SECONDS):
            said = tail(self.output(service.name), 3)
            raise LabError(f"{service.name} could not be started: {said or 'it never ran'}")
        return int(file.read_text())

    def pid(self, name: str) -> int | None:
        """Process number of a running service as the machine counts, or None."""
        try:
            inner = int(self._pid_file(name).read_text())
        except (OSError, ValueError):
            return None
        return self.namespaces.processes().get(inner)

    def running(self) -> dict[str, int]:
        """Process numbers, as the machine counts, of all services that run."""
        processes = self.namespaces.processes()
        found = {}
        for file in sorted(self.folders.pids.glob("*.pid")):
            number = processes.get(int(file.read_text() or 0))
            if number is not None:
                found[file.name.removesuffix(".pid")] = number
        return found

    def signal(self, name: str, number: signals.Signals) -> None:
        """Send a signal; LabError when the service does not run."""
        pid = self.pid(name)
        if pid is None:
            running = list(self.running())
            close = nearest(name, running)
            hint = f"; did you mean {close}?" if close else f"; there run {', '.join(running)}"
            raise LabError(f"{name} does not run{hint}")
        os.kill(pid, number)

    def stop(
        self, name: str, number: signals.Signals = signals.SIGTERM, seconds: float = 10
    ) -> None:
        """End a service and wait for it; killed when it does not go within ``seconds``."""
        pid = self.pid(name)
        if pid is None:
            return
        os.kill(pid, number)
        if not _gone(pid, seconds):
            os.kill(pid, signals.SIGKILL)
            _gone(pid, seconds)

    def output(self, name: str) -> Path:
        """File with what a service prints."""
        return self.folders.log / f"{name}.out"

    def _pid_file(self, name: str) -> Path:
        return self.folders.pids / f"{name}.pid"


def _own_group(service: Service) -> str:
    """A new control group for each slurmd (v2): it divides the one that it finds itself in."""
    return f"{service.name}-{time.time_ns()}" if service.argv[0] == "slurmd" else cgroups.V2_LEAF


def _appears(file: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def _gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


#: Complaints of a healthy start: plugins that no lab uses, state that a new lab does not have.
_NOISE = ("mpi/pmix", "MPI: ", " state file ", "NOTE: Trying backup")


def tail(file: Path, lines: int) -> str:
    """The last lines of a log that tell of errors, else the last ones; ``""`` if there are none."""
    try:
        text = file.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    text = [line for line in text if line.strip() and not any(word in line for word in _NOISE)]
    bad = [line for line in text if "error" in line.lower() or "fatal" in line.lower()]
    return "\n".join((bad or text)[-lines:])
