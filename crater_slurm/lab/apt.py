"""Asks this machine's own apt where Debian's packages come from.

The suites that a lab needs lie next to the one that the machine uses. apt is asked rather than
its files read, because it alone knows all their forms.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from crater_slurm.errors import LabError

MIRROR_VARIABLE = "CRATER_LAB_MIRROR"
_FORMAT = "$(RELEASE)|$(COMPONENT)|$(ORIGIN)|$(REPO_URI)|$(SIGNED_BY)"
_KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/etc/apt/trusted.gpg.d"),
)


def mirror() -> tuple[str, Path | None]:
    """Address of a Debian archive and the keyring that verifies it (None: apt's own).

    ``$CRATER_LAB_MIRROR`` wins. LabError when apt has no Debian archive.
    """
    if chosen := os.environ.get(MIRROR_VARIABLE):
        return chosen, _keyring("")
    try:
        done = subprocess.run(
            ["apt-get", "indextargets", "--format", _FORMAT, "Created-By: Packages"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise LabError(
            "a lab with another Slurm than the machine's is built of Debian's packages, and there "
            f"is no apt to get them with ({error}); leave out --slurm to use the machine's own"
        ) from error
    return archive_of(done.stdout)


def archive_of(targets: str) -> tuple[str, Path | None]:
    """Archive among lines ``RELEASE|COMPONENT|ORIGIN|ADDRESS|SIGNED_BY``.

    Only an archive with a whole suite counts: security and update suites may be served by
    archives that carry nothing else.
    """
    for line in targets.splitlines():
        release, component, origin, address, signed_by = (*line.split("|"), "", "", "", "", "")[:5]
        if component == "main" and origin == "Debian" and "-" not in release and address:
            return address.rstrip("/"), _keyring(signed_by)
    raise LabError(
        "apt on this machine has no Debian archive to take Slurm from; set "
        f"{MIRROR_VARIABLE} to the address of one, or leave out --slurm"
    )


def _keyring(signed_by: str) -> Path | None:
    named = Path(signed_by.split(",")[0].strip()) if signed_by.startswith("/") else None
    for candidate in (named, *_KEYRINGS):
        if candidate and candidate.exists():
            return candidate
    return None


def proxies() -> list[str]:
    """apt's proxy settings, which mmdebstrap does not take over."""
    done = subprocess.run(
        ["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=False
    )
    return [
        line
        for line in done.stdout.splitlines()
        if re.match(r"^Acquire::(http|https|ftp)::Proxy\b", line)
    ]
