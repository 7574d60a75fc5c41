"""From a folder to the drives that carry it, through partitions, LVM, dm, md and btrfs.

Only a folder is ever a target. A device, a link, a network or memory file system and a container's
layer are refused with the reason, since they would harm somebody or measure something else.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.errors import CraterError
from crater_slurm.probe.bench.result import MAX_BUSY

_MIB = 2**20
#: Kept free beside the file: this share of the file system and at least so much.
_KEEP_PERCENT = 5
_KEEP_MIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A folder, its file system and the drives below; ``unfit`` says why no profile may have it."""

    folder: Path
    filesystem: str
    drives: tuple[str, ...]
    unfit: str | None = None


def target(folder: Path, root: Path = Path("/"), *, allow_any: bool = False) -> Target:
    """The target that a folder is. ``root`` holds the /proc and /sys to read.

    Raises CraterError when it is no folder or, without ``allow_any``, lies on no local drive.
    """
    device = _directory_device(folder)
    filesystem, source = _mount(device, folder, root)
    drives: tuple[str, ...] = ()
    if filesystem == "btrfs":
        drives = tuple(sorted(set(_btrfs_drives(source, root))))
    elif (block := root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}").exists():
        drives = tuple(sorted(set(_drives(block.resolve()))))
    if drives:
        return Target(folder=folder, filesystem=filesystem, drives=drives)
    reason = f"{folder} is on {filesystem or 'a file system'} ({source or 'no device'})"
    if not allow_any:
        raise CraterError(
            f"{reason}, which is no file system of a local drive; name a folder of the cache with "
            "--dir, or use --allow-any-filesystem, whose results no profile takes"
        )
    return Target(folder=folder, filesystem=filesystem, drives=(), unfit=f"{reason}, no drive")


def busy(drives: Sequence[str], root: Path = Path("/"), seconds: float = 1.0) -> str | None:
    """Why the drives are too busy to be measured, from a look at them of some seconds."""
    before = {drive: io_ticks_ms(drive, root) for drive in drives}
    time.sleep(seconds if drives else 0)
    for drive in drives:
        share = (io_ticks_ms(drive, root) - before[drive]) / (seconds * 1000)
        if share > MAX_BUSY:
            return (
                f"{drive} was busy {share * 100:.0f} % of a second (at most "
                f"{MAX_BUSY * 100:.0f} %); run it again when nobody uses the drive"
            )
    return None


def io_ticks_ms(drive: str, root: Path = Path("/")) -> int:
    """Milliseconds since boot in which the drive had something to do (Linux, block/stat.rst)."""
    try:
        return int((root / "sys/class/block" / drive / "stat").read_text().split()[9])
    except (OSError, IndexError, ValueError) as error:
        raise CraterError(f"can't read how busy {drive} is: {error}") from error


def too_small(free_mib: int, total_mib: int, file_mib: int) -> str | None:
    """Why a file of this size must not be made, or None."""
    keep = max(total_mib * _KEEP_PERCENT // 100, _KEEP_MIB)
    if free_mib >= file_mib + keep:
        return None
    return (
        f"{free_mib} MiB are free, {file_mib} MiB for the file and {keep} MiB beside it are "
        "needed; free some space or take a smaller file with --file-mib"
    )


def space_mib(folder: Path) -> tuple[int, int]:
    """(free for this user, all) of the folder's file system."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize // _MIB, found.f_blocks * found.f_frsize // _MIB


def _directory_device(folder: Path) -> int:
    try:
        found = folder.lstat()
    except OSError as error:
        raise CraterError(f"can't measure in {folder}: {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode):
        raise CraterError(f"{folder} is a symbolic link; name the folder itself")
    if stat.S_ISBLK(found.st_mode):
        raise CraterError(
            f"{folder} is a device, and measuring one destroys what is on it; name a folder of "
            "the file system that is on it"
        )
    if not stat.S_ISDIR(found.st_mode):
        raise CraterError(f"{folder} is no folder")
    return found.st_dev


def _mount(device: int, folder: Path, root: Path) -> tuple[str, str]:
    """(type, source) of the folder's file system, from the last mount that has it."""
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "", ""
    number = f"{os.major(device)}:{os.minor(device)}"
    found = ("", "")
    longest = -1
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if not separator or len(fields) < 5 or len(tail) < 2:
            continue
        point = _unescaped(fields[4])
        above = Path(point) == folder or Path(point) in folder.absolute().parents
        # A btrfs subvolume has a device number of its own, which no mount shows.
        if (fields[2] == number or (above and tail[0] == "btrfs")) and len(point) >= longest:
            found, longest = (tail[0], _unescaped(tail[1])), len(point)
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _btrfs_drives(source: str, root: Path) -> Iterator[str]:
    """All drives of the btrfs file system that has the device ``source``."""
    name = Path(source).resolve().name
    for devices in sorted((root / "sys/fs/btrfs").glob("*/devices")):
        members = sorted(devices.iterdir())
        if name in {entry.name for entry in members}:
            for entry in members:
                yield from _drives(entry.resolve())


def _drives(block: Path) -> Iterator[str]:
    """Whole drives below a block device: a partition's parent, a mapped device's slaves."""
    if (block / "partition").exists():
        yield from _drives(block.parent)
        return
    slaves = block / "slaves"
    below = sorted(slaves.iterdir()) if slaves.is_dir() else []
    for slave in below:
        yield from _drives(slave.resolve())
    if not below:
        yield block.name
