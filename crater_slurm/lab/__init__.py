"""A throwaway real Slurm on this machine, for trying a policy before it reaches production.

``Lab`` is all that other code needs. It is loaded on first use, because pid 1 of every lab
imports this package too and needs nothing but the standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crater_slurm.lab.lab import Lab as Lab
    from crater_slurm.lab.spec import LabSpec as LabSpec

__all__ = ["Lab", "LabSpec"]


def __getattr__(name: str) -> Any:
    if name == "Lab":
        from crater_slurm.lab.lab import Lab

        return Lab
    if name == "LabSpec":
        from crater_slurm.lab.spec import LabSpec

        return LabSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
