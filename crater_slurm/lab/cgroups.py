"""A lab's own control groups, so that its slurmd can constrain jobs without touching others.

Under v1 the lab gets a group in each hierarchy that Slurm uses, never in ``memory``, which other
software on the machine owns. Under v2 it gets one delegated group. Inside the lab these look like
the roots. Standard library only, because pid 1 of the lab uses it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
V1_CONTROLLERS = ("cpuset", "devices", "freezer", "cpu", "cpuacct")
#: Under v2 only leaves may hold processes. The lab's own live in the first; the second takes those
#: that stay outside its process namespace, whose sight would make slurmd give up.
V2_LEAF, V2_OUTSIDE = "lab", "outside"
#: Run by sh in the lab (v2): makes and joins the group $1, then becomes the rest.
V2_JOIN = f'cd {ROOT} && mkdir -p "$1" && echo $$ > "$1/cgroup.procs" && cd / && shift && exec "$@"'


def hierarchy(root: Path = ROOT) -> str | None:
    """``v1`` or ``v2``: what a lab can use on this machine, or None."""
    if (root / "cgroup.controllers").exists():
        return "v2"
    if all((root / name / "cgroup.procs").exists() for name in V1_CONTROLLERS):
        return "v1"
    return None


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups that pid 1 starts in, which become the lab's roots, and those to enter it from."""

    start: list[Path]
    enter: list[Path]


def refusal(root: Path = ROOT) -> str | None:
    """Why this machine can't give a lab its own groups; None when it can."""
    kind = hierarchy(root)
    if kind is None:
        missing = [c for c in V1_CONTROLLERS if not (root / c / "cgroup.procs").exists()]
        return f"the machine has neither cgroup v2 nor v1's {', '.join(missing)} below {root}"
    if kind == "v2":
        enabled = (root / "cgroup.subtree_control").read_text().split()
        missing = [c for c in ("cpuset", "memory") if c not in enabled]
        if missing:
            words = " ".join(f"+{c}" for c in missing)
            return (
                f"cgroup v2 does not pass on {' and '.join(missing)} to groups; allow it with "
                f"echo '{words}' > {root}/cgroup.subtree_control"
            )
    return None


def create(name: str) -> Groups:
    """Make the lab's groups."""
    if hierarchy() == "v2":
        group = ROOT / f"crater-lab-{name}"
        for leaf in (V2_LEAF, V2_OUTSIDE):
            (group / leaf).mkdir(parents=True, exist_ok=True)
        return Groups([group], [group / V2_OUTSIDE])
    groups = []
    for controller in V1_CONTROLLERS:
        group = ROOT / controller / f"crater-lab-{name}"
        group.mkdir(exist_ok=True)
        groups.append(group)
    cpuset, parent = groups[0], ROOT / "cpuset"
    for key in ("cpuset.cpus", "cpuset.mems"):
        (cpuset / key).write_text((parent / key).read_text())
    (cpuset / "cgroup.clone_children").write_text("1")
    return Groups(groups, groups)


def join(groups: list[Path], pid: int) -> None:
    """Move a process into the groups."""
    for group in groups:
        (group / "cgroup.procs").write_text(str(pid))


def remove(name: str) -> None:
    """Remove the lab's groups and all that Slurm made below; its processes are gone already."""
    for parent in (ROOT, *(ROOT / controller for controller in V1_CONTROLLERS)):
        group = parent / f"crater-lab-{name}"
        if not group.is_dir():
            continue
        for folder in sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True):
            _rmdir(folder)
        _rmdir(group)


def _rmdir(group: Path) -> None:
    # The kernel empties a group a moment after its last process is gone.
    for _ in range(100):
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
    group.rmdir()


def enter(kind: str) -> None:
    """In the lab: show its own groups as the roots of their hierarchies."""
    from crater_slurm.lab.view import run

    if kind == "v2":
        # Slurm takes the first mount that it finds at this place, so the machine's has to go.
        run("umount", "--lazy", ROOT)
        run("mount", "-t", "cgroup2", "cgroup2", ROOT)
        join([ROOT / V2_LEAF], os.getpid())
        return
    run("mount", "-t", "tmpfs", "-o", "mode=755", "cgroup", ROOT)
    for controller in V1_CONTROLLERS:
        (ROOT / controller).mkdir()
        run("mount", "-t", "cgroup", "-o", controller, "cgroup", ROOT / controller)
