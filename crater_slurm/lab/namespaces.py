"""Runs commands inside a lab, and finds the lab's processes from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.lab.cgroups import V2_JOIN, V2_LEAF
from crater_slurm.lab.places import INSIDE, INSIDE_ROOT, NODES, Folders

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Namespaces:
    """The namespaces of one lab.

    ``init`` is its pid 1 as the machine counts; ``rooted``: Slurm has a root of its own;
    ``cgroup``: v1 or v2 where the lab has control groups of its own.
    """

    init: int
    rooted: bool
    cgroup: str | None = None

    def command(
        self,
        argv: Sequence[str],
        *,
        node: str | None = None,
        user: str = "root",
        machine_side: bool = False,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        detach: bool = False,
        group: str = V2_LEAF,
    ) -> list[str]:
        """The command that runs ``argv`` in the lab.

        ``node``: with that node's mounts and host name, else the controller's. ``machine_side``:
        with the machine's own programs instead of the lab's Slurm's. ``detach``: let it go on
        without a parent; otherwise it dies with whoever waits for it. ``group``: the control group
        that it gets, where the lab has v2.
        """
        home = str(Folders(INSIDE).home(user))
        variables = {
            "HOME": home,
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/sh",
            "PATH": f"{INSIDE}/bin:{_PATH}" if machine_side else _PATH,
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(Folders(INSIDE).slurm_conf),
            **(environment or {}),
        }
        words = self._enter(node)
        if self.cgroup == "v2":
            words += ["sh", "-c", V2_JOIN, "sh", group]
        if self.rooted and not machine_side:
            words += ["chroot", str(INSIDE_ROOT)]
        words.append("setpriv")
        if not detach:
            words += ["--pdeathsig", "KILL"]
        if user != "root":
            words += [f"--reuid={user}", f"--regid={user}", "--init-groups"]
            if self.rooted and machine_side:
                # The Slurm commands that it may call lie in another root, see places.
                words += ["--inh-caps=+sys_chroot", "--ambient-caps=+sys_chroot"]
        words.append("--")
        words += ["env", "--ignore-environment", f"--chdir={cwd or home}"]
        words += [f"{key}={value}" for key, value in variables.items()]
        if detach:
            words += ["setsid", "--fork"]
        return [*words, *argv]

    def _enter(self, node: str | None) -> list[str]:
        words = ["nsenter", "--target", str(self.init), "--pid", "--net", "--ipc"]
        if self.cgroup:
            words.append("--cgroup")
        if node is None:
            return [*words, "--mount", "--uts"]
        own = Path(f"/proc/{self.init}/root{NODES}") / node
        return [*words, f"--mount={own / 'mnt'}", f"--uts={own / 'uts'}"]

    def processes(self) -> dict[int, int]:
        """Processes of the lab: number inside to number on the machine."""
        try:
            own = Path(f"/proc/{self.init}/ns/pid").stat().st_ino
        except OSError:
            return {}
        found: dict[int, int] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            # A process may end while we look.
            with contextlib.suppress(OSError, ValueError):
                if (entry / "ns/pid").stat().st_ino == own:
                    found[_inner_number(entry)] = int(entry.name)
        return found


def _inner_number(process: Path) -> int:
    for line in (process / "status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    raise ValueError(f"{process} has no NSpid")
