"""What lives on a block device, in words: partitions, mounts, swap, LVM, RAID and encryption."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.probe import files

#: A volume on a RAID on a drive, and one to spare; a captured tree may have a circle.
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Usage:
    """Uses by device: by name (``nvme0n1p1``, ``mapper/vg-lv``) and by number (``259:1``)."""

    root: Path
    by_device: dict[str, list[str]]


def read(root: Path) -> Usage:
    """What is mounted and what is swap on this machine."""
    found: dict[str, list[str]] = {}
    for device, place in _mounts(root):
        uses = found.setdefault(device, [])
        if f"mounted at {place}" not in uses:
            uses.append(f"mounted at {place}")
    for line in (files.read(root / "proc/swaps") or "").split("\n"):
        if line.startswith("/dev/"):
            found.setdefault(_plain(line.split()[0].removeprefix("/dev/")), []).append("swap")
    return Usage(root, found)


def _mounts(root: Path) -> Iterator[tuple[str, str]]:
    """Device (by name, or else by number) and place of each mount of a block device."""
    for line in (files.read(root / "proc/self/mountinfo") or "").split("\n"):
        fields = line.split(" ")
        if len(fields) > 5 and not fields[2].startswith("0:"):
            yield fields[2], _plain(fields[4])
    mounts = files.read(root / "proc/mounts") or files.read(root / "proc/self/mounts") or ""
    for line in mounts.split("\n"):
        fields = line.split(" ")
        if len(fields) > 2 and fields[0].startswith("/dev/"):
            yield _plain(fields[0].removeprefix("/dev/")), _plain(fields[1])


def _plain(text: str) -> str:
    """The kernel writes space, tab, line end and backslash as octal numbers."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda m: chr(int(m.group(1), 8)), text)


def words(name: str, block: Path, usage: Usage) -> tuple[str, ...]:
    """What is on a drive and on its partitions; none when the kernel knows of nothing."""
    partitions = [n for n in files.entries(block) if (block / n / "partition").is_file()]
    found = ["partitions"] if partitions else []
    for device in (name, *partitions):
        folder = block if device == name else block / device
        found += _uses(device, folder, usage, 0)
    return tuple(dict.fromkeys(found))


def _uses(device: str, folder: Path, usage: Usage, depth: int) -> list[str]:
    mapped = files.read(folder / "dm/name")
    names = (device, f"mapper/{mapped}", files.read(folder / "dev") or "")
    found = [use for name in names for use in usage.by_device.get(name, ())]
    for holder in files.entries(folder / "holders") if depth < _MAX_DEPTH else ():
        above = usage.root / "sys/block" / holder
        found += [_holder(holder, above), *_uses(holder, above, usage, depth + 1)]
    return found


def _holder(name: str, folder: Path) -> str:
    """What a device on top of another is: LVM and encryption tell by their device-mapper id."""
    mapped = files.read(folder / "dm/name") or name
    kind = (files.read(folder / "dm/uuid") or "").split("-")[0]
    if kind == "LVM":
        return f"LVM volume {mapped}"
    if kind == "CRYPT":
        return f"encrypted volume {mapped}"
    return f"part of {mapped}"
