"""Disks that fail for real: a full one, one whose blocks can't be written, one that goes away.

The kernel's own errors, no injected ones: a small tmpfs, and ext4 on a loop device whose file is
sealed against writing, so that the block device answers with EIO. (A kernel with device-mapper
would have dm-error for that.) Mounts are this test's own and go with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{command[0]} is not possible here: {done.stderr.strip()[:200]}")
    return done.stdout.strip()


class Disk:
    """A file system at ``path`` that a test breaks and mends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.path)], check=True)

    def vanish(self) -> None:
        """Out of the tree, though whoever has files open there keeps them."""
        subprocess.run(["umount", "-l", str(self.path)], check=True)


@contextlib.contextmanager
def tmpfs(path: Path, size: str) -> Iterator[Disk]:
    path.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "none", str(path))
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)


class BlockDisk(Disk):
    """ext4 without a journal, which would end it at the first error, on a loop device."""

    def __init__(self, path: Path, memory: int) -> None:
        super().__init__(path)
        self._memory = memory

    def break_for_good(self) -> None:
        """From now on the device can be read, and answers each write with EIO."""
        os.sync()
        fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

    def replace(self) -> None:
        """Another, empty disk in its place."""
        self.vanish()
        _run("mount", "-t", "tmpfs", "-o", "size=64m,mode=755", "none", str(self.path))


@contextlib.contextmanager
def block_disk(path: Path) -> Iterator[BlockDisk]:
    memory = os.memfd_create("disk", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 128 << 20)
    image = f"/proc/{os.getpid()}/fd/{memory}"
    path.mkdir()
    device = ""
    try:
        _run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", image)
        device = _run("losetup", "--find", "--show", image)
        _run("mount", "-o", "errors=continue", device, str(path))
        yield BlockDisk(path, memory)
    finally:
        subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)
        if device:
            subprocess.run(["losetup", "-d", device], capture_output=True, check=False)
        os.close(memory)
