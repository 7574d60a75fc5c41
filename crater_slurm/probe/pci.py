"""GPUs, NICs and NVMe drives in the PCI tree: NUMA node, bridges above, link.

Display adapters of management controllers are no GPUs, and virtual functions are counted, not
listed: a job gets the device, and its functions share one link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from crater_slurm.model.profile import Nvme, PciDevice, PciKind, PciLink
from crater_slurm.probe import files

#: Domain (32 bits behind Intel VMD), bus, device, function.
ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_NIC, _DISPLAY, _PROCESSING = 0x02, 0x03, 0x12
_NVME = 0x0108
#: NVIDIA, AMD, Intel. ASPEED (1a03), Matrox (102b) and virtual adapters only draw a console.
_GPU_VENDORS = {0x10DE, 0x1002, 0x8086}
#: The kernel says these for a link that is down or can't be asked.
_NO_WIDTHS = {0, 255}
_MAX_WIDTH = 32


def devices(root: Path, drives: Iterable[Nvme], notes: list[str]) -> tuple[PciDevice, ...]:
    """GPUs, NICs and NVMe drives by address. ``drives`` give NVMe devices their names."""
    base = root / "sys/bus/pci/devices"
    drives_at: dict[str | None, list[Nvme]] = {}
    for drive in drives:
        drives_at.setdefault(drive.pci_bus_id, []).append(drive)
    found = []
    functions = 0
    for address in files.entries(base):
        folder = base / address
        kind = _kind(root, address) if ADDRESS.fullmatch(address) else None
        if kind is None:
            continue
        if os.path.lexists(folder / "physfn"):
            functions += 1
        else:
            found.append(_device(folder, kind, drives_at.get(address, [])))
    if functions:
        notes.append(f"{functions} virtual functions of PCI devices are left out")
    return tuple(found)


def _kind(root: Path, address: str) -> PciKind | None:
    folder = root / "sys/bus/pci/devices" / address
    code = _hex(folder / "class")
    if code is None:
        return None
    group = code >> 16
    if group == _NIC:
        return PciKind.NIC
    if code >> 8 == _NVME:
        return PciKind.NVME
    if group == _PROCESSING:
        return PciKind.GPU
    vendor = _hex(folder / "vendor")
    driven = (root / "proc/driver/nvidia/gpus" / address).is_dir()
    return PciKind.GPU if group == _DISPLAY and (vendor in _GPU_VENDORS or driven) else None


def _device(folder: Path, kind: PciKind, drives: Sequence[Nvme]) -> PciDevice:
    model = drives[0].model if drives else None
    host, bridges = _above(folder)
    return PciDevice(
        address=folder.name,
        kind=kind,
        names=tuple(d.name for d in drives) or _names(folder, kind),
        model=model or _ids(folder),
        numa_node=files.read_int(folder / "numa_node"),
        local_cpus=files.cpus(folder, "local_cpus", "local_cpulist") or (),
        root=host,
        bridges=bridges,
        link=_link(folder, "current"),
        max_link=_link(folder, "max"),
    )


def _names(folder: Path, kind: PciKind) -> tuple[str, ...]:
    if kind is not PciKind.NIC:
        return ()
    return (*files.entries(folder / "net"), *files.entries(folder / "infiniband"))


def _ids(folder: Path) -> str | None:
    """Vendor and device as ``10de:1eb8``: sysfs has no names for them."""
    vendor, device = _hex(folder / "vendor"), _hex(folder / "device")
    return f"{vendor:04x}:{device:04x}" if vendor is not None and device is not None else None


def _above(folder: Path) -> tuple[str | None, tuple[str, ...]]:
    """The host bridge and the bridges down to the device, by its path below /sys/devices."""
    parts = Path(os.path.realpath(folder)).parts
    hosts = [i for i, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)]
    if not hosts:
        return None, ()
    below = parts[hosts[0] + 1 : -1]
    return parts[hosts[0]], tuple(part for part in below if ADDRESS.fullmatch(part))


def _link(folder: Path, which: str) -> PciLink | None:
    """``16.0 GT/s PCIe`` and ``16``; None when either is unknown."""
    speed = re.match(
        r"([0-9]{1,3}(?:\.[0-9])?) GT/s", files.read(folder / f"{which}_link_speed") or ""
    )
    width = files.read_int(folder / f"{which}_link_width")
    if not speed or float(speed.group(1)) == 0 or width is None or width in _NO_WIDTHS:
        return None
    return PciLink(speed_gt_s=float(speed.group(1)), width=width) if width <= _MAX_WIDTH else None


def _hex(path: Path) -> int | None:
    text = files.read(path) or ""
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text) else None
