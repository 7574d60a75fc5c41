# SPDX-License-Identifier: Apache-2.0
"""What the bed builds once and keeps: parts, each named by its recipe, and Debian trees in them.

Each part is made from a recipe that is data. The recipe's hash is in the part's name, so a part is
never stale: whoever changes a package list or a guest script gets a new part at the next run, and
the old one is dropped. A part appears under its name only when it is whole; two test runs at once
wait for each other. Nothing here is downloaded but Debian packages, from the mirror of apt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import BedUnavailableError
from .mirror import debian_mirror, proxy_options

LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")
"""What no tree of the bed needs."""


@dataclasses.dataclass(frozen=True)
class Cache:
    """The folder of finished parts, each `KIND-HASH`."""

    folder: Path

    def part(self, kind: str, recipe: dict[str, Any], build: Callable[[Path], None]) -> Path:
        """Return the part of that kind and recipe, built by `build(folder)` if it is not there."""
        finished = self.folder / f"{kind}-{recipe_hash(recipe)}"
        if finished.exists():
            return finished
        with self._lock():
            if finished.exists():
                return finished
            self._drop(f"{kind}-*")
            growing = self.folder / f"growing-{kind}"
            growing.mkdir()
            try:
                build(growing)
                growing.rename(finished)
            finally:
                self._drop(growing.name)
        return finished

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Let one process build at a time; the leavings of one that was killed are swept first."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._drop("growing-*")
            yield

    def _drop(self, pattern: str) -> None:
        """Remove parts, but never cross into a file system that a killed build left mounted."""
        for path in self.folder.glob(pattern):
            subprocess.run(["rm", "-rf", "--one-file-system", "--", path], check=False)


def recipe_hash(recipe: dict[str, Any]) -> str:
    """Return 12 hex digits that change with anything in the recipe."""
    text = json.dumps(recipe, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def default_cache() -> Cache:
    """Return the cache at $CRATER_VM_CACHE, else under /var/cache."""
    return Cache(Path(os.environ.get("CRATER_VM_CACHE") or "/var/cache/crater-vm"))


def debootstrap(suite: str, packages: Sequence[str], tree: Path, hooks: Sequence[str] = ()) -> None:
    """Install Debian packages into a new folder.

    A suite under development may have a Release file past its date; its signature is still
    verified, only its age is not.
    """
    apt_options = [
        'Acquire::Check-Valid-Until "false"',
        'APT::Install-Recommends "false"',
        *proxy_options(),
    ]
    run(
        [
            *("mmdebstrap", "--variant=minbase", "--mode=root"),
            "--include=" + ",".join(packages),
            *(f"--aptopt={option}" for option in apt_options),
            *(f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT),
            *hooks,
            *(suite, tree, debian_mirror()),
        ]
    )


def run(command: Sequence[str | Path]) -> None:
    """Run a building command with low priority; its output is shown only where it failed."""
    environment = os.environ | {
        "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin",
        "LC_ALL": "C.UTF-8",
    }
    done = subprocess.run(
        ["nice", "-n", "5", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        last = "\n    ".join(done.stdout.splitlines()[-15:])
        raise BedUnavailableError(f"{command[0]} failed with {done.returncode}:\n    {last}")
