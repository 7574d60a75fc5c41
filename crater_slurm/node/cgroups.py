"""Slurm's cgroup v2 tree: finds its jobs, steps and tasks, and writes ``cpuset.mems``.

    <root>/<slice>/[<node>_]slurmstepd.scope/<job>/step_<X>/user/task_<Y>

``<job>`` is ``job_<id>`` up to 25.11 and the SLUID from 26.05 on, so nothing here parses an id.
Slurm itself writes ``cpuset.mems`` at the job (at every step launch) and at ``step_X/user``
(once); we write only at ``step_X/user`` and ``task_Y``. Everything may vanish while it is read.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.files import read_text
from crater_slurm.model.cpuset import format_cpulist, parse_cpulist

_TASK = re.compile(r"(?P<job>/.*/[^/]+)/(?P<step>step_[^/]+)/user/task_[^/]+\Z")
_MEMORY_KEYS = {"anon", "shmem", "kernel_stack", "pagetables", "slab_unreclaimable"}


@dataclass(frozen=True, slots=True)
class Task:
    """``mems`` is the task's own setting; empty means that it inherits its step's."""

    path: Path
    mems: frozenset[int]


@dataclass(frozen=True, slots=True)
class Step:
    """A step, at its ``user`` folder, the level that Slurm writes once and we may narrow.

    ``cpus`` is empty until Slurm has written them: before that the folder inherits all CPUs.
    """

    path: Path
    name: str
    cpus: frozenset[int]
    mems: frozenset[int]
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """A job's cgroup. ``limit_mib`` None is no limit (or none yet); ``mems`` is Slurm's own set."""

    path: Path
    name: str
    limit_mib: int | None
    mems: frozenset[int]
    steps: tuple[Step, ...]

    @property
    def settled(self) -> bool:
        """Slurm has set the memory limit, or has tasks already running without one.

        It creates a job's cpuset first and writes ``memory.max`` a moment later, before any task.
        """
        return self.limit_mib is not None or any(step.tasks for step in self.steps)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a task lives: the folders of its job, of its step (``user``) and its own."""

    job: Path
    step: Path
    task: Path


class Tree:
    """Slurm's part of the cgroup v2 hierarchy mounted at ``root``."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup")) -> None:
        self.root = root

    def unusable(self) -> str:
        """Why memory can't be bound on this machine at all; empty when it can."""
        controllers = read_text(self.root / "cgroup.controllers")
        if controllers is None:
            return f"there is no cgroup v2 at {self.root}"
        if "cpuset" not in controllers.split():
            return f"the cgroup v2 at {self.root} has no cpuset controller"
        return ""

    def scopes(self) -> list[Path]:
        """The scopes of all slurmd on this machine, whatever slice the site chose."""
        return sorted(self.root.glob("*.slice/*slurmstepd.scope"))

    def scan(self) -> list[Job]:
        """Every job on the machine, also those that crater knows nothing of."""
        return [
            self._job(path)
            for scope in self.scopes()
            for path in _folders(scope)
            if path.name != "system"
        ]

    def job_names(self) -> set[str]:
        """Names of the cgroups of every job on the machine."""
        return {path.name for scope in self.scopes() for path in _folders(scope)}

    def place(self, cgroup: str) -> Place | None:
        """Place of a task by its path in /proc/PID/cgroup; None outside a Slurm task."""
        match = _TASK.match(cgroup)
        if not match or ".." in cgroup.split("/"):
            return None
        job = self.root / match["job"].lstrip("/")
        return Place(job, job / match["step"] / "user", self.root / cgroup.lstrip("/"))

    def write_mems(self, folder: Path, nodes: Iterable[int]) -> None:
        """Set a folder's ``cpuset.mems``; no nodes means inherit. Raises OSError.

        The kernel moves what the processes already have, and makes the writer wait for it.
        """
        fd = os.open(folder / "cpuset.mems", os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
        try:
            os.write(fd, (format_cpulist(nodes) + "\n").encode())
        finally:
            os.close(fd)

    def _job(self, path: Path) -> Job:
        steps = [
            self._step(folder / "user")
            for folder in _folders(path)
            if folder.name.startswith("step_") and (folder / "user").is_dir()
        ]
        limit = read_text(f"{path}/memory.max") or "max"
        return Job(
            path,
            path.name,
            -(-int(limit) // 2**20) if limit.isdigit() else None,
            numbers(f"{path}/cpuset.mems") or numbers(f"{path}/cpuset.mems.effective"),
            tuple(steps),
        )

    def _step(self, user: Path) -> Step:
        tasks = [
            Task(folder, numbers(f"{folder}/cpuset.mems"))
            for folder in _folders(user)
            if folder.name.startswith("task_")
        ]
        written = bool(tasks) or bool(read_text(f"{user}/cpuset.cpus"))
        cpus = numbers(f"{user}/cpuset.cpus.effective") if written else frozenset()
        return Step(user, user.parent.name, cpus, numbers(f"{user}/cpuset.mems"), tuple(tasks))


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [path / name for name in names]


def numbers(path: Path | str) -> frozenset[int]:
    """Numbers in a cpuset file; none when it is empty, gone or unreadable."""
    return _parse(read_text(path) or "")


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> frozenset[int]:
    try:
        return frozenset(parse_cpulist(text))
    except ValueError:
        return frozenset()


def memory_by_node(folder: Path) -> dict[int, int]:
    """MiB that a cgroup holds on each NUMA node and that can't be dropped; empty if unreadable."""
    total: dict[int, int] = {}
    for line in (read_text(folder / "memory.numa_stat") or "").splitlines():
        key, _, rest = line.partition(" ")
        if key in _MEMORY_KEYS:
            for node, value in re.findall(r"\bN(\d+)=(\d+)", rest):
                total[int(node)] = total.get(int(node), 0) + int(value)
    return {node: value // 2**20 for node, value in sorted(total.items())}
