"""Project quota of XFS and ext4: a number on a folder, and a limit for all files of that number.

The kernel counts and enforces; a job that writes past its limit gets ENOSPC. Done by ioctl and
quotactl(2), since the tools for it (xfs_quota) are not everywhere. The number is no secret and no
border: who owns a file may change its number, so what counts is looked at by accounting as well.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.node.mounts import Mount

# struct fsxattr: xflags, extsize, nextents, projid, cowextsize, padding (linux/fs.h)
_FSXATTR = struct.Struct("=5I8x")
_FS_IOC_FSGETXATTR, _FS_IOC_FSSETXATTR = 0x801C581F, 0x401C5820
_PROJINHERIT = 0x200

# struct fs_disk_quota (linux/dqblk_xfs.h); sizes in blocks of 512 bytes.
_DQUOT = struct.Struct("=bbHI6QiiHHbbbb3QiHh8x")
_Q_XGETQUOTA, _Q_XSETQLIM = (ord("X") << 8) + 3, (ord("X") << 8) + 4
_PRJQUOTA = 2
_VERSION, _PROJECT, _BLOCK_HARD, _BLOCK_SOFT = 1, 2, 1 << 3, 1 << 2
_BLOCK = 512

#: Options that say that limits hold; pqnoenforce only counts.
_ENFORCED = frozenset({"prjquota", "pquota"})


@dataclass(frozen=True, slots=True)
class Held:
    """What a project holds and may hold; ``limit_bytes`` 0 is no limit."""

    used_bytes: int
    files: int
    limit_bytes: int

    @property
    def unused(self) -> bool:
        """Nobody has files or a limit under this number."""
        return not (self.used_bytes or self.files or self.limit_bytes)


def is_enforced(mount: Mount | None) -> bool:
    """Whether a mount holds projects to their limits, by its options."""
    return mount is not None and bool(mount.options & _ENFORCED)


def tag(fd: int, project: int) -> None:
    """Give an open folder a project, which whatever is made in it inherits. Raises OSError."""
    before = bytearray(_FSXATTR.size)
    fcntl.ioctl(fd, _FS_IOC_FSGETXATTR, before)
    flags, extent, count, _, copy = _FSXATTR.unpack(before)
    wanted = flags | _PROJINHERIT if project else flags & ~_PROJINHERIT
    fcntl.ioctl(fd, _FS_IOC_FSSETXATTR, _FSXATTR.pack(wanted, extent, count, project, copy))


def project_of(fd: int) -> int:
    """Project of an open file or folder. Raises OSError."""
    found = bytearray(_FSXATTR.size)
    fcntl.ioctl(fd, _FS_IOC_FSGETXATTR, found)
    return int(_FSXATTR.unpack(found)[3])


def device_of(mount: Mount, number: int) -> str:
    """The device file of a mounted file system, which quotactl wants; ``number`` is its st_dev.

    Raises OSError when there is none of that number.
    """
    for path in (mount.source, f"/dev/block/{os.major(number)}:{os.minor(number)}"):
        try:
            status = Path(path).stat()
        except OSError:
            continue
        if stat.S_ISBLK(status.st_mode) and status.st_rdev == number:
            return path
    raise FileNotFoundError(errno.ENOENT, f"no device file of {mount.source}")


def held(device: str, project: int) -> Held:
    """What a project holds; nothing for one that the file system has never met. Raises OSError."""
    buffer = ctypes.create_string_buffer(_DQUOT.size)
    try:
        _quotactl(_Q_XGETQUOTA, device, project, buffer)
    except FileNotFoundError:
        return Held(0, 0, 0)
    _, _, _, _, hard, _, _, _, blocks, inodes, *_ = _DQUOT.unpack(buffer.raw)
    return Held(blocks * _BLOCK, inodes, hard * _BLOCK)


def limit(device: str, project: int, limit_bytes: int) -> None:
    """Hold a project to so many bytes, 0 to none. Raises OSError."""
    blocks = -(-limit_bytes // _BLOCK)
    mask = _BLOCK_HARD | _BLOCK_SOFT
    head = (_VERSION, _PROJECT, mask, project, blocks, 0)
    rest = [0] * (len(_DQUOT.unpack(bytes(_DQUOT.size))) - len(head))
    _quotactl(_Q_XSETQLIM, device, project, ctypes.create_string_buffer(_DQUOT.pack(*head, *rest)))


def _quotactl(command: int, device: str, project: int, data: ctypes.Array[ctypes.c_char]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_int32((command << 8) | _PRJQUOTA)
    # The id is an int in C; high numbers come as negative ones.
    if libc.quotactl(number, os.fsencode(device), ctypes.c_int32(project), data):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), device)
