"""The mount that the cache lives on: is it there, is it writable, may it be mounted.

A device is only ever mounted, by a name that outlives a reboot, and only when it already holds a
file system. Nothing here can format, label or write to a device.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.errors import ConfigError

_STABLE = re.compile(r"(/dev/disk/by-id/[^/\s]+|(UUID|LABEL)=[^/\s]+)\Z")
_OPTIONS = "noatime,nosuid,nodev"
_TIMEOUT_SECONDS = 20

Run = Callable[[Sequence[str]], str]


class MountError(Exception):
    """The device can't be mounted; the message reads after "couldn't"."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo: what is mounted, with the options of mount and super block."""

    source: str
    filesystem: str
    options: frozenset[str]

    @property
    def read_only(self) -> bool:
        return "ro" in self.options


def find_mount(point: Path, mountinfo: str) -> Mount | None:
    """The topmost mount exactly at ``point``; None when it is a plain folder."""
    wanted = os.path.realpath(point)
    found = None
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if "-" not in fields or _unescape(fields[4]) != wanted:
            continue
        rest = fields[fields.index("-", 6) + 1 :]
        options = frozenset(fields[5].split(",")) | frozenset(rest[2].split(","))
        found = Mount(_unescape(rest[1]), rest[0], options)
    return found


def read_mountinfo() -> str:
    """The mounts that this process sees."""
    return Path("/proc/self/mountinfo").read_text()


def check_device_name(device: str | None) -> None:
    """Raise ConfigError for a name such as /dev/nvme0n1, which may be another disk tomorrow."""
    if device is not None and not _STABLE.match(device):
        raise ConfigError(
            f"node.cache.device is {device!r}, a name that may change with the next boot; use "
            "/dev/disk/by-id/..., UUID=... or LABEL=..."
        )


def mount_device(device: str, point: Path, run: Run | None = None) -> str:
    """Mount a device that holds a file system at an empty folder; a text for the log.

    Raises MountError, with the reason, in every other case.
    """
    check_device_name(device)
    run = run or run_command
    if not point.is_dir():
        raise MountError(f"mount {device}: {point} is no folder")
    if any(point.iterdir()):
        raise MountError(f"mount {device}: {point} is not empty, so files there would be hidden")
    path = run(["findfs", device]).strip() if "=" in device else device
    try:
        if not stat.S_ISBLK(Path(path).stat().st_mode):
            raise MountError(f"mount {device}: {path or 'it'} is no block device")
    except OSError as error:
        raise MountError(f"mount {device}: {error.strerror}") from error
    # -p reads the device itself, not what blkid remembers of it; it opens it read-only.
    found = dict(
        line.split("=", 1)
        for line in run(["blkid", "-p", "-o", "export", path]).splitlines()
        if "=" in line
    )
    if found.get("USAGE") != "filesystem":
        holds = found.get("TYPE") or "nothing that blkid knows"
        raise MountError(
            f"mount {device}: it holds {holds}, no file system, and crater never formats"
        )
    run(["mount", "-o", _OPTIONS, path, str(point)])
    return f"mounted {device} ({path}, {found.get('TYPE')}) at {point}"


def run_command(command: Sequence[str]) -> str:
    """Output of a command; raises MountError when it fails or takes too long."""
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, env=environment
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise MountError(f"run {command[0]}: {error}") from error
    if done.returncode and command[0] != "blkid":  # blkid says "nothing found" with a code
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise MountError(f"run {' '.join(command)}: {reason}")
    return done.stdout


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)
