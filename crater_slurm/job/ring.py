"""Saving by the ring: into the lane at once, or through it piece by piece, or beside it.

What can't go this way is answered with False, and the caller writes the file: nothing raises into
the training, and nothing waits for a worker that makes no progress.
"""

from __future__ import annotations

import time

from crater_slurm.job.copying import Image
from crater_slurm.job.lane import Lane, rounded
from crater_slurm.job.layout import ALIGN
from crater_slurm.job.link import Announced, Link
from crater_slurm.job.saving import Saving, tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Without any progress for so long, a save that waits for room goes another way.
STALL_SECONDS = 300.0
_STALLED = (
    f"the checkpoint worker has made no progress for {STALL_SECONDS:.0f} s, so this step is "
    "written directly. If only one rank saves, call save(..., only_rank=0) on all of them."
)


class Ring(Link):
    """One rank's ring. One thread saves at a time."""

    def save(
        self,
        image: Image,
        begin: dict[str, Any],
        saving: Saving,
        rescue: Callable[[Image, bool], None],
    ) -> bool:
        """Take a file into the lane; False where the caller has to write it, with nothing left
        behind here. ``rescue(image, own)`` writes it from the lane, should the worker be lost, or
        (``own``) to the user's folder, should its disk not take it."""
        lane = self.lane
        if lane is None or self.given_up or self.retired:
            return False
        announced = self._new(begin, image.size, saving)
        announced.rescue = rescue
        if rounded(image.size) > lane.length:
            announced.whole = False
            return self._stream(lane, announced, image)
        if not self._wait_for(lane, rounded(image.size)):
            return False
        with self.changed:
            lane.skip_to_start(image.size)
            announced.start = lane.head
            announced.pieces = lane.take(image.size)
            self.unsaved[announced.number] = announced
        for at, position, count in announced.pieces:
            image.copy(at, count, lane.place(position))
        with self.changed:
            announced.ready = True
            if not self.lost:
                self._announce(announced)
        if self.given_up:
            self._rescue()
        return True

    def _new(self, begin: dict[str, Any], size: int, saving: Saving) -> Announced:
        with self.changed:
            number, self._next = self._next, self._next + 1
            self._progress = time.monotonic()
            message = {**begin, "op": "begin", "save": number, "size": size}
            return Announced(number, message, saving)

    def _stream(self, lane: Lane, announced: Announced, image: Image) -> bool:
        """A file larger than the lane, piece by piece; returns once all of it is on disk."""
        era, at = self.generation, 0
        with self.changed:
            self.unsaved[announced.number] = announced
        good = self._tell(announced.begin)
        step = max(ALIGN, lane.length // 4 // ALIGN * ALIGN)
        while good and at < image.size and not announced.refused:
            count = min(step, image.size - at, lane.length - lane.head % lane.length)
            good = self._wait_for(lane, rounded(count), era)
            if good:
                with self.changed:
                    piece = lane.take(count, at)[0]
                image.copy(at, count, lane.place(piece[1]))
                good = self.generation == era and self._tell_piece(announced.number, piece)
                at += count
        end = lane.head

        def over() -> bool:
            return announced.saving.done() or announced.refused

        good = good and self._tell({"op": "commit", "save": announced.number})
        good = good and self._wait_until(lambda: lane.tail >= end or over(), era)
        return self._keep(announced, good, era)

    def direct(
        self, begin: dict[str, Any], size: int, saving: Saving, write: Callable[[str], None]
    ) -> bool:
        """Have the caller write the file where the worker looks for it, and the worker take it;
        False where there is none. ``write(folder)`` raises what it likes."""
        if self.lost or self.retired or not self.partial_root:
            return False
        era = self.generation
        announced = self._new(begin, size, saving)
        announced.whole = False
        with self.changed:
            self.unsaved[announced.number] = announced
        good = self._tell(announced.begin)
        try:
            if good:
                write(self.partial_root)
        except BaseException:
            self._keep(announced, False, era)
            raise
        good = good and self.generation == era
        good = good and self._tell({"op": "direct", "save": announced.number})
        return self._keep(announced, good, era)

    def _keep(self, announced: Announced, good: bool, era: int) -> bool:
        """Remember a save that is on disk until the worker calls it saved; drop a failed one."""
        with self.changed:
            saved = announced.saving.done() and announced.saving.error is None
            good = good and not announced.refused
            announced.ready = good
            if not (good or saved):
                self.unsaved.pop(announced.number, None)
        if not (good or saved) and self.generation == era:
            self._tell({"op": "abandon", "save": announced.number})
        return good or saved

    def _wait_for(self, lane: Lane, nbytes: int, era: int | None = None) -> bool:
        """Wait for room; False when it won't come, or is not there and the policy is direct.
        ``era``: the connection on which it has to come."""
        if era is None and self.policy == "direct" and lane.room < nbytes:
            return False
        return self._wait_until(lambda: lane.room >= nbytes, era)

    def _wait_until(self, test: Callable[[], bool], era: int | None) -> bool:
        with self.changed:
            while True:
                if self.given_up or self.retired:
                    return False
                if era is not None and (self.lost or self.generation != era):
                    return False
                if test():
                    return True
                left = self._progress + STALL_SECONDS - time.monotonic()
                if left <= 0:
                    tell(_STALLED)
                    return False
                self.changed.wait(min(left, 1.0))
