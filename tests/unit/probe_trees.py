"""Machines written to a folder, for tests of the readers of /sys and /proc."""

from __future__ import annotations

from pathlib import Path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def link(root: Path, name: str, to: str) -> None:
    """A link at ``name`` to ``to``, both below the root, relative as in /sys."""
    place = root / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to("../" * (len(Path(name).parts) - 1) + to)


def two_sockets(root: Path) -> None:
    """Two packages of two cores with two threads each; CPU 7 is offline."""
    files = {
        "sys/devices/system/cpu/online": "0-6",
        "proc/cpuinfo": "model name\t: Test CPU\nflags\t\t: fpu lm avx avx2 avx512f",
        "proc/meminfo": "MemTotal:       8388608 kB",
        "sys/devices/system/node/node0/cpulist": "0-1,4-5",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  4194304 kB",
        "sys/devices/system/node/node0/distance": "10 21",
        "sys/devices/system/node/node1/cpulist": "2-3,6-7",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:  4194304 kB",
        "sys/devices/system/node/node1/distance": "21 10",
        "sys/block/nvme0n1/size": "15002931888",
        "sys/block/nvme0n1/wwid": "eui.01000000",
        "sys/block/nvme0n1/device/model": "Test NVMe  ",
        "sys/block/nvme0n1/device/numa_node": "1",
    }
    for number in range(8):
        base = f"sys/devices/system/cpu/cpu{number}/topology"
        files[f"{base}/physical_package_id"] = str(number % 4 // 2)
        files[f"{base}/core_id"] = str(number % 2)
    write(root, files)


def pci(root: Path, path: str, **files: str) -> None:
    """A PCI device at ``path`` below /sys/devices, with its link on the bus."""
    place = f"sys/devices/{path}"
    write(root, {f"{place}/{name}": text for name, text in files.items()})
    link(root, f"sys/bus/pci/devices/{Path(path).name}", place)
