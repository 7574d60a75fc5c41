"""A throwaway Slurm cluster with many nodes on this machine.

``Lab(name="x").up()`` starts it in seconds in its own mount, process, network, IPC and host name
namespaces; ``down()`` leaves nothing. Everything in between goes through this class, for the
command line and for tests alike.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal as signals
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from crater_slurm.errors import LabError
from crater_slurm.lab import cgroups, inventory, ready, roots, services, starting
from crater_slurm.lab.cluster import Cluster
from crater_slurm.lab.runtime import identity
from crater_slurm.lab.services import ServiceName
from crater_slurm.lab.spec import LabSpec, labs_folder

_TOOLS = ("unshare", "nsenter", "mount", "umount", "setpriv", "ip", "chroot")


class Lab(Cluster):
    """One lab, up or not. ``Lab(name="x", inventory="demo", ...)`` takes LabSpec's fields."""

    def __init__(self, spec: LabSpec | None = None, **fields: Any) -> None:
        super().__init__(spec, **fields)
        self.seconds_to_up = 0.0
        self._holder: subprocess.Popen[bytes] | None = None

    @classmethod
    def attach(cls, name: str) -> Lab:
        """The lab of that name; LabError when none was started."""
        file = labs_folder() / name / "lab.json"
        if not file.exists():
            known = ", ".join(lab.spec.name for lab in cls.all()) or "none"
            raise LabError(f"there is no lab {name!r}; up are: {known}")
        return cls(LabSpec.load(file))

    @classmethod
    def all(cls) -> list[Lab]:
        """Every lab that was started and not taken down."""
        return [cls(LabSpec.load(file)) for file in sorted(labs_folder().glob("*/lab.json"))]

    def up(self, say: Callable[[str], None] = lambda _: None, timeout: float = 120) -> Lab:
        """Start it, and return when its nodes take jobs; LabError says why it can't."""
        _require_root_and_tools()
        begin = time.monotonic()
        slurm = roots.find(self.spec.slurm, say)
        nodes = inventory.load(self.spec.inventory)
        if self.spec.cgroup and (why := cgroups.refusal()):
            raise LabError(f"this machine allows no lab with --cgroup: {why}")
        self._claim()
        try:
            starting.prepare(self, slurm, nodes)
            self._holder = starting.start_init(self, slurm)
            starting.start_services(self, nodes, timeout)
        except BaseException:
            self.down()
            raise
        self.seconds_to_up = time.monotonic() - begin
        return self

    def down(self) -> None:
        """End every process of the lab and remove all that it left; fine if it is not up."""
        base = self.folders.base
        known = any((base / name).exists() for name in ("lab.json", "runtime.json"))
        if base.exists() and not known and any(base.iterdir()):
            raise LabError(f"{base} is no lab's folder, and will not be removed; use another name")
        self.runtime.end()
        if self._holder:
            self._holder.wait()
            self._holder = None
        if self.spec.cgroup or self.runtime.facts().get("groups"):
            cgroups.remove(self.spec.name)
        if base.exists():
            shutil.rmtree(base)
        with contextlib.suppress(OSError):
            labs_folder().rmdir()

    def __enter__(self) -> Lab:
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.down()

    @property
    def is_up(self) -> bool:
        return self.runtime.pid("init") is not None

    def _claim(self) -> None:
        """Make the lab's folder, ours alone; what a crash left of an older one is removed."""
        name = self.spec.name
        labs_folder().mkdir(parents=True, exist_ok=True)
        handle = os.open(labs_folder(), os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if self.is_up:
                raise LabError(f"the lab {name!r} is up already; crater lab down {name}")
            if (starter := self.runtime.pid("starter")) is not None:
                raise LabError(f"the lab {name!r} is being started by process {starter}")
            self.down()
            self.folders.base.mkdir(parents=True, mode=0o755)
            self.runtime.note(starter=identity(psutil.Process()))
        finally:
            os.close(handle)

    def start(self, service: ServiceName) -> None:
        """Start a service that was stopped or killed."""
        self.supervisor.start(_service(services.key(service)))

    def stop(self, service: ServiceName) -> None:
        """End a service in order and wait for it."""
        self.supervisor.stop(services.key(service))

    def kill(self, service: ServiceName) -> None:
        """End a service as a crash would."""
        self.supervisor.stop(services.key(service), signals.SIGKILL)

    def signal(self, service: ServiceName, number: signals.Signals) -> None:
        """Send a signal to a service, SIGSTOP for instance."""
        self.supervisor.signal(services.key(service), number)

    def restart_slurmctld(self, timeout: float = 30) -> None:
        """Restart slurmctld, which keeps its jobs, and wait until it answers."""
        self.stop("slurmctld")
        self.start("slurmctld")
        ready.controller(self, time.monotonic() + timeout)


def _service(name: str) -> services.Service:
    kind, _, node = name.partition("@")
    known: Mapping[str, Callable[[], services.Service | None]] = {
        "munged": services.munged,
        "mariadb": services.mariadb,
        "slurmdbd": services.slurmdbd,
        "slurmctld": services.slurmctld,
        "scheduler": services.scheduler,
        "slurmd": lambda: services.slurmd(node),
        "node": lambda: services.node_daemon(node),
        "probe": lambda: services.probe(node),
    }
    service = known[kind]() if kind in known else None
    if service is None:
        raise LabError(f"a lab has no service {name!r}; there are {', '.join(known)}")
    return service


def _require_root_and_tools() -> None:
    if os.geteuid() != 0:
        raise LabError("a lab makes namespaces and device files, so it must be started as root")
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        raise LabError(f"a lab needs {', '.join(missing)}; install util-linux, mount and iproute2")
