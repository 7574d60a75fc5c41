"""CPUs, NUMA nodes, memory and NVMe drives of a machine, as its kernel shows them.

Every reader takes a root folder, so that a captured /sys and /proc read like a live one. What
the kernel does not tell (bandwidth, IOPS, latency) stays unknown: it is measured, never guessed.
"""

from __future__ import annotations

import re
from pathlib import Path

from crater_slurm.errors import CraterError
from crater_slurm.model.cpuset import parse_cpulist
from crater_slurm.model.profile import Cpu, NumaNode, Nvme

_SECTOR = 512  # /sys/block/*/size counts these, whatever the drive's own sector size


def read(path: Path) -> str | None:
    """A small file's text without surrounding space; None when it is not there or not readable."""
    try:
        return path.read_text(errors="replace").strip("\0 \t\n")
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """A whole number in a file; None when it is not there or is none (``-1`` included)."""
    text = read(path)
    return int(text) if text is not None and text.isdigit() else None


def cpulist(path: Path) -> tuple[int, ...]:
    """CPU or node numbers in a file; none when it is not there. CraterError when it is no list."""
    try:
        return parse_cpulist(read(path) or "")
    except ValueError as error:
        raise CraterError(f"{path} can't be read: {error}") from error


def online_cpus(root: Path) -> tuple[int, ...]:
    """CPUs that are online. Raises CraterError on a tree without any."""
    base = root / "sys/devices/system/cpu"
    online = cpulist(base / "online")
    if not online:  # kernels before 2.6.26
        folders = [p for p in base.glob("cpu[0-9]*") if read(p / "online") != "0"]
        online = tuple(sorted(int(p.name.removeprefix("cpu")) for p in folders))
    if not online:
        raise CraterError(f"{base} lists no online CPU; is {root} the root of a Linux machine?")
    return online


def cpu(root: Path) -> Cpu:
    """Packages, cores and threads that are online. Raises CraterError on a tree without CPUs."""
    base = root / "sys/devices/system/cpu"
    online = online_cpus(root)
    packages: dict[int, set[tuple[int, int]]] = {}
    for number in online:
        topology = base / f"cpu{number}/topology"
        package = read_int(topology / "physical_package_id") or 0
        die = read_int(topology / "die_id") or 0
        core = read_int(topology / "core_id")
        packages.setdefault(package, set()).add((die, number if core is None else core))
    cores = sum(len(found) for found in packages.values())
    info = read(root / "proc/cpuinfo") or ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", info, re.MULTILINE)
    return Cpu(
        model=model.group(1).strip() if model else None,
        sockets=len(packages),
        cores_per_socket=cores // len(packages),
        threads_per_core=max(1, len(online) // cores),
        avx=frozenset(f for f in flags.group(1).split() if f.startswith("avx")) if flags else None,
    )


def numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    """NUMA nodes with CPUs, memory and distances; a kernel without NUMA shows one node."""
    base = root / "sys/devices/system"
    online = set(online_cpus(root))
    nodes = []
    for folder in sorted(
        (base / "node").glob("node[0-9]*"), key=lambda p: int(p.name.removeprefix("node"))
    ):
        memory = re.search(r"MemTotal:\s+(\d+) kB", read(folder / "meminfo") or "")
        cpus = tuple(c for c in cpulist(folder / "cpulist") if c in online)
        distances = tuple(int(d) for d in (read(folder / "distance") or "").split() if d.isdigit())
        package = (
            read_int(base / f"cpu/cpu{cpus[0]}/topology/physical_package_id") if cpus else None
        )
        nodes.append(
            NumaNode(
                id=int(folder.name.removeprefix("node")),
                cpus=cpus,
                socket=package,
                memory_mib=int(memory.group(1)) // 1024 if memory else None,
                distances=distances,
            )
        )
    if nodes:
        return tuple(nodes)
    return (NumaNode(id=0, cpus=tuple(sorted(online)), memory_mib=memory_mib(root)),)


def memory_mib(root: Path) -> int | None:
    """All memory of the machine."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", read(root / "proc/meminfo") or "", re.MULTILINE)
    return int(found.group(1)) // 1024 if found else None


def nvmes(root: Path) -> tuple[Nvme, ...]:
    """Local NVMe namespaces with the drive's model, serial number and NUMA node."""
    drives = []
    for block in sorted((root / "sys/block").glob("nvme[0-9]*n[0-9]*")):
        controller = block / "device"
        sectors = read_int(block / "size")
        serial = read(controller / "serial")
        drives.append(
            Nvme(
                name=block.name,
                stable_id=read(block / "wwid") or serial,
                model=read(controller / "model"),
                size_gb=sectors * _SECTOR // 10**9 if sectors else None,
                numa_node=read_int(controller / "device/numa_node")
                if read_int(controller / "numa_node") is None
                else read_int(controller / "numa_node"),
            )
        )
    return tuple(drives)
