"""Lightning's checkpoints through crater: ``Trainer(plugins=[CraterCheckpointIO()])``.

Lightning names files; crater keeps steps. So the state goes into the ring as step ``global_step``,
and the file that Lightning asked for becomes a short text that names it. Lightning finds, links
and removes those files as its own; how many checkpoints stay is crater's rule (checkpoint-keep).
Files that torch.save wrote are still read.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

try:
    from lightning.fabric.plugins.io import TorchCheckpointIO
except ImportError:
    from lightning_fabric.plugins.io import TorchCheckpointIO

from crater_slurm.job import checkpoint
from crater_slurm.job.saving import CheckpointError

__all__ = ["CraterCheckpointIO"]

_KIND = "crater checkpoint"
_LONGEST = 4096


class CraterCheckpointIO(TorchCheckpointIO):
    """Saves by crater and leaves a pointer where Lightning wants a file."""

    def __init__(self, name: str = "lightning") -> None:
        super().__init__()
        self.name = name

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Save a state; Lightning calls this on one rank, as the others have the same."""
        step = int(checkpoint.get("global_step", 0))
        _save(checkpoint, step, self.name)
        _point(os.fspath(path), {"kind": _KIND, "name": self.name, "step": step})

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state that a file names, or holds itself; raises CheckpointError."""
        pointer = _read(os.fspath(path))
        if pointer is None:
            state: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
            return state
        location = args[0] if args else kwargs.get("map_location")
        # Lightning wants functions and devices alike; crater takes what torch's ``to`` does.
        return _load(pointer, None if callable(location) else location)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove Lightning's file; the step itself stays as long as crater's rules say."""
        if _read(os.fspath(path)) is None:
            super().remove_checkpoint(path)
        else:
            os.unlink(path)

    def teardown(self) -> None:
        """Training is over: wait until all is on disk."""
        checkpoint.wait()


def _save(state: dict[str, Any], step: int, name: str) -> None:
    checkpoint.save(state, step, name=name, only_rank=_own_rank())


def _own_rank() -> int:
    from crater_slurm.job import session

    return session.current().ranks()[0]


def _load(pointer: dict[str, Any], location: Any) -> dict[str, Any]:
    loaded = checkpoint.load(int(pointer["step"]), name=pointer["name"], map_location=location)
    if loaded is None:
        raise CheckpointError(
            f"The checkpoint {pointer['name']} {pointer['step']} that Lightning's file names is "
            "neither in the node's cache nor at the job's destination any more."
        )
    state: dict[str, Any] = loaded.state
    return state


def _point(path: str, pointer: dict[str, Any]) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(pointer, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _read(path: str) -> dict[str, Any] | None:
    """What a pointer says; None for any other file."""
    with contextlib.suppress(OSError, ValueError):
        if os.path.getsize(path) <= _LONGEST:
            with open(path, encoding="utf-8") as file:
                pointer = json.load(file)
            if isinstance(pointer, dict) and pointer.get("kind") == _KIND:
                return pointer
    return None
