"""What the kernel has counted of a job, from its cgroup: memory, CPU time, killed processes.

Page cache is not need: the kernel drops it when others want the memory, and a job that reads its
data set once would seem to need all of it. So need is counted from ``memory.stat``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from crater_slurm.files import read_text

#: Parts of ``kernel`` for kernels before 5.18, which do not tell the sum.
_KERNEL_PARTS = ("kernel_stack", "pagetables", "percpu", "sock", "vmalloc", "slab_unreclaimable")


@dataclass(frozen=True, slots=True)
class Usage:
    """One look at a job's cgroup; what the kernel does not tell is None.

    ``need_bytes`` is memory now that can't be dropped, ``total_bytes`` the most there ever was,
    with page cache, where the kernel keeps that peak (6.1 and later), else what there is now.
    """

    need_bytes: int | None = None
    total_bytes: int | None = None
    oom_kills: int | None = None
    cpu_seconds: float | None = None


def read(folder: Path) -> Usage:
    """Usage of the job whose cgroup this is; all None when it is gone."""
    total = _number(folder / "memory.peak")
    if total is None:
        total = _number(folder / "memory.current")
    cpu_us = _keyed(folder / "cpu.stat").get("usage_usec")
    return Usage(
        need_bytes=_need(folder),
        total_bytes=total,
        oom_kills=_keyed(folder / "memory.events").get("oom_kill"),
        cpu_seconds=None if cpu_us is None else cpu_us / 1e6,
    )


def _need(folder: Path) -> int | None:
    stat = _keyed(folder / "memory.stat")
    if "anon" not in stat:
        return None
    if "kernel" in stat:
        kernel = stat["kernel"] - stat.get("slab_reclaimable", 0)
    else:
        kernel = sum(stat.get(name, 0) for name in _KERNEL_PARTS)
    swapped = _number(folder / "memory.swap.current") or 0
    return stat["anon"] + stat.get("shmem", 0) + max(kernel, 0) + swapped


def _number(path: Path) -> int | None:
    text = read_text(path) or ""
    return int(text) if text.isdigit() else None


def _keyed(path: Path) -> dict[str, int]:
    """A flat keyed file, such as memory.stat; what is no number is left out."""
    found = {}
    for line in (read_text(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if value.isdigit():
            found[name] = int(value)
    return found
