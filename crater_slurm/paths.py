"""Finds the files that travel with the package but are no Python: hooks, Lua, templates, samples.

In a source checkout they lie at the top of the tree, where an admin looks for them; the wheel
carries them under ``crater_slurm/share``. Nobody else should know the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from crater_slurm.errors import CraterError

PACKAGE = Path(__file__).resolve().parent
ShareFolder = Literal["job_submit", "prolog", "templates", "etc"]


def share(folder: ShareFolder) -> Path:
    """The folder ``job_submit``, ``prolog``, ``templates`` or ``etc`` of this installation.

    A checkout wins over ``share``: whoever runs from a tree means the files of that tree. Raises
    CraterError when neither is there, which only a broken installation shows.
    """
    candidates = [PACKAGE / "share" / folder]
    if (PACKAGE.parent / "pyproject.toml").is_file():
        candidates.insert(0, PACKAGE.parent / folder)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise CraterError(
        f"the installation lacks its {folder} folder (looked for {candidates[-1]}); "
        "install crater-slurm again"
    )


def hooks() -> Path:
    """The folder of the hooks' Python clients, which must run without this package installed."""
    return PACKAGE / "hooks"
