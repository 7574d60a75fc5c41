# SPDX-License-Identifier: Apache-2.0
"""The library with which a job's owner can try to skip a hook (guest_files/skip_program.c).

The guests have no compiler, so it is compiled here; a machine without one cannot run the tests
that need it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from .errors import BedUnavailableError
from .guest import Guest
from .image import GUEST_FILES

LIBRARY = "/opt/crater-vm/skip_program.so"


def install(guest: Guest, folder: Path) -> str:
    """Compile the library in `folder`, put it into the guest and return its path there.

    A job uses it by LD_PRELOAD=LIBRARY and SKIP_PROGRAM=PART, PART being any part of an argument
    of the programs that it shall skip.
    """
    if not shutil.which("cc"):
        raise BedUnavailableError("no C compiler for the preloaded library: apt-get install gcc")
    built = folder / Path(LIBRARY).name
    source = GUEST_FILES / "skip_program.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", built, source], check=True)
    guest.push([built], str(Path(LIBRARY).parent))
    return LIBRARY
