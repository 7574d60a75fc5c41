"""Captured machines: unpacks /sys and /proc from tarballs that others made."""

from __future__ import annotations

import os
import re
import tarfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("CRATER_TEST_DATA") or REPOSITORY.parent / "shared/data")

#: Thousands of files that no reader opens.
NOISE = re.compile(
    r"/(memory\d+|power|cpufreq|cpuidle|hugepages|cpuid|msi_irqs|microcode|thermal_throttle"
    r"|firmware_node|config|resource\d*|hwmon)(/|$)"
)


def unpack(source: Path, folder: Path) -> None:
    """Unpack a tarball below ``folder``; absolute paths and links are no part of a captured /sys.

    Links are made when all files are there, so nothing is written through one, and a link that
    leads out of the folder (as in a trimmed /sys) leads nowhere.
    """
    links = []
    with tarfile.open(source) as tar:
        for member in tar:
            name = "/" + os.path.normpath(member.name)
            if ".." in name.split("/") or member.name.startswith("/") or NOISE.search(name):
                continue
            target = folder / name.lstrip("/")
            if member.issym() and not member.linkname.startswith("/"):
                links.append((target, member.linkname))
            elif member.isdir():
                target.mkdir(parents=True, exist_ok=True)
            elif (member.isfile() or member.islnk()) and (data := tar.extractfile(member)):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data.read())
    for target, to in links:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(target):
            target.symlink_to(to)
