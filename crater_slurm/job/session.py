"""This process's checkpoints: its place in the job, its folders, its ring, what is being saved.

One session per process, made on first use and again in a forked child. Saving tries the ring,
then a file that the worker takes, then a file of its own in each folder that there is.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import sys
import threading
import time
import warnings

from crater_slurm.job import direct, environment, layout, places, wire
from crater_slurm.job.contact import ask
from crater_slurm.job.copying import Image
from crater_slurm.job.pack import Packer
from crater_slurm.job.ring import Ring
from crater_slurm.job.saving import CheckpointError, Saving, tell
from crater_slurm.job.starts import Starts
from crater_slurm.job.tree import StateError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: After a failed connection the next save does not try again for so long.
RETRY_SECONDS = 30.0
_EXIT_SECONDS = "CRATER_EXIT_SECONDS"
_UNUSABLE = (OSError, ValueError, wire.WireError)


class Session:
    """State of one process. Not for users: ``crater_slurm.job.checkpoint`` is."""

    def __init__(self, env: environment.Environment, folder: str | None = None) -> None:
        self.env = env
        self.began = environment.process_start()
        self.folder = folder or os.environ.get(places.FOLDER) or None
        self.packer = Packer()
        self.starts = Starts()
        self.ring: Ring | None = None
        self.slots = 1
        self.last_saved: float = time.monotonic()
        self.last_step: int | None = None
        self._lock = threading.RLock()
        self._retry_at = 0.0
        self.pending: list[Saving] = []
        self._by_ring: dict[tuple[str, int], Saving] = {}

    # Places

    def ranks(self) -> tuple[int, int]:
        """Rank and world size: torch.distributed's where it runs, else the environment's."""
        torch = sys.modules.get("torch")
        distributed = getattr(torch, "distributed", None)
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return self.env.rank, self.env.world_size

    def folders(self) -> list[str]:
        """Where checkpoints may lie on this node, or in the user's own folder."""
        return places.readable(self.env, self.folder)

    def hello(self) -> dict[str, Any]:
        """What ``open`` says of this rank."""
        rank, world = self.ranks()
        local = min(self.env.local_world_size, world)
        if (rank, world) != (self.env.rank, self.env.world_size) and self.env.world_size == 1:
            local = world
        return {
            "job": self.env.job_id, "run": self.env.run, "rank": rank,
            "local_rank": self.env.local_rank, "world": world, "local_world": local,
            "slots": self.slots, "began": int(self.began * 1000),
        }  # fmt: skip

    # The ring

    def ask(self, message: dict[str, Any], answer: str, seconds: float) -> dict[str, Any] | None:
        """The worker's answer; None where there is no ring, or it does not answer."""
        if self.env.ring is None:
            return None
        try:
            return ask(self.env.ring, self.hello(), message, answer, seconds)
        except _UNUSABLE as error:
            tell(f"no answer to {message['op']!r} from the checkpoint worker: {error}")
            return None

    def open_ring(self, size: int) -> Ring | None:
        """The ring, with a lane for files of this size where the worker gives one; None where
        there is no ring now, or no cache that it would lead to: then it is for questions only."""
        if not self.env.folder:
            return None
        with self._lock:
            wanted = self.slots * (size + size // 64 + (1 << 20))
            ring = self.ring
            if ring is not None and (ring.retired or self._too_small(ring, size)):
                ring.close(0.0 if ring.retired else 60.0)
                ring = self.ring = None
            if ring is None and self.env.ring and time.monotonic() >= self._retry_at:
                try:
                    ring = self.ring = Ring(self.env.ring, self.hello(), wanted)
                    if ring.lane is None:
                        self._retry_at = time.monotonic() + RETRY_SECONDS
                except _UNUSABLE as error:
                    self._retry_at = time.monotonic() + RETRY_SECONDS
                    tell(f"checkpoints are written without the node's worker: couldn't {error}")
            return ring

    def _too_small(self, ring: Ring, size: int) -> bool:
        """Whether a larger lane was not asked for yet, and this one can go; none at all is asked
        for again after some time."""
        if ring.lane is None:
            return time.monotonic() >= self._retry_at
        return size > ring.lane.length and size > ring.wanted and ring.wait(60.0)

    def prepare(self, size: int) -> None:
        """Open the lane and touch its pages."""
        ring = self.open_ring(size)
        if ring is not None:
            with contextlib.suppress(*_UNUSABLE):
                ring.prefault()

    # Saving

    def save(self, state: Any, step: int, name: str, only_rank: int | None) -> Saving:
        """Save; raises CheckpointError, also for a state or a name that can't be."""
        rank, world = self.ranks()
        if only_rank is not None and rank != only_rank:
            saving = Saving(step, name, "none")
            saving.finish()
            return saving
        if only_rank is not None:
            rank, world = 0, 1
        try:
            layout.step_name(step, name)
            metadata = {"step": str(step), "rank": str(rank), "world_size": str(world)}
            image = self.packer.pack(state, metadata)
        except (layout.LayoutError, StateError) as error:
            raise CheckpointError(str(error)) from error
        start = self.starts.name(self.env.start)
        part = direct.Part(
            *(name, step, rank, world, layout.run_name(self.env.run, start), self.env.job_id),
            *(self.env.cluster, self.env.node, self.began),
        )
        with self._lock:
            saving = Saving(step, name)
            self.pending = [s for s in self.pending if not s.done()] + [saving]
            self._put(image, part, start, saving)
        self.last_saved, self.last_step = time.monotonic(), step
        return saving

    def _put(self, image: Image, part: direct.Part, start: str, saving: Saving) -> None:
        ring = self.open_ring(image.size)
        before = self._by_ring.get((part.name, part.step))
        if ring is not None and before is not None:
            # The worker calls a step of this run that it has saved without looking at it.
            before.wait(60.0)
        elif ring is not None:
            self._by_ring[part.name, part.step] = saving
            local = min(self.hello()["local_world"], part.ranks)
            begin = {
                "name": part.name, "step": part.step, "file": layout.file_name(part.rank),
                "rank": part.rank, "ranks": part.ranks, "local": local, "start": start,
            }  # fmt: skip

            def rescue(left: Image, own: bool) -> None:
                self._write(left, part, aside=True, own=own)

            if ring.save(image, begin, saving, rescue):
                return
            saving.how = "direct"
            with contextlib.suppress(OSError):
                if ring.direct(begin, image.size, saving, lambda root: _into(root, part, image)):
                    return
        saving.how = "direct"
        try:
            self._write(image, part, aside=ring is not None)
        except CheckpointError as error:
            saving.finish(str(error))
            raise
        saving.finish()

    def _write(
        self, image: Image, part: direct.Part, *, aside: bool = False, own: bool = False
    ) -> None:
        """Write the file itself; ``own``: not into the cache. Raises CheckpointError."""
        places.write(self.env, self.folder, image, part, aside=aside, past_cache=own)

    # The end

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for all that is being saved; whether all of it is."""
        end = None if timeout is None else time.monotonic() + timeout
        good = True
        for saving in list(self.pending):
            left = None if end is None else max(0.0, end - time.monotonic())
            good = saving.wait(left) and good
        return good

    def close(self) -> None:
        """At the interpreter's exit: wait for the rest, and say what is left."""
        ring = self.ring
        if ring is None:
            return
        left = os.environ.get(_EXIT_SECONDS, "")
        seconds = float(left) if left.isdigit() else 60.0
        if ring.unsaved and not ring.wait(2.0):
            steps = sorted({a.saving.step for a in list(ring.unsaved.values())})
            tell(f"waiting up to {seconds:.0f} s for step {', '.join(map(str, steps))} to be saved")
        if not ring.close(seconds):
            tell("not all is saved yet; the node's worker goes on with it after this process")


def _into(root: str, part: direct.Part, image: Image) -> None:
    """Write a file where the worker checks and takes it."""
    folder = os.path.join(root, layout.partial_name(layout.step_name(part.step, part.name)))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    direct.write_file(os.path.join(folder, layout.file_name(part.rank)), image)


_current: Session | None = None
_making = threading.Lock()


def current() -> Session:
    """This process's session."""
    global _current
    with _making:
        if _current is None:
            _current = Session(environment.read())
        return _current


def configure(env: environment.Environment, folder: str | None) -> Session:
    """Set what ``init`` found; what is being saved already stays with the ring it has."""
    session = current()
    session.env = dataclasses.replace(env, run=session.env.run if not env.job_id else env.run)
    session.folder = folder or session.folder
    return session


def reset() -> None:
    """Forget the session, after closing its ring: for tests and for a second training."""
    global _current
    if _current is not None:
        _current.close()
    _current = None


def _after_fork() -> None:
    """A child has no part in its parent's ring, and locks may be held by threads it lacks."""
    global _current, _making
    _making = threading.Lock()
    if _current is not None and _current.ring is not None:
        _current.ring.forked()
    _current = None


def _at_exit() -> None:
    if _current is not None:
        _current.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)


def warn(text: str) -> None:
    """A warning that a user may turn off as any other."""
    warnings.warn(text, RuntimeWarning, stacklevel=4)
