"""On which NUMA nodes a block device hangs, read from /sys, through partitions, RAID and LVM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from crater_slurm.files import read_text

#: RAID on LVM on RAID is as deep as anybody stacks them.
_DEEPEST = 8


def numa_nodes(device: int, root: Path = Path("/sys")) -> frozenset[int] | None:
    """NUMA nodes of the drives under a device number; None when one of them is unknown.

    File systems without a device of their own (tmpfs, overlay, btrfs) are unknown too.
    """
    folder = root / f"dev/block/{os.major(device)}:{os.minor(device)}"
    if not os.major(device) or not folder.exists():
        return None
    found = set()
    for drive in _drives(folder.resolve(), 0):
        node = _numa_node(drive, root.resolve())
        if node is None:
            return None
        found.add(node)
    return frozenset(found) or None


def _drives(folder: Path, depth: int) -> Iterator[Path]:
    """The drives that a device consists of; itself where it has no slaves."""
    slaves = sorted((folder / "slaves").glob("*"))
    if not slaves or depth >= _DEEPEST:
        yield folder
        return
    for slave in slaves:
        yield from _drives(slave.resolve(), depth + 1)


def _numa_node(drive: Path, root: Path) -> int | None:
    """The node of the nearest device above; a drive with several paths lies beside its paths."""
    for folder in (drive, *drive.parents):
        if folder == root:
            break
        paths = sorted(path for path in folder.glob("nvme[0-9]*") if path.is_symlink())
        for place in (folder, *paths):
            text = read_text(place / "numa_node")
            if text is not None:
                return int(text) if text.isdecimal() else None
    return None
