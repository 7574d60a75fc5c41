"""The state of this machine that decides whether it may be measured now: read, never changed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from crater_slurm.errors import CraterError
from crater_slurm.model.cpuset import parse_cpulist

_MIB = 2**20
#: Of cgroup v2 and v1: the line in /proc/self/cgroup, the mount, and the files of limit and use.
_MEMORY_CGROUPS = (
    (r"^0::/(.+)$", "sys/fs/cgroup", "memory.max", "memory.current"),
    (
        r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(.+)$",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
    ),
)


def allowed_cpus() -> frozenset[int]:
    """CPUs that this process may use; the kernel has already cut them down to its cpuset."""
    return frozenset(os.sched_getaffinity(0))


def allowed_memory_nodes(root: Path = Path("/")) -> frozenset[int]:
    """NUMA nodes of this process's cpuset; empty when the kernel doesn't tell."""
    match = re.search(
        r"^Mems_allowed_list:\s*(\S+)", _read(root / "proc/self/status"), re.MULTILINE
    )
    return frozenset(parse_cpulist(match.group(1))) if match else frozenset()


def one_thread_per_core(cpus: Iterable[int], root: Path = Path("/")) -> tuple[int, ...]:
    """The first hardware thread of each core, of those in ``cpus``."""
    first: dict[int, int] = {}
    for cpu in sorted(cpus):
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        first.setdefault(min(parse_cpulist(_read(file)), default=cpu), cpu)
    return tuple(sorted(first.values()))


def free_memory_mib(numa_node: int, root: Path = Path("/")) -> int:
    """Memory of a NUMA node that can be taken at once, page cache included, less a margin.

    Free, plus clean file pages and reclaimable slab, less 5 % of the node and at least 256 MiB: a
    node that runs full under a hard binding makes the kernel kill.
    """
    file = root / f"sys/devices/system/node/node{numa_node}/meminfo"
    kib = {
        key: int(value)
        for key, value in re.findall(r"^Node \d+ ([\w()]+):\s+(\d+)", _read(file), re.MULTILINE)
    }
    if "MemTotal" not in kib or "MemFree" not in kib:
        raise CraterError(f"can't read the free memory of NUMA node {numa_node} in {file}")
    pages = max(0, kib.get("Active(file)", 0) + kib.get("Inactive(file)", 0) - kib.get("Dirty", 0))
    free = kib["MemFree"] + pages + kib.get("SReclaimable", 0)
    return max(0, free - max(kib["MemTotal"] // 20, 256 * 1024)) // 1024


def cgroup_left_mib(root: Path = Path("/")) -> int | None:
    """What the memory limits of this process's cgroups leave; None without a limit."""
    left = []
    for line, mount, limit_name, used_name in _MEMORY_CGROUPS:
        match = re.search(line, _read(root / "proc/self/cgroup"), re.MULTILINE)
        top = root / mount
        folder = top / match.group(1) if match else top
        while folder != top and top in folder.parents:
            limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
            if limit.isdecimal() and used.isdecimal():
                left.append(max(0, int(limit) - int(used)) // _MIB)
            folder = folder.parent
    return min(left, default=None)


def load() -> float:
    """The load average of the last minute."""
    return os.getloadavg()[0]


def cpu_ticks(root: Path = Path("/")) -> dict[int, tuple[int, int]]:
    """(busy, all) clock ticks of each CPU since boot; waiting for a disk counts as idle."""
    found = {}
    for line in _read(root / "proc/stat").splitlines():
        if match := re.match(r"cpu(\d+) (.*)", line):
            ticks = [int(word) for word in match.group(2).split()][:8]
            idle = sum(ticks[3:5])
            found[int(match.group(1))] = (sum(ticks) - idle, sum(ticks))
    return found


def busy_share(
    before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]], cpus: Iterable[int]
) -> float:
    """The share of time, 0 to 1, that the CPUs were busy between two readings."""
    used = total = 0
    for cpu in cpus:
        if cpu in before and cpu in after:
            used += after[cpu][0] - before[cpu][0]
            total += after[cpu][1] - before[cpu][1]
    return used / total if total > 0 else 0.0


def cpus_busy(cpus: Iterable[int], seconds: float = 1.0) -> float:
    """The share of the next second that others use the CPUs."""
    before = cpu_ticks()
    time.sleep(seconds)
    return busy_share(before, cpu_ticks(), cpus)


def _read(file: Path) -> str:
    """Text of a kernel file; empty when this machine has none."""
    try:
        return file.read_text()
    except OSError:
        return ""
