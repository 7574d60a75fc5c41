"""CPU use and memory of each NUMA node, from /proc/stat, meminfo and resctrl.

The kernel counts memory traffic only where resctrl is mounted and the CPU can (Intel RDT, AMD QoS):
``mount -t resctrl resctrl /sys/fs/resctrl``. Elsewhere the bandwidth in use stays unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from crater_slurm.model.health import NumaHealth
from crater_slurm.model.profile import NodeProfile
from crater_slurm.probe import files

_STAT = re.compile(r"^cpu(\d+) ([\d ]+)$", re.MULTILINE)
#: Fields of /proc/stat: user nice system idle iowait irq softirq steal; guest times are in user.
_IDLE = (3, 4)
_TIMES = 8


@dataclass(slots=True)
class CpuSampler:
    """Remembers the counters of the sample before, of which rates are the difference."""

    root: Path = Path("/")
    _times: dict[int, tuple[int, int]] = field(default_factory=dict)
    _traffic: dict[int, tuple[float, int]] = field(default_factory=dict)
    _domains: dict[int, int] = field(default_factory=dict)

    def sample(self, profile: NodeProfile, now: float) -> tuple[NumaHealth, ...]:
        """Each NUMA node's state; the first sample has no rates. ``now`` only ever grows."""
        times = self._read_times()
        before, self._times = self._times, times
        traffic = self._bandwidth(profile, now)
        found = []
        for node in profile.numa_nodes:
            found.append(
                NumaHealth(
                    id=node.id,
                    cpu_utilization_percent=_used(before, times, node.cpus),
                    memory_used_mib=self._memory_used(node.id),
                    memory_bandwidth_gb_s=traffic.get(node.id),
                )
            )
        return tuple(found)

    def load(self) -> float | None:
        """The mean number of processes that run or wait, over one minute."""
        text = (files.read(self.root / "proc/loadavg") or "").split(" ")[0]
        return float(text) if re.fullmatch(r"\d{1,7}\.\d+", text) else None

    def _read_times(self) -> dict[int, tuple[int, int]]:
        """Busy and all clock ticks of each CPU."""
        found = {}
        for number, text in _STAT.findall(files.read(self.root / "proc/stat") or ""):
            ticks = [int(part) for part in text.split()[:_TIMES]]
            if len(ticks) > max(_IDLE):
                total = sum(ticks)
                found[int(number)] = (total - sum(ticks[i] for i in _IDLE), total)
        return found

    def _memory_used(self, node: int) -> int | None:
        text = files.read(self.root / f"sys/devices/system/node/node{node}/meminfo")
        if text is None and node == 0:  # a kernel without NUMA
            text = files.read(self.root / "proc/meminfo")
        found = dict(re.findall(r"(MemTotal|MemFree):\s+(\d{1,15}) kB", text or ""))
        if len(found) < 2:
            return None
        return max(0, int(found["MemTotal"]) - int(found["MemFree"])) // 1024

    def _bandwidth(self, profile: NodeProfile, now: float) -> dict[int, float]:
        """GB/s by NUMA node: the traffic of the L3 domains whose CPUs lie in it."""
        folder = self.root / "sys/fs/resctrl/mon_data"
        bandwidth: dict[int, float] = {}
        for name in files.entries(folder):
            match = re.fullmatch(r"mon_L3_(\d{1,5})", name)
            count = files.read_int(folder / name / "mbm_total_bytes") if match else None
            if match is None or count is None:
                continue
            domain = int(match.group(1))
            before = self._traffic.get(domain)
            self._traffic[domain] = (now, count)
            node = self._nodes(profile).get(domain)
            if before and node is not None and now > before[0] and count >= before[1]:
                rate = (count - before[1]) / (now - before[0]) / 1e9
                bandwidth[node] = bandwidth.get(node, 0.0) + rate
        return bandwidth

    def _nodes(self, profile: NodeProfile) -> dict[int, int]:
        """NUMA node by resctrl's domain, which is the kernel's id of the L3 cache."""
        if not self._domains:
            base = self.root / "sys/devices/system/cpu"
            for node in profile.numa_nodes:
                for cpu in node.cpus:
                    domain = files.read_int(base / f"cpu{cpu}/cache/index3/id")
                    if domain is not None:
                        self._domains.setdefault(domain, node.id)
        return self._domains


def _used(
    before: dict[int, tuple[int, int]], now: dict[int, tuple[int, int]], cpus: tuple[int, ...]
) -> float | None:
    both = [cpu for cpu in cpus if cpu in before and cpu in now]
    busy = sum(now[cpu][0] - before[cpu][0] for cpu in both)
    total = sum(now[cpu][1] - before[cpu][1] for cpu in both)
    return min(100.0, max(0.0, 100.0 * busy / total)) if total > 0 else None
