# SPDX-License-Identifier: Apache-2.0
"""Finds the Debian mirror that this machine's own apt uses.

The guests are made of Debian suites that the machine itself may not run, so apt cannot be asked
for their packages; but wherever its own suite comes from, the other suites lie next to it. apt is
asked for its sources rather than the files being read, because it alone knows all their formats
(one line, deb822, options, fragments).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from .errors import BedUnavailableError

MIRROR_VARIABLE = "CRATER_VM_MIRROR"
_FORMAT = "$(RELEASE) $(COMPONENT) $(REPO_URI)"


def debian_mirror() -> str:
    """Return the address of the mirror: $CRATER_VM_MIRROR, else where apt has its main suite from.

    Raises BedUnavailableError when this machine's apt has no Debian archive configured.
    """
    if chosen := os.environ.get(MIRROR_VARIABLE):
        return chosen
    try:
        targets = _output(["apt-get", "indextargets", "--format", _FORMAT, "Created-By: Packages"])
        release = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError as error:
        raise BedUnavailableError(f"no apt to take a mirror from: {error}") from error
    return mirror_of_suite(codename(release), targets.splitlines())


def codename(os_release: str) -> str:
    """Return VERSION_CODENAME of an os-release text, '' where it has none."""
    found = re.search(r'^VERSION_CODENAME="?([^"\n]*)', os_release, re.MULTILINE)
    return found.group(1) if found else ""


def mirror_of_suite(suite: str, targets: Iterable[str]) -> str:
    """Return the address that serves `suite`/main among lines of 'RELEASE COMPONENT ADDRESS'.

    Only the suite's own name counts: `SUITE-security` and `SUITE-updates` may be served by archives
    that carry no full suite, and other vendors' repositories carry none of Debian's.
    """
    for line in targets:
        release, component, address = line.split(maxsplit=2)
        if release == suite and component == "main":
            return address.rstrip("/")
    raise BedUnavailableError(
        f"apt on this machine has no source for '{suite or 'its own suite'} main'; "
        f"set {MIRROR_VARIABLE} to the address of a Debian mirror"
    )


def proxy_options(apt_config_dump: str | None = None) -> list[str]:
    """Return the apt options of this machine's proxies, which mmdebstrap does not take over."""
    if apt_config_dump is None:
        apt_config_dump = _output(["apt-config", "dump", "Acquire"])
    wanted = re.compile(r"^Acquire::(http|https|ftp)::Proxy\b")
    return [line for line in apt_config_dump.splitlines() if wanted.match(line)]


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
