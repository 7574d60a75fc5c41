"""The settings of the running command, loaded when they are first needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from crater_slurm.config import Loaded


def loaded() -> Loaded:
    """Settings by ``crater --config``, ``CRATER_CONFIG`` or the default file; read once."""
    root = click.get_current_context().find_root()
    if root.obj is None:
        from crater_slurm.config import load

        root.obj = load(root.meta.get("crater.config"))
    result: Loaded = root.obj
    return result
