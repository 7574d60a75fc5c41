"""Checkpoints for training scripts: save without waiting for a disk, load the newest whole one.

    from crater_slurm.job import checkpoint

    loaded = checkpoint.load()
    checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step)

``save`` copies the state into memory that the node's worker writes to disk, and returns. Without
a worker it writes the same files itself. Needs the standard library alone; torch and numpy are
used where the script has loaded them.
"""

from __future__ import annotations

import sys
import threading

from crater_slurm.job import loading, session, stop
from crater_slurm.job.loading import Loaded
from crater_slurm.job.saving import CheckpointError, Saving, tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "CheckpointError", "Loaded", "Saving", "due", "load", "prepare", "requeue", "save",
    "should_stop", "steps", "wait",
]  # fmt: skip


def save(
    state: Any,
    step: int,
    *,
    name: str = "step",
    only_rank: int | None = None,
    wait: bool = False,
    strict: bool = True,
) -> Saving:
    """Save a state: nested dicts, lists and tuples of tensors, arrays and plain values.

    Every rank calls it, at the same step. ``only_rank``: that rank saves, the others return at
    once. When it returns, the state may change. ``wait``: return when it is on disk. Raises
    CheckpointError for a state that can't be saved and where nothing can be written at all;
    ``strict=False`` makes a line on stderr of the latter.
    """
    try:
        saving = session.current().save(state, step, name, only_rank)
    except CheckpointError as error:
        if strict or error.__cause__ is not None:
            raise
        tell(str(error))
        saving = Saving(step, name, "none")
        saving.finish(str(error))
    stop.saved()
    if wait:
        saving.wait()
    return saving


def load(
    step: int | None = None,
    *,
    name: str = "step",
    ranks: int | list[int] | str | None = None,
    map_location: Any = None,
    mmap: bool = False,
    verify: bool = True,
    trust: bool = False,
) -> Loaded | None:
    """The newest whole checkpoint, or that of ``step``; None where there is none.

    Where torch.distributed runs, every rank calls it and all get the same step. ``ranks``: a list
    of ranks, or "all", to get a dict of their states instead of this rank's own. Tensors come on
    the CPU unless ``map_location`` says otherwise. ``mmap``: pages are read as they are used.
    ``verify=False`` compares no checksums. ``trust``: also read files of another user's, which can
    run code. Raises CheckpointError where one is there and can't be used.
    """
    chosen: tuple[int, ...] | None = None
    if isinstance(ranks, int):
        chosen = (ranks,)
    elif ranks is not None:
        chosen = () if ranks == "all" else tuple(int(rank) for rank in ranks)
    wish = loading.Wish(
        name=name, step=step, ranks=chosen, map_location=map_location, mmap=mmap, verify=verify,
        trust=trust,
    )  # fmt: skip
    return loading.load(session.current(), wish)


def prepare(state_or_bytes: Any, *, slots: int = 1, wait: bool = False) -> None:
    """Open the lane and touch its memory in the background, so that the first save is as fast as
    the others. Takes a state like the one to be saved, or its bytes; ``slots``: how many of them
    the lane shall hold."""
    current = session.current()
    current.slots = max(1, slots)
    if isinstance(state_or_bytes, int):
        size = state_or_bytes
    else:
        size = current.packer.pack(state_or_bytes, {}).size
    thread = threading.Thread(
        target=current.prepare, args=(size,), daemon=True, name="crater-prepare"
    )
    thread.start()
    if wait:
        thread.join()


def steps(name: str = "step") -> list[int]:
    """Steps that could be loaded, newest first."""
    return [found.step for found in loading.steps(session.current(), name)]


def wait(timeout: float | None = None) -> bool:
    """Wait for all saves of this rank; whether all of them are on disk."""
    return session.current().wait(timeout)


def due(step: int, every: int | None = None, seconds: float | None = None) -> bool:
    """Whether to save now: at every ``every``-th step, ``seconds`` after the last save, or once
    the job's signal has come. With torch.distributed every rank calls it at every step, and all
    get the same answer."""
    return stop.due(session.current(), step, every, seconds)


def should_stop() -> bool:
    """Whether the job's signal has come: save and leave."""
    return stop.should_stop()


def requeue(reason: str) -> bool:
    """Ask for the job to be put back into the queue; whether it is. The node's daemon asks Slurm,
    so this works in a container too, and it keeps to the site's cap on restarts."""
    answer = session.current().ask({"op": "requeue", "reason": str(reason)[:200]}, "requeued", 30.0)
    if answer is not None and answer.get("ok") is True:
        return True
    why = (answer or {}).get("error") or "there is no checkpoint worker here to ask"
    print(f"crater: the job is not requeued: {why!s:.300}", file=sys.stderr, flush=True)
    return False


if __name__ == "__main__":
    from crater_slurm.job.export import main

    sys.exit(main(sys.argv[1:]))
