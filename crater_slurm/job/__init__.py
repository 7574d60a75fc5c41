"""What runs inside users' jobs and on their desks: the standard library alone, torch only on use.

``init`` reads what crater, Slurm and torchrun say of this process and looks whether it is bound as
planned; ``loader_kwargs`` and ``precision`` give torch what the plan says; ``checkpoint`` saves
and loads; ``trace_memory`` says how much GPU memory a step needs. Importing this package loads
nothing but itself: a job that imports it starts as fast as one that doesn't.
"""

from __future__ import annotations

# Type checkers take it as true; typing itself would cost ten times what the rest does.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from crater_slurm.job import checkpoint
    from crater_slurm.job.casting import Precision, precision
    from crater_slurm.job.environment import Environment
    from crater_slurm.job.loader import loader_kwargs
    from crater_slurm.job.memory import MemoryTrace, TraceError
    from crater_slurm.job.saving import CheckpointError
    from crater_slurm.job.start import init
    from crater_slurm.job.trace import trace_memory

__all__ = [
    "CheckpointError", "Environment", "MemoryTrace", "Precision", "TraceError", "checkpoint",
    "init", "loader_kwargs", "precision", "trace_memory",
]  # fmt: skip

#: The module of each name. No module may have the name of a function: importing it would hide that.
_MODULES = {
    "CheckpointError": "saving",
    "Environment": "environment",
    "MemoryTrace": "memory",
    "Precision": "casting",
    "TraceError": "memory",
    "init": "start",
    "loader_kwargs": "loader",
    "precision": "casting",
    "trace_memory": "trace",
}


def __getattr__(name: str) -> object:
    """Load a name's module when it is asked for."""
    from importlib import import_module

    if name == "checkpoint":
        return import_module("crater_slurm.job.checkpoint")
    if name in _MODULES:
        return getattr(import_module(f"crater_slurm.job.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
