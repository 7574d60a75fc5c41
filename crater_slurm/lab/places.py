"""Where things lie in a lab: its folder on the machine, and the same folder as the lab sees it.

Standard library only, because pid 1 of the lab uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: The lab's folder as every process in the lab sees it. Short, and the same for every lab, so
#: that configuration files don't depend on where a lab is kept and socket paths stay short.
INSIDE = Path("/crater-lab")
#: Where Slurm of another version than the machine's lies, seen from inside; else Slurm is in /.
INSIDE_ROOT = INSIDE / "root"
#: Host name of the controller; each node has its own name as host name.
CONTROLLER = "ctl"
#: Where production keeps the hooks and the Lua.
LIBRARY = Path("/usr/lib/crater")
#: For each node a link to the namespaces that hold its mounts and host name.
NODES = Path("/.lab/nodes")


@dataclass(frozen=True, slots=True)
class User:
    """A user who exists only inside labs; a real shell, because Slurm treats others specially."""

    name: str
    uid: int


USERS = (User("alice", 61001), User("bob", 61002))


@dataclass(frozen=True, slots=True)
class Folders:
    """The parts of a lab's folder; ``Folders(INSIDE)`` are their names inside the lab."""

    base: Path

    @property
    def etc(self) -> Path:
        """slurm.conf and its companions."""
        return self.base / "etc"

    @property
    def crater_etc(self) -> Path:
        """What the lab sees as /etc/crater."""
        return self.base / "etc" / "crater"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def log(self) -> Path:
        return self.base / "log"

    @property
    def state(self) -> Path:
        """slurmctld's StateSaveLocation."""
        return self.base / "state"

    @property
    def pids(self) -> Path:
        """One file for each service with its process id inside the lab."""
        return self.base / "pids"

    @property
    def slurm_pids(self) -> Path:
        """Slurm's own pid files; its user writes here."""
        return self.base / "slurm-pids"

    @property
    def bin(self) -> Path:
        """Slurm's commands of the lab's version, for programs that run outside its root."""
        return self.base / "bin"

    @property
    def devices(self) -> Path:
        """The GPUs' device files."""
        return self.base / "dev"

    @property
    def tmp(self) -> Path:
        return self.base / "tmp"

    @property
    def munge(self) -> Path:
        return self.base / "munge"

    @property
    def view(self) -> Path:
        """Where pid 1 builds what the lab sees as its root."""
        return self.base / "view"

    @property
    def root(self) -> Path:
        """Where the lab sees the root of its own Slurm, if it has one."""
        return self.base / "root"

    @property
    def database(self) -> Path:
        """MariaDB's data, in a lab with accounting."""
        return self.base / "database"

    @property
    def controller(self) -> Path:
        """/run/crater and /var/lib/crater of the controller lie here, in run and lib."""
        return self.base / "ctl"

    def node(self, name: str) -> Path:
        """run, lib and spool of a node."""
        return self.base / "nodes" / name

    def home(self, user: str) -> Path:
        return self.base / "home" / user
