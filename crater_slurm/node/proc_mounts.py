"""Mounts as a process sees them: which of its files lie on a disk of this node, and where there.

A job may run in a container, whose paths are its own. So files are compared by device and by their
path within the file system, which are the same from everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

#: File systems on block devices. Those of the network, of memory and of FUSE are not here.
_ON_DISK = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "jfs", "reiserfs", "bcachefs", "zfs"}
)
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountPoint:
    """A line of mountinfo. ``path`` is a path within the file system: of the mount itself, or of
    a file on it."""

    device: str
    path: str
    point: str
    filesystem: str
    upper: str = ""


def mount_points(text: str) -> dict[int, MountPoint]:
    """The mounts of a mountinfo by their id; lines that can't be read are left out."""
    found = {}
    for line in text.splitlines():
        fields = line.split(" ")
        try:
            rest = fields[fields.index("-", 6) + 1 :]
            options = dict(o.partition("=")[::2] for o in rest[2].split(","))
            found[int(fields[0])] = MountPoint(
                fields[2], _plain(fields[3]), _plain(fields[4]), rest[0],
                _plain(options.get("upperdir", "")),
            )  # fmt: skip
        except (ValueError, IndexError):
            continue
    return found


def local_disk(point: MountPoint, own: Mapping[int, MountPoint]) -> bool:
    """Whether what is written to a mount lands on a disk of this node.

    An overlay (a container's root) writes to its upper folder, which is looked up among ``own``,
    the node's mounts.
    """
    if point.filesystem != "overlay":
        return point.filesystem in _ON_DISK
    above = holding(point.upper, own) if point.upper else None
    return above is not None and above.filesystem in _ON_DISK


def holding(path: str, points: Mapping[int, MountPoint]) -> MountPoint | None:
    """The mount that a path lies on."""
    best = None
    for point in points.values():
        if is_below(path, point.point) and (best is None or len(point.point) >= len(best.point)):
            best = point
    return best


def fs_path(point: MountPoint, path: str) -> MountPoint:
    """Where a path below a mount point lies within its file system."""
    if is_below(path, point.point):
        path = point.path.rstrip("/") + path[len(point.point.rstrip("/")) :]
    return replace(point, path=path)


def is_below(path: str, folder: str) -> bool:
    """Whether a path is a folder's own or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), text)
