"""What drawings say of a device, a link or a NUMA node, in as few words as an admin needs.

Names come from hardware, firmware and users: everything that is drawn passes ``clean`` first.
"""

from __future__ import annotations

from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import Cache, Cpu, NodeProfile, Nvme, PciLink
from crater_slurm.model.units import format_mib, format_number
from crater_slurm.topology.devices import Device
from crater_slurm.topology.links import LinkGroup

#: Longest name in a drawing.
NAME_LIMIT = 48
#: PCI Express generation by GT/s of one lane.
_GENERATIONS = {2.5: "1.0", 5.0: "2.0", 8.0: "3.0", 16.0: "4.0", 32.0: "5.0", 64.0: "6.0"}
#: Behind a link that runs below its maximum.
BELOW = "(!)"
BELOW_MEANS = "(!) below the maximum of device or slot; a lower speed at idle is normal for GPUs"


def clean(text: str, limit: int = NAME_LIMIT) -> str:
    """Printable, on one line, never longer than the limit: controls and surrogates become ?."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def link(now: PciLink | None, most: PciLink | None) -> str:
    """``PCIe 4.0 x8 of x16 (!)``: speed and width now, and the maximum where it is more."""
    if now is None:
        return f"PCIe up to {_speed(most)} x{most.width}" if most else ""
    if most is None or not below_maximum(now, most):
        return f"PCIe {_speed(now)} x{now.width}"
    narrow, slow = now.width < most.width, now.speed_gt_s < most.speed_gt_s
    if narrow and slow:
        return f"PCIe {_speed(now)} x{now.width} of {_speed(most)} x{most.width} {BELOW}"
    if narrow:
        return f"PCIe {_speed(now)} x{now.width} of x{most.width} {BELOW}"
    return f"PCIe {_speed(now)} of {_speed(most)}, x{now.width} {BELOW}"


def below_maximum(now: PciLink | None, most: PciLink | None) -> bool:
    """Whether fewer lanes or a lower speed are in use than both ends could."""
    if now is None or most is None:
        return False
    return now.width < most.width or now.speed_gt_s < most.speed_gt_s


def _speed(link: PciLink) -> str:
    return _GENERATIONS.get(link.speed_gt_s, f"{format_number(link.speed_gt_s)} GT/s")


def facts(device: Device) -> tuple[str, ...]:
    """What is said of a device beside its name; equal facts make devices one group."""
    said = [clean(device.model)] if device.model else []
    if isinstance(device.part, Nvme):
        said = [clean(device.part.model)] if device.part.model else []
        if device.part.size_gb:
            said.append(_size(device.part.size_gb))
        if device.part.random_read_iops:
            said.append(f"{_short(device.part.random_read_iops)} IOPS read")
    elif device.names and not device.part:
        said = []  # 15b3:101b says less than mlx5_0
    if device.pci and (text := link(device.pci.link, device.pci.max_link)):
        said.append(text)
    return tuple(said)


def numa_facts(profile: NodeProfile, index: int) -> tuple[str, ...]:
    """Memory, bandwidth with its method, and CPUs of a NUMA node."""
    node = profile.numa_nodes[index]
    memory = [format_mib(node.memory_mib)] if node.memory_mib is not None else []
    if node.memory_bandwidth_gb_s is not None:
        path = f"numa_nodes[{index}].memory_bandwidth_gb_s"
        how = profile.where_from(path).method
        memory.append(f"{format_number(node.memory_bandwidth_gb_s)} GB/s {how}")
    lines = [", ".join(memory)] if memory else []
    return (*lines, cpus(node.cpus) if node.cpus else "no CPUs")


def cpus(numbers: tuple[int, ...]) -> str:
    """``CPUs 0-15,128-143``, with a space after each comma, where a line may break."""
    return f"CPUs {format_cpulist(numbers)}".replace(",", ", ")


def cache(found: Cache) -> str:
    size = f" {format_mib(found.size_kib / 1024)}" if found.size_kib else ""
    return f"L3{size}"


def processors(cpu: Cpu) -> str:
    """``2 x AMD EPYC 7763, 64 cores each, 2 threads per core``."""
    name = clean(cpu.model) if cpu.model else clean(cpu.arch or "processor")
    threads = f", {cpu.threads_per_core} threads per core" if cpu.threads_per_core > 1 else ""
    each = " each" if cpu.sockets > 1 else ""
    return f"{cpu.sockets} x {name}, {cpu.cores_per_socket} cores{each}{threads}"


def link_group(group: LinkGroup) -> str:
    """``GPU 0-7 each to each: NV12, 600 GB/s``."""
    if group.complete:
        who = f"GPU {format_cpulist(group.gpus)}"
        who += " each to each" if len(group.gpus) > 2 else ""
    else:
        who = "GPU " + ", ".join(f"{a}-{b}" for a, b in group.pairs)
    speed = f", {format_number(group.bandwidth_gb_s)} GB/s" if group.bandwidth_gb_s else ""
    return f"{who}: {group.name}{speed}"


def _size(size_gb: int) -> str:
    return f"{size_gb / 1000:g} TB" if size_gb >= 1000 else f"{size_gb} GB"


def _short(count: int) -> str:
    return f"{count / 10**6:.3g}M" if count >= 10**6 else f"{count / 1000:.0f}k"
