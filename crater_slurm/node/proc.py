"""What /proc tells of a hook's caller: its cgroup and the CPUs it may run on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.files import read_text
from crater_slurm.model.cpuset import parse_cpulist
from crater_slurm.node.request import Peer, RequestError


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """``cgroup`` is the v2 path from the hierarchy's root, empty on a v1-only machine."""

    cgroup: str
    cpus: tuple[int, ...]


def task_facts(peer: Peer, root: Path = Path("/proc")) -> TaskFacts:
    """Facts of a live caller; raises RequestError when it is gone or another user's by now.

    The pid is the one at connect time. A recycled pid of the same user only misleads that user,
    and one of another user is refused here, so the order of reads matters: status comes last.
    """
    folder = root / str(peer.pid)
    cgroup = re.search(r"^0::(/.*)$", read_text(folder / "cgroup") or "", re.M)
    status = read_text(folder / "status") or ""
    cpus = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status, re.M)
    uid = re.search(r"^Uid:\s*(\d+)", status, re.M)
    if not cpus or not uid:
        raise RequestError(f"look at the task: process {peer.pid} is gone")
    if int(uid.group(1)) != peer.uid:
        raise RequestError(f"look at the task: process {peer.pid} is another user's")
    return TaskFacts(cgroup.group(1) if cgroup else "", parse_cpulist(cpus.group(1)))


def boot_id(root: Path = Path("/proc")) -> str:
    """Identity of this boot: jobs of an earlier one have ended, whatever the records say."""
    return read_text(root / "sys/kernel/random/boot_id") or ""
