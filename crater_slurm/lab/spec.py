"""What a lab is asked to be, kept in its folder so that any process can talk to it later."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from crater_slurm.errors import LabError

Mode = Literal["observe", "advise", "enforce"]
DEFAULT_NAME = "default"
#: crater-scheduler beside slurmctld, and crater-io-daemon on every node.
DAEMONS = ("scheduler", "node")
#: Slurm takes these in a cluster name, and so does every file system and cgroup.
_NAME = re.compile(r"^[a-z0-9][a-z0-9-]{0,30}$")
#: mount and slurm.conf have their own ideas of commas, colons, spaces and backslashes.
_PATH = re.compile(r"^[A-Za-z0-9_./+@%-]+$")


def labs_folder() -> Path:
    """Folder that holds all labs: ``$CRATER_LAB_DIR`` or /var/lib/crater-lab."""
    folder = Path(os.environ.get("CRATER_LAB_DIR") or "/var/lib/crater-lab").absolute()
    if not _PATH.match(str(folder)):
        raise LabError(
            f"CRATER_LAB_DIR is {str(folder)!r}; a lab's folder may have letters, digits and "
            "_ . / + @ % - only, because mount options and slurm.conf can't quote others"
        )
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSpec:
    """A lab's make.

    ``slurm`` is a release such as 24.11, None for the machine's own. ``controller_only`` starts no
    slurmd: jobs pend, or with ``cloud`` are allocated to nodes that never come. ``daemons`` are
    those of crater's that start by themselves; ``seeded``: the store has the nodes' profiles before
    any probe reports. ``weights``: nodes with few GPUs are taken first. ``accounting``: slurmdbd
    records jobs. ``slurm_conf`` and ``crater_conf`` override single settings of either.
    """

    name: str = DEFAULT_NAME
    inventory: str = "demo"
    slurm: str | None = None
    cgroup: bool = False
    mode: Mode = "enforce"
    crater: bool = True
    daemons: tuple[str, ...] = DAEMONS
    seeded: bool = True
    controller_only: bool = False
    cloud: bool = False
    weights: bool = True
    accounting: bool = False
    cache_mib: int = 256
    slurm_conf: Mapping[str, str] = field(default_factory=dict)
    crater_conf: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise LabError(
                f"{self.name!r} can't name a lab; use up to 31 lower-case letters, digits and '-'"
            )
        if self.cloud and not self.controller_only:
            raise LabError("cloud nodes never come up, so they need a lab without slurmd")

    @property
    def folder(self) -> Path:
        return labs_folder() / self.name

    def save(self, file: Path) -> None:
        """Write the spec as JSON."""
        file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> LabSpec:
        """The spec of an existing lab; LabError when the file is none."""
        try:
            fields = json.loads(file.read_text())
            return cls(**fields | {"daemons": tuple(fields["daemons"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LabError(f"{file} does not describe a lab: {error}") from error
