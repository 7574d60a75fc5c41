"""What runs inside users' jobs and on their desks: the standard library alone, torch only on use.

``trace_memory`` runs one training step without a GPU and without memory for its tensors, and says
how much a GPU would have needed. Importing this package loads nothing but itself: a job that
imports it starts as fast as one that doesn't.
"""

from __future__ import annotations

# Type checkers take it as true; typing itself would cost ten times what the rest does.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from crater_slurm.job.memory import MemoryTrace, TraceError
    from crater_slurm.job.trace import trace_memory

__all__ = ["MemoryTrace", "TraceError", "trace_memory"]


def __getattr__(name: str) -> object:
    """Load a name's module when it is asked for."""
    if name == "trace_memory":
        from crater_slurm.job.trace import trace_memory

        return trace_memory
    if name in __all__:
        from crater_slurm.job import memory

        return getattr(memory, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
