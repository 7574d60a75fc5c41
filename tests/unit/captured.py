"""Captured machines: unpacks /sys and /proc from tarballs that others made."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
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
    made: set[str] = set()
    # In memory as a whole: a compressed file that is read here and there takes twice as long.
    with tarfile.open(fileobj=io.BytesIO(_plain(source))) as tar:
        for member in tar:
            name = "/" + os.path.normpath(member.name)
            if ".." in name.split("/") or member.name.startswith("/") or NOISE.search(name):
                continue
            target = f"{folder}{name}"
            if member.issym() and not member.linkname.startswith("/"):
                links.append((target, member.linkname))
            elif member.isdir():
                _make(target, made)
            elif (member.isfile() or member.islnk()) and (data := tar.extractfile(member)):
                _make(os.path.dirname(target), made)
                with open(target, "wb") as file:
                    file.write(data.read())
    for target, to in links:
        _make(os.path.dirname(target), made)
        if not os.path.lexists(target):
            os.symlink(to, target)


def _plain(source: Path) -> bytes:
    opened = {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}.get(source.suffix, open)
    with opened(source, "rb") as file:
        return bytes(file.read())


def _make(folder: str, made: set[str]) -> None:
    if folder not in made:
        os.makedirs(folder, exist_ok=True)
        made.add(folder)
