"""This node's profile file, as the benchmarks take their machine from it and write into it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import NodeProfile
from crater_slurm.probe.bench.merge import check_same_machine, merged
from crater_slurm.probe.bench.result import Measurement
from crater_slurm.probe.profile import node_name, scan
from crater_slurm.store import profile_file


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """``machine`` is what was scanned now, ``profile`` what the results are put into."""

    path: Path
    machine: NodeProfile
    profile: NodeProfile
    write: bool

    @classmethod
    def open(cls, path: Path, *, write: bool) -> ProfileFile:
        """The file's profile, or a new one of this machine when there is none.

        Raises CraterError when it can't be written later, or is of another machine: before the
        measurement, not after it.
        """
        machine = scan(node_name(), Path("/")).profile
        if not write:
            return cls(path, machine, machine, write=False)
        stored = profile_file.read(path)
        if stored is not None:
            check_same_machine(stored, machine)
        _check_writable(path)
        return cls(path, machine, stored or machine, write=True)

    def put(self, results: Sequence[Measurement], *, matrix: bool) -> tuple[str, ...]:
        """Write what is fit for a profile; the paths that were written.

        The results go into the file as it is then, so that a scan that ran meanwhile is not undone.
        """
        if not self.write or not any(item.for_profile for item in results):
            return ()
        changed: tuple[str, ...] = ()

        def change(stored: NodeProfile | None) -> NodeProfile:
            nonlocal changed
            profile = stored or self.profile
            check_same_machine(profile, self.machine)
            if [n.name for n in profile.nvmes] != [n.name for n in self.profile.nvmes]:
                raise CraterError(f"{self.path} has got other drives meanwhile; measure again")
            profile, changed = merged(profile, results, matrix=matrix)
            return profile

        profile_file.update(self.path, change)
        return changed


def _check_writable(path: Path) -> None:
    """CraterError unless the file can be replaced, which takes its folder."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise CraterError(f"can't make the folder {path.parent}: {error.strerror}") from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise CraterError(
            f"can't write {path} (node.profile); run as root, or measure with --no-write"
        )
