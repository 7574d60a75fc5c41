# SPDX-License-Identifier: Apache-2.0
"""The test side of guest_files/alloc.py: the command that a job runs, and what it reports."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from .guest import Guest
from .image import GUEST_FILES

COMMAND = "/opt/crater-vm/alloc.py"
PAGES_PER_MIB = 256
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the memory of one process and of its cgroup lies; NUMA nodes are numbers."""

    cpus: str
    mems: str
    cgroup: str
    policy: str
    anon_pages: Mapping[int, int]
    """4 KiB pages of the process's allocation on each node that has any."""
    numa_stat: Mapping[str, Mapping[int, int]]
    """Bytes of the whole cgroup on each node, by kind as in memory.numa_stat."""

    def anon_mib(self, node: int) -> float:
        """Return how much of the allocation lies on a node."""
        return self.anon_pages.get(node, 0) / PAGES_PER_MIB

    def file_mib(self, node: int) -> float:
        """Return how much page cache of the cgroup lies on a node."""
        return self.numa_stat["file"][node] / MIB


def install(guest: Guest) -> None:
    """Put the allocator where every user of the guest can run it."""
    guest.write(COMMAND, (GUEST_FILES / "alloc.py").read_text("utf-8"), 0o755)


def placements(output: str) -> list[Placement]:
    """Return the reports among the lines that a job printed, in their order."""
    reports = [json.loads(line) for line in output.splitlines() if line.startswith('{"cpus"')]
    return [
        Placement(
            **report
            | {
                "anon_pages": _by_node(report["anon_pages"]),
                "numa_stat": {kind: _by_node(of) for kind, of in report["numa_stat"].items()},
            }
        )
        for report in reports
    ]


def _by_node(counts: Mapping[str, int]) -> dict[int, int]:
    """JSON knows no numbers as keys."""
    return {int(node): count for node, count in counts.items()}
