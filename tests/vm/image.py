# SPDX-License-Identifier: Apache-2.0
"""Builds what a guest boots from: one kernel for all, and one root image for each Slurm release.

Each is a part of the bed's cache; see parts.py for how those are named, built and kept.

    python3 -m tests.vm.image [RELEASE ...]     builds ahead of a test run
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .emulator import emulator
from .errors import BedUnavailableError
from .parts import LEFT_OUT, Cache, debootstrap, default_cache, run

GUEST_FILES = Path(__file__).with_name("guest_files")
GUEST_HOME = "/usr/local/lib/crater-vm"
"""Where the image holds what the guest itself runs: its init and its command agent."""

SUITE_OF_RELEASE = {"24.11": "trixie", "26.05": "forky"}
"""The Slurm releases that are tested, and the Debian suite that carries each."""

KERNEL_SUITE = "trixie"
"""One kernel under both releases, so that a difference between them is a difference of Slurm."""

KERNEL_PACKAGES = ("initramfs-tools", "linux-image-amd64", "zstd")
INITRD_MODULES = ("virtio_pci", "virtio_blk", "ext4")
"""All that the initrd needs to find its root: a general initrd is six times as long to unpack."""

SLURM_PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "munge", "slurm-wlm-basic-plugins"),
    *("lua-posix", "lua-socket"),
)
TOOL_PACKAGES = (
    *("python3", "numactl", "nvme-cli", "xfsprogs", "util-linux", "kmod", "iproute2"),
    *("pciutils", "procps", "mount", "hwloc-nox", "fio", "dmsetup"),
)
RDMA_PACKAGES = ("ibverbs-providers", "python3-pyverbs")
"""For the copies between nodes over soft-RoCE; the kernel module is in Debian's general kernel."""

DAEMON_PACKAGES = (
    *("python3-yaml", "python3-click", "python3-pydantic", "python3-psutil", "python3-jinja2"),
    *("python3-sqlalchemy", "python3-rich", "python3-prometheus-client", "python3-numpy"),
)
"""What the project's own daemons import; the guest runs them with its own interpreter."""

ROOT_PACKAGES = SLURM_PACKAGES + TOOL_PACKAGES + RDMA_PACKAGES + DAEMON_PACKAGES

USERS = ("alice", "bob")
"""Real users with real shells: Slurm treats a user with a nologin shell in its own way."""

IMAGE_SIZE = "3G"
NVME_SIZE_BYTES = 4 << 30

TOOLS = {
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "setpriv": "util-linux",
}
"""The host's commands that are needed, and the Debian package of each."""


@dataclasses.dataclass(frozen=True)
class Image:
    """The files that one guest boots from; all are only read."""

    release: str
    kernel: Path
    initrd: Path
    root: Path
    nvme: Path
    """An empty drive; every NVMe drive of every guest is a throwaway overlay of it."""

    emulator: tuple[str, ...] = ("qemu-system-x86_64",)
    """The command that runs QEMU."""


def require_tools() -> None:
    """Raise BedUnavailableError unless this machine has all that images and guests need."""
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin"
    missing = sorted(
        package for tool, package in TOOLS.items() if not shutil.which(tool, path=path)
    )
    if missing:
        raise BedUnavailableError(
            "not installed: apt-get install --no-install-recommends " + " ".join(missing)
        )
    if os.geteuid() != 0:
        raise BedUnavailableError("guest images are made as root: files in them belong to others")


def build_image(release: str, cache: Cache | None = None) -> Image:
    """Return the image of a Slurm release, from the cache where its recipe is there already.

    Raises BedUnavailableError with the reason where it cannot be had.
    """
    require_tools()
    cache = cache or default_cache()
    kernel_recipe = {
        "suite": KERNEL_SUITE,
        "packages": KERNEL_PACKAGES,
        "initrd_modules": INITRD_MODULES,
    }
    kernel = cache.part("kernel", kernel_recipe, _build_kernel)
    guest_files = {
        name: (GUEST_FILES / name).read_text("utf-8") for name in ("init.sh", "agent.py")
    }
    root_recipe = {
        "suite": SUITE_OF_RELEASE[release],
        "packages": ROOT_PACKAGES,
        "left_out": LEFT_OUT,
        "users": USERS,
        "size": IMAGE_SIZE,
        "guest_files": guest_files,
        "kernel": kernel.name,
    }
    root = cache.part(
        f"slurm-{release}",
        root_recipe,
        lambda folder: _build_root(folder, release, kernel, guest_files),
    )
    nvme = cache.part("nvme", {"size": NVME_SIZE_BYTES}, _build_nvme)
    return Image(
        release,
        kernel=kernel / "vmlinuz",
        initrd=kernel / "initrd",
        root=root / "root.img",
        nvme=nvme / "empty.img",
        emulator=emulator(cache),
    )


def _build_kernel(folder: Path) -> None:
    """Lay vmlinuz, initrd and the tree of modules in `folder`."""
    tree = folder / "tree"
    settings = tree / "etc/initramfs-tools/conf.d/crater-vm"
    modules = tree / "usr/share/initramfs-tools/modules.d/crater-vm"
    before_kernel = (
        f"mkdir -p {settings.parent} {modules.parent}"
        f" && echo MODULES=list > {settings}"
        f" && printf '%s\\n' {' '.join(INITRD_MODULES)} > {modules}"
    )
    debootstrap(KERNEL_SUITE, KERNEL_PACKAGES, tree, [f"--essential-hook={before_kernel}"])
    for name, pattern in {"vmlinuz": "vmlinuz-*", "initrd": "initrd.img-*"}.items():
        (found,) = (tree / "boot").glob(pattern)
        found.rename(folder / name)
    (tree / "usr/lib/modules").rename(folder / "modules")
    subprocess.run(["rm", "-rf", "--one-file-system", "--", tree], check=True)


def _build_root(folder: Path, release: str, kernel: Path, guest_files: dict[str, str]) -> None:
    """Lay root.img in `folder`: Debian with Slurm, the kernel's modules, and the command agent."""
    tree = folder / "tree"
    users = " && ".join(f'chroot "$1" useradd -m -s /bin/bash {name}' for name in USERS)
    debootstrap(SUITE_OF_RELEASE[release], ROOT_PACKAGES, tree, [f"--customize-hook={users}"])
    _check_release(tree, release)
    shutil.copytree(kernel / "modules", tree / "usr/lib/modules", symlinks=True, dirs_exist_ok=True)
    home = tree / GUEST_HOME.lstrip("/")
    home.mkdir(parents=True)
    for name, text in guest_files.items():
        (home / name).write_text(text, encoding="utf-8")
        (home / name).chmod(0o755)
    run(["mke2fs", "-q", "-F", "-t", "ext4", "-d", tree, folder / "root.img", IMAGE_SIZE])
    subprocess.run(["rm", "-rf", "--one-file-system", "--", tree], check=True)


def _build_nvme(folder: Path) -> None:
    with open(folder / "empty.img", "wb") as drive:
        drive.truncate(NVME_SIZE_BYTES)


def _check_release(tree: Path, release: str) -> None:
    """A suite under development moves on; say so here and not in a test that reads oddly."""
    query: list[str | Path] = ["chroot", tree, "dpkg-query", "-W", "-f", "${Version}", "slurmd"]
    version = subprocess.run(query, check=True, capture_output=True, text=True).stdout
    if not version.startswith(f"{release}."):
        raise BedUnavailableError(
            f"Debian's {SUITE_OF_RELEASE[release]} carries Slurm {version} now, not {release}"
        )


def main(releases: Sequence[str]) -> int:
    """Build the images of the releases named, or of all."""
    for release in releases or list(SUITE_OF_RELEASE):
        begin = time.monotonic()
        try:
            image = build_image(release)
        except BedUnavailableError as error:
            print(f"image: couldn't build {release}: {error}", file=sys.stderr)
            return 1
        print(f"{release}: {image.root} ({time.monotonic() - begin:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
