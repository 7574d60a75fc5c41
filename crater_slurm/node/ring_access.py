"""Whether a process belongs to a job, and how much memory the job has room for.

The uid decides who may open a job's ring: the kernel gives it, and it must be the job's own. The
cgroup then keeps the jobs of one user apart. Where Slurm makes no cgroups, the environment that the
process or one of its parents was started with says which job it is of; it is the user's own word,
and can mislead only the user.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.files import read_text
from crater_slurm.node import usage
from crater_slurm.node.jobs import JobRecord
from crater_slurm.node.request import Peer, RequestError

#: Parents that are looked at for SLURM_JOB_ID; a trainer is a few levels below its task.
_MOST_PARENTS = 64
_NO_LIMIT = 1 << 60
_V2_JOB = re.compile(r"(?P<job>/(?:[^/]+/)*[^/]*slurmstepd\.scope/(?P<name>[^/]+))(?:/|\Z)")
_V1_JOB = re.compile(r"(?P<job>/slurm[^/]*/uid_\d+/(?P<name>job_\d+))(?:/|\Z)")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A process's place below its job: mount of the hierarchy, the job's path and its own."""

    root: Path
    job: str
    own: str
    version: int


def check(record: JobRecord, peer: Peer, cgroup_root: Path, proc: Path) -> Cgroup | None:
    """The peer's place in the job's cgroup; None where Slurm makes none.

    Raises RequestError when it is another user's process or another job's.
    """
    if peer.uid != record.uid:
        raise RequestError(f"open the ring of job {record.job_id} for uid {peer.uid}")
    found, jobs = _cgroups(proc / str(peer.pid), cgroup_root)
    if jobs and not jobs <= set(record.cgroup_names):
        raise RequestError(
            f"open the ring of job {record.job_id} for a process of {', '.join(sorted(jobs))}"
        )
    if not jobs and not _descends(peer, record.job_id, proc):
        raise RequestError(
            f"open the ring of job {record.job_id} for process {peer.pid}: it is in no cgroup of "
            "Slurm's, and neither it nor a parent was started with this SLURM_JOB_ID"
        )
    # Last, as in proc.task_facts: a number that was given to another user's process shows here.
    if _uid(proc / str(peer.pid)) != peer.uid:
        raise RequestError(f"look at process {peer.pid}: it is gone")
    return found


def _cgroups(folder: Path, root: Path) -> tuple[Cgroup | None, set[str]]:
    """The place whose memory counts, and the names of Slurm's jobs that the process is in."""
    names: set[str] = set()
    memory: Cgroup | None = None
    for line in (read_text(folder / "cgroup") or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        match = (_V1_JOB if controllers else _V2_JOB).match(path)
        if not match or ".." in path.split("/"):
            continue
        if match["name"] == "system":
            continue
        names.add(match["name"])
        if not controllers:
            memory = memory or Cgroup(root, match["job"], path, 2)
        elif "memory" in controllers.split(","):
            memory = Cgroup(root / "memory", match["job"], path, 1)
    return memory, names


def _descends(peer: Peer, job_id: str, proc: Path) -> bool:
    pid = peer.pid
    for _ in range(_MOST_PARENTS):
        folder = proc / str(pid)
        if pid <= 1 or _uid(folder) != peer.uid:
            return False
        for entry in _environ(folder):
            if entry.startswith(b"SLURM_JOB_ID="):
                return entry == b"SLURM_JOB_ID=" + job_id.encode()
        found = re.search(r"^PPid:\s*(\d+)", read_text(folder / "status") or "", re.M)
        pid = int(found.group(1)) if found else 0
    return False


def _environ(folder: Path) -> list[bytes]:
    try:
        with (folder / "environ").open("rb") as file:
            return file.read(1 << 20).split(b"\0")
    except OSError:
        return []


def _uid(folder: Path) -> int | None:
    found = re.search(r"^Uid:\s*(\d+)", read_text(folder / "status") or "", re.M)
    return int(found.group(1)) if found else None


def room_bytes(cgroup: Cgroup | None, proc: Path) -> int:
    """Memory that a process may still take before the job's limit, or the machine, is full.

    Page cache is not counted as taken: the kernel drops it. The narrowest limit between process
    and job counts, since steps and tasks may have their own.
    """
    rooms = [_machine_room(proc)]
    if cgroup is not None:
        path = cgroup.own
        while path.startswith(cgroup.job):
            folder = cgroup.root / path.lstrip("/")
            room = _room_v2(folder) if cgroup.version == 2 else _room_v1(folder)
            if room is not None:
                rooms.append(room)
            path = path.rpartition("/")[0]
    return max(0, min(rooms))


def _room_v2(folder: Path) -> int | None:
    limit = _number(folder / "memory.max")
    if limit is None:
        return None
    seen = usage.read(folder)
    taken = seen.need_bytes if seen.need_bytes is not None else _number(folder / "memory.current")
    return limit - (taken or 0)


def _room_v1(folder: Path) -> int | None:
    limit = _number(folder / "memory.limit_in_bytes")
    if limit is None or limit >= _NO_LIMIT:
        return None
    stat = read_text(folder / "memory.stat") or ""
    parts = dict(re.findall(r"^total_(rss|shmem|unevictable) (\d+)$", stat, re.M))
    if "rss" in parts:
        return limit - int(parts["rss"]) - int(parts.get("shmem", 0))
    return limit - (_number(folder / "memory.usage_in_bytes") or 0)


def _machine_room(proc: Path) -> int:
    found = re.search(r"^MemAvailable:\s*(\d+) kB", read_text(proc / "meminfo") or "", re.M)
    return int(found.group(1)) * 1024 if found else 0


def _number(path: Path) -> int | None:
    text = read_text(path) or ""
    return int(text) if text.isdigit() else None
