# SPDX-License-Identifier: Apache-2.0
"""The QEMU that guests run in: this machine's own where it is sound, else that of a later Debian.

Before 8.1 one virtual CPU could go on with code that another one was just overwriting. A kernel
overwrites its own code all the time - for the first memory cgroup, the first device filter - and
such a guest now and then panics with `Oops: int3`, wherever it is. So an older QEMU is not used:
the bed keeps a newer one, which runs from its own folder with the libraries that lie beside it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from .parts import LEFT_OUT, Cache, debootstrap

PROGRAM = "qemu-system-x86_64"
SOUND_VERSION = (8, 1)
SUITE = "trixie"
PACKAGES = ("qemu-system-x86", "seabios")


def emulator(cache: Cache) -> tuple[str, ...]:
    """Return the command that runs QEMU; its arguments follow. May build a part of the cache."""
    if version_of(_own_version()) >= SOUND_VERSION:
        return (PROGRAM,)
    recipe = {"suite": SUITE, "packages": PACKAGES, "left_out": LEFT_OUT}
    return command_in(
        cache.part("qemu", recipe, lambda folder: debootstrap(SUITE, PACKAGES, folder / "tree"))
        / "tree"
    )


def version_of(text: str) -> tuple[int, ...]:
    """Return the version in what `--version` prints, () where there is none."""
    found = re.search(r"version (\d+)\.(\d+)", text)
    return tuple(int(part) for part in found.groups()) if found else ()


def command_in(tree: Path) -> tuple[str, ...]:
    """Return the command that runs the QEMU of a Debian tree outside of it."""
    libraries = tree / "usr/lib/x86_64-linux-gnu"
    return (
        *("env", f"QEMU_MODULE_DIR={libraries}/qemu"),
        *(f"{tree}/usr/lib64/ld-linux-x86-64.so.2", "--library-path", str(libraries)),
        f"{tree}/usr/bin/{PROGRAM}",
        *("-L", f"{tree}/usr/share/qemu", "-L", f"{tree}/usr/share/seabios"),
    )


def _own_version() -> str:
    try:
        done = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout
