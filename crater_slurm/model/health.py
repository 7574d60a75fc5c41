"""How a node is right now, as its probe reports it. ``None`` means that nobody could tell.

Rates are means over the time since the sample before; units are in the names.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Why a driver slows a GPU down, by bit (nvml.h, nvmlClocksEventReasons; DCGM has the same); idle
#: and limits that an admin or application set are no faults.
THROTTLE_REASONS = {
    0x04: "power_cap",
    0x08: "hardware_slowdown",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """One GPU. ``throttled`` are the reasons in the driver's words: thermal, power_brake ...

    ``xid`` is the code of the driver's last error, where somebody (DCGM) tells it.
    """

    index: int
    uuid: str | None = None
    model: str | None = None
    temperature_c: float | None = None
    throttled: tuple[str, ...] = ()
    ecc_uncorrected: int | None = None
    ecc_corrected: int | None = None
    memory_used_mib: int | None = None
    memory_total_mib: int | None = None
    utilization_percent: float | None = None
    memory_utilization_percent: float | None = None
    power_w: float | None = None
    xid: int | None = None

    @property
    def answers(self) -> bool:
        """Whether anything at all is known of it; a GPU that is lost says nothing."""
        states = (
            *(self.temperature_c, self.ecc_uncorrected, self.ecc_corrected, self.power_w),
            *(self.memory_used_mib, self.utilization_percent, self.memory_utilization_percent),
        )
        return any(state is not None for state in states)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaHealth:
    """One NUMA node. Memory bandwidth in use needs the kernel's resctrl to be mounted."""

    id: int
    cpu_utilization_percent: float | None = None
    memory_used_mib: int | None = None
    memory_bandwidth_gb_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveHealth:
    """One NVMe drive. ``await`` is the mean time of a request with its wait in the queue;
    ``latency_us`` the median of reads at queue depth 1 that the probe made itself.
    ``critical_warning`` are the drive's own warning bits; 0 is well."""

    name: str
    stable_id: str | None = None
    read_iops: float | None = None
    write_iops: float | None = None
    read_mb_s: float | None = None
    write_mb_s: float | None = None
    read_await_ms: float | None = None
    write_await_ms: float | None = None
    busy_percent: float | None = None
    latency_us: float | None = None
    wear_percent: int | None = None
    temperature_c: float | None = None
    critical_warning: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """One node at ``time`` (seconds since 1970); ``load`` is the kernel's one-minute mean."""

    node: str
    time: float
    load: float | None = None
    numa_nodes: tuple[NumaHealth, ...] = ()
    gpus: tuple[GpuHealth, ...] = ()
    drives: tuple[DriveHealth, ...] = ()
