"""Finds a Slurm of the wanted release: the machine's own, or a root folder of Debian's packages.

A root is built once, under a name that holds a hash of its recipe, so it is never stale; it
appears only when it is whole. Labs never write into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.errors import LabError
from crater_slurm.lab import apt
from crater_slurm.slurm.client import parse_version

#: Debian suite that carries each release.
SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "munge", "slurm-wlm-basic-plugins"),
    *("lua-posix", "lua-socket", "mount", "python3", "procps", "iproute2"),
)
_UNUSED = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")
_COMMANDS = (
    *("sinfo", "squeue", "scontrol", "sbatch", "srun", "salloc", "scancel", "sacct", "sacctmgr"),
    *("sprio", "sdiag", "munge", "unmunge"),
)
#: Counts up when the way of building changes without a change of the packages.
_RECIPE = 1


@dataclass(frozen=True, slots=True)
class SlurmRoot:
    """Where a Slurm lies (None: in the machine's own root) and its version."""

    folder: Path | None
    version: tuple[int, int]

    @property
    def slurm_user(self) -> str:
        """The user that the packages made for slurmctld, else root."""
        passwd = (self.folder or Path("/")) / "etc/passwd"
        names = [line.split(":")[0] for line in passwd.read_text().splitlines()]
        return "slurm" if "slurm" in names else "root"

    @property
    def slurm_uid(self) -> int:
        passwd = (self.folder or Path("/")) / "etc/passwd"
        for line in passwd.read_text().splitlines():
            if line.split(":")[0] == self.slurm_user:
                return int(line.split(":")[2])
        return 0

    def commands(self) -> list[str]:
        """Client commands of Slurm and MUNGE that are there."""
        top = self.folder or Path("/")
        return [n for n in _COMMANDS if any((top / d / n).exists() for d in ("usr/bin", "bin"))]


def machine_version() -> tuple[int, int] | None:
    """Release of the machine's own Slurm; None without slurmctld, slurmd or munged."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    if not all(shutil.which(name, path=path) for name in ("slurmd", "munged")):
        return None
    slurmctld = shutil.which("slurmctld", path=path)
    if slurmctld is None:
        return None
    done = subprocess.run([slurmctld, "-V"], capture_output=True, text=True, check=False)
    version = parse_version(done.stdout)
    return version if version != (0, 0) else None


def find(release: str | None, say: Callable[[str], None] = lambda _: None) -> SlurmRoot:
    """Slurm of a release such as ``24.11``, built if need be; None takes the machine's own."""
    own = machine_version()
    if release is None:
        if own is None:
            raise LabError(
                "this machine has no slurmctld, slurmd and munged of its own; install them, or "
                f"name a release to build from Debian's packages: {', '.join(SUITES)}"
            )
        return SlurmRoot(None, own)
    if own is not None and "{}.{:02}".format(*own) == release:
        return SlurmRoot(None, own)
    if release not in SUITES:
        known = ", ".join(SUITES)
        raise LabError(f"Debian has no Slurm {release}; a lab can have {known}, or the machine's")
    return SlurmRoot(_root(release, say), parse_version(release))


def cache_folder() -> Path:
    """Where roots are kept: ``$CRATER_LAB_CACHE`` or /var/cache/crater-lab."""
    return Path(os.environ.get("CRATER_LAB_CACHE") or "/var/cache/crater-lab") / "roots"


def _root(release: str, say: Callable[[str], None]) -> Path:
    recipe = json.dumps([_RECIPE, SUITES[release], PACKAGES, _UNUSED])
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    finished = cache_folder() / f"{release}-{digest}"
    if finished.exists():
        return finished
    with _locked(cache_folder()):
        if finished.exists():
            return finished
        for stale in cache_folder().glob(f"{release}-*"):
            if not _in_use(stale):
                shutil.rmtree(stale)
        growing = cache_folder() / f".growing-{release}"
        shutil.rmtree(growing, ignore_errors=True)
        say(f"building Slurm {release} from Debian {SUITES[release]}, once, about half a minute")
        try:
            _build(SUITES[release], growing)
            _check(growing, release)
            growing.rename(finished)
        finally:
            shutil.rmtree(growing, ignore_errors=True)
    return finished


def _check(root: Path, release: str) -> None:
    """LabError when a suite has moved on to another release; testing does so now and then."""
    done = subprocess.run(
        ["chroot", str(root), "slurmctld", "-V"], capture_output=True, text=True, check=False
    )
    if parse_version(done.stdout) != parse_version(release):
        found = done.stdout.strip() or done.stderr.strip()
        raise LabError(f"Debian {SUITES[release]} was to have Slurm {release}, but has {found}")


def _in_use(root: Path) -> bool:
    """Whether a lab is based on it. The lab's mounts are invisible here, its init file is not."""
    from crater_slurm.lab.spec import labs_folder

    return any(str(root) in file.read_text() for file in labs_folder().glob("*/init.json"))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(suite: str, folder: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        raise LabError(
            "a lab with another Slurm than the machine's needs mmdebstrap; install that package, "
            "or leave out --slurm"
        )
    mirror, keyring = apt.mirror()
    # Testing's release file may be out of date on a mirror; its signature is verified all the same.
    options = ['Acquire::Check-Valid-Until "false"', 'APT::Install-Recommends "false"']
    command = ["mmdebstrap", "--mode=root", "--variant=minbase", "--quiet"]
    command += [f"--include={','.join(PACKAGES)}"]
    command += [f"--aptopt={option}" for option in (*options, *apt.proxies())]
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in _UNUSED]
    if keyring:
        command.append(f"--keyring={keyring}")
    done = subprocess.run(
        [*command, suite, str(folder), mirror],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()[-5:]
        raise LabError(f"mmdebstrap could not build Slurm from Debian {suite}: " + "\n".join(said))
