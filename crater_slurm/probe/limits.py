"""What this process may use: CPUs, memory nodes and memory by its cgroup or cpuset.

The profile describes the whole machine, since Slurm's jobs live in other cgroups; these limits
say what a measurement may use, and nothing else. Processor affinity is no limit: it can be set.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from crater_slurm.errors import CraterError
from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.probe import files

#: cgroup v1 writes a number near 2^63 for no limit.
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class Limits:
    """CPUs and memory nodes that may be used, and how much memory (None: no limit)."""

    cpus: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    memory_limit_mib: int | None = None


@dataclass(frozen=True, slots=True)
class _Controller:
    """Where a controller's files are: its mount, the file names' form, and this process's group."""

    mount: Path
    pattern: str
    group: PurePosixPath


def limits(
    root: Path, cpus: tuple[int, ...], memory_nodes: tuple[int, ...], notes: list[str]
) -> Limits:
    """Limits of this process on a machine with these CPUs and nodes, with a note for each."""
    cpuset = _cpuset(root)
    found = Limits(
        cpus=_restricted(cpuset, "cpus", cpus, "CPUs", notes),
        memory_nodes=_restricted(cpuset, "mems", memory_nodes, "memory nodes", notes),
        memory_limit_mib=_memory_limit_mib(root),
    )
    if found.memory_limit_mib is not None:
        notes.append(f"this process may use {found.memory_limit_mib} MiB of memory by its cgroup")
    return found


def _restricted(
    cpuset: _Controller | None, what: str, have: tuple[int, ...], words: str, notes: list[str]
) -> tuple[int, ...]:
    if cpuset is None:
        return have
    for folder in _folders(cpuset):
        path = folder / cpuset.pattern.format(what)
        if not path.is_file():
            continue
        try:
            allowed = set(files.cpulist(path))
        except CraterError as error:
            notes.append(f"{error}; all {words} are taken as allowed")
            return have
        # An empty cpuset of v1 is one that nobody has set up; no process can run in it.
        usable = tuple(n for n in have if n in allowed) or have
        if usable != have:
            notes.append(
                f"this process may use {words} {format_cpulist(usable)} of "
                f"{format_cpulist(have)} by its cgroup; the profile lists all"
            )
        return usable
    return have


def _folders(controller: _Controller) -> list[Path]:
    """The group's folder and those above it, which hold where it is not shown (containers)."""
    groups = (controller.group, *controller.group.parents)
    return [files.below(controller.mount, str(group)) for group in groups]


def _cpuset(root: Path) -> _Controller | None:
    """The cpuset controller, at its usual places first, then where /proc/mounts has it."""
    own = (files.read(root / "proc/self/cpuset") or "").split("\n")[0]
    group = PurePosixPath(own or _group(root, "cpuset") or _group(root, "") or "/")
    usual = (
        ("sys/fs/cgroup", "cpuset.{}.effective"),
        ("sys/fs/cgroup/cpuset", "cpuset.{}"),
        ("dev/cpuset", "{}"),
    )
    for folder, pattern in usual:
        if (root / folder / pattern.format("cpus")).is_file():
            return _Controller(root / folder, pattern, group)
    for place, kind, options in _mounts(root):
        mount = files.below(root, place)
        if kind == "cgroup2":
            if "cpuset" in (files.read(mount / "cgroup.controllers") or "").split():
                return _Controller(mount, "cpuset.{}.effective", group)
        elif kind == "cpuset" or (kind == "cgroup" and {"cpuset", "noprefix"} <= options):
            return _Controller(mount, "{}", group)
        elif kind == "cgroup" and "cpuset" in options:
            return _Controller(mount, "cpuset.{}", group)
    return None


def _memory_limit_mib(root: Path) -> int | None:
    """The smallest memory limit of this process's group and of those above it."""
    found = []
    for place, kind, options in _mounts(root):
        if kind == "cgroup2":
            group, name = _group(root, ""), "memory.max"
        elif kind == "cgroup" and "memory" in options:
            group, name = _group(root, "memory"), "memory.limit_in_bytes"
        else:
            continue
        where = PurePosixPath(group or "/")
        for folder in (where, *where.parents):
            size = files.read_int(files.below(files.below(root, place), str(folder)) / name)
            if size and size < _NO_LIMIT_BYTES:
                found.append(size // 2**20)
    return min(found, default=None)


def _group(root: Path, controller: str) -> str | None:
    """This process's group by /proc/self/cgroup; ``""`` is the one of cgroup v2."""
    for line in (files.read(root / "proc/self/cgroup") or "").split("\n"):
        parts = line.split(":", 2)
        if len(parts) == 3 and controller in parts[1].split(","):
            return parts[2]
    return None


def _mounts(root: Path) -> list[tuple[str, str, set[str]]]:
    """Mount point, file system and options of each mount."""
    lines = (files.read(root / "proc/mounts") or "").split("\n")
    fields = (line.split(" ") for line in lines)
    return [(f[1], f[2], set(f[3].split(","))) for f in fields if len(f) >= 4]
