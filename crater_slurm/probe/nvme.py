"""Local NVMe namespaces as sysfs shows them, and what already lives on each.

IOPS and latency are measured elsewhere. ``uses`` exists so that nobody writes on a drive that
holds something; an empty one is no promise, since data without a partition table leaves no trace.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.model.profile import Nvme
from crater_slurm.probe import files, usage
from crater_slurm.probe.pci import ADDRESS

_SECTOR_BYTES = 512  # /sys/block/*/size counts these, whatever the drive's own sector size
#: nvme0c0n1 is a path of multipath to nvme0n1, and no namespace of its own.
_NAMESPACE = re.compile(r"nvme[0-9]+n[0-9]+")
_LOCAL = {None, "pcie"}


@dataclass(frozen=True, slots=True)
class _Controller:
    folder: Path
    address: str | None


def drives(root: Path, notes: list[str]) -> tuple[Nvme, ...]:
    """Local NVMe namespaces by name; those of another host (NVMe over fabrics) get a note."""
    blocks: dict[str, Path] = {}
    for place in ("sys/class/block", "sys/block"):
        names = (n for n in files.entries(root / place) if _NAMESPACE.fullmatch(n))
        blocks |= {name: root / place / name for name in names}
    occupied = usage.read(root)
    found = []
    for name, block in sorted(blocks.items()):
        controller = _controller(block)
        transport = files.read(controller.folder / "transport")
        if transport in _LOCAL:
            found.append(_drive(name, block, controller, usage.words(name, block, occupied)))
        else:
            notes.append(f"{name} is left out: it is no local drive but reached by {transport}")
    return tuple(found)


def _controller(block: Path) -> _Controller:
    """The controller of a namespace; with multipath the first one of its subsystem."""
    real = Path(os.path.realpath(block))
    folder = block / "device" if (block / "device").is_dir() else real.parent
    inner = files.numbered(folder, "nvme")
    if inner:
        folder = folder / f"nvme{inner[0]}"
    stated = files.read(folder / "address") or ""
    if ADDRESS.fullmatch(stated):
        return _Controller(folder, stated)
    parts = Path(os.path.realpath(folder)).parts if inner else real.parts
    above = [part for part in parts if ADDRESS.fullmatch(part)]
    return _Controller(folder, above[-1] if above else None)


def _drive(name: str, block: Path, controller: _Controller, uses: tuple[str, ...]) -> Nvme:
    sectors = files.read_int(block / "size")
    numa_node = files.read_int(controller.folder / "numa_node")
    if numa_node is None:
        numa_node = files.read_int(controller.folder / "device/numa_node")
    return Nvme(
        name=name,
        stable_id=_text(block / "wwid") or _text(controller.folder / "serial"),
        model=_text(controller.folder / "model"),
        firmware=_text(controller.folder / "firmware_rev"),
        pci_bus_id=controller.address,
        uses=uses,
        size_gb=sectors * _SECTOR_BYTES // 10**9 if sectors else None,
        numa_node=numa_node,
    )


def _text(path: Path) -> str | None:
    text = " ".join((files.read(path) or "").split())
    return text[:200] if text.isprintable() and text else None
