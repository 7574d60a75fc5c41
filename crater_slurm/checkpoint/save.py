"""One rank's file of one step, from the trainer's first word until it is whole on the disk.

The main thread alone touches it. What may block is asked of the worker's pools; what comes back
of a save that was given up meanwhile changes nothing any more.
"""

from __future__ import annotations

import enum
import os
from typing import Protocol

from crater_slurm.checkpoint import faults, sums
from crater_slurm.checkpoint.disk import BLOCK_BYTES, Block
from crater_slurm.checkpoint.entries import Entry
from crater_slurm.checkpoint.memory import Memory
from crater_slurm.checkpoint.outfile import OutFile
from crater_slurm.checkpoint.tools import Tools
from crater_slurm.job import layout
from crater_slurm.job.layout import FileEntry


class State(enum.Enum):
    """How far a save is."""

    OPEN = "open"  # the trainer still sends
    FINISHING = "finishing"  # the trainer has said all
    KEPT = "kept"  # the file is whole and on the disk
    SETTLED = "settled"  # saved, failed or given up: nothing more is done for it


class Owner(Protocol):
    """Who announced a save: its lane, which may be gone."""

    def moved(self) -> None:
        """Bytes of the lane may have become free."""

    def tell(self, message: dict[str, object]) -> None:
        """Send the trainer a message, if it is there."""


class Keeper(Protocol):
    """Who decides what becomes of a save: the steps."""

    def kept(self, save: Save) -> None: ...
    def failed(self, save: Save, error: str, *, disk: bool) -> None: ...


class Place:
    """Where a save belongs: ``file`` of ``rank``, one of ``local`` here and ``world`` in all, of
    one start of the training, which ``run`` names."""

    def __init__(
        self, name: str, step: int, file: str, rank: int, local: int, world: int, run: str
    ) -> None:
        self.name, self.step, self.file = name, step, file
        self.folder = layout.step_name(step, name)
        self.rank, self.local, self.world, self.run = rank, local, world, run

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.step


class Save:
    """A file of ``size`` bytes, the trainer's save ``number``.

    A save that is ``followed`` by another one of the same step and rank writes nothing itself.
    ``since``: when its process was started, as time.time().
    """

    def __init__(
        self,
        owner: Owner,
        number: int,
        place: Place,
        size: int,
        tools: Tools,
        keeper: Keeper,
        since: float = 0.0,
    ) -> None:
        self.owner, self.number, self.place, self.size = owner, number, place, size
        self.since, self.begun_at = since, tools.now()
        self.state = State.OPEN
        self.announced = 0
        self.writes = True
        #: Whether the lane holds all of it at once, so that nobody waits for its room.
        self.in_lane = False
        self.entry: FileEntry | None = None
        self._tools, self._keeper = tools, keeper
        self._blocks: list[Block] = []
        self._waiting: list[Block] = []
        self._held: list[Block] | None = None
        self._busy = 0  # blocks and calls under way
        self._out: OutFile | None = None
        self._opened = False

    @property
    def settled(self) -> bool:
        return self.state is State.SETTLED

    @property
    def committed(self) -> bool:
        """Whether the trainer has said all, so that it can be finished without it."""
        return self.state in (State.FINISHING, State.KEPT)

    def add(self, memory: Memory, position: int, length: int) -> list[Block]:
        """The next ``length`` bytes lie at ``position`` of the lane; in blocks, begun at once."""
        blocks = []
        end = self.announced + length
        while self.announced < end:
            step = min(BLOCK_BYTES - self.announced % BLOCK_BYTES, end - self.announced)
            blocks.append(Block(memory, self, position, self.announced, step))
            self.announced += step
            position += step
        if self.state is not State.OPEN or not self.writes:
            for block in blocks:
                block.written = block.summed = True
            return blocks
        self._blocks += blocks
        self._busy += len(blocks)
        if self._held is None:
            self._start(blocks)
        else:
            self._held += blocks
        return blocks

    def hold(self) -> None:
        """Begin nothing before ``release``: other ranks still copy, and the memory is theirs."""
        self._held = []

    @property
    def held(self) -> bool:
        return self._held is not None

    def release(self) -> None:
        """Begin what was held back."""
        blocks, self._held = self._held, None
        if blocks:
            self._start(blocks)

    def _start(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._sum(block)
        self._write(blocks)

    def _sum(self, block: Block) -> None:
        def work() -> int:
            return sums.crc32(block.memory.view[block.start : block.start + block.length])

        def then(value: int | None, error: Exception | None) -> None:
            block.sum, block.summed = value or 0, True
            self._count(block, error)

        self._tools.hashers.ask(work, then)

    def _write(self, blocks: list[Block]) -> None:
        if self._opened and self._out is not None:
            for block in blocks:
                block.file = self._out
            self._tools.drain.add(blocks)
            return
        self._waiting += blocks
        if self._out is None:
            self._open()

    def _open(self) -> None:
        out = self._out = OutFile(self.place.file, self.size)
        room, folder = self._tools.room, self.place.folder
        self._busy += 1
        self._tools.files.ask(lambda: room.admit(out, folder), self._on_open)

    def _on_open(self, _: None, error: Exception | None) -> None:
        self._opened = True
        waiting, self._waiting = self._waiting, []
        if error is None and not self.settled:
            self._write(waiting)
            self._done()
            return
        for block in waiting:
            block.written = True
            self._count(block, None)
        self._done(error)

    def written(self, block: Block) -> None:
        """The drain is done with a block."""
        block.written = True
        if block.error:
            self._count(block, OSError(block.error, os.strerror(block.error)))
            return
        if not block.cancelled:
            self._tools.counters["drained_bytes"] += block.length
        self._count(block, None)

    def _count(self, block: Block, error: Exception | None) -> None:
        if block.free:
            self._busy -= 1
            self.owner.moved()
        self._go_on(error)

    def _done(self, error: Exception | None = None) -> None:
        self._busy -= 1
        self._go_on(error)

    def commit(self) -> None:
        """The trainer has said all."""
        if self.state is State.OPEN:
            self.state = State.FINISHING
            if self.writes and self._out is None:  # an empty file
                self._open()
            self._go_on(None)

    def _go_on(self, error: Exception | None) -> None:
        """Take the next step, when everything before it is done."""
        if error is not None and not self.settled:
            self.fail(error)
        if self._busy or not self.writes:
            return
        if self.state is State.FINISHING and self._out is not None:
            self._busy += 1
            self._tools.files.ask(self._out.sync, self._on_sync)
        elif self.settled:
            self._let_go()

    def _on_sync(self, _: None, error: Exception | None) -> None:
        if error is not None or self.settled or self._out is None:
            self._done(error)
            return
        out, place, tools = self._out, self.place, self._tools
        pieces = [(block.length, block.sum) for block in self._blocks]

        def work() -> FileEntry:
            entry = FileEntry(out.name, place.rank, out.size, sums.chunk_sums(pieces))
            out.put_in_place()
            self._record(entry)
            return entry

        tools.clerk.ask(work, self._on_kept)

    def direct(self) -> None:
        """The trainer has written the file itself: check it and take it."""
        place, size, tools = self.place, self.size, self._tools
        self.state = State.FINISHING

        def work() -> FileEntry:
            tools.room.check()
            entry = tools.folder.take(place.folder, place.file, place.rank, size)
            self._record(entry)
            return entry

        tools.counters["direct"] += 1
        self._busy += 1
        tools.files.ask(work, self._on_kept)

    def _record(self, entry: FileEntry) -> None:
        place, tools = self.place, self._tools
        manifest = tools.manifest(place.name, place.step, place.world, [entry], place.run)
        tools.folder.record(place.folder, Entry(place.rank, place.local, manifest))

    def _on_kept(self, entry: FileEntry | None, error: Exception | None) -> None:
        self._busy -= 1
        if error is not None or self.settled:
            self._go_on(error)
            return
        self.entry = entry
        self.state = State.KEPT
        self._let_go()
        self.owner.moved()
        self._keeper.kept(self)

    def fail(self, error: Exception) -> None:
        """Not saved, for a fault of the disk or a rule of the site."""
        what = f"{self.place.name} {self.place.step} of rank {self.place.rank} is not saved"
        text = faults.sentence(what, error, self._tools.folder.path)
        self._keeper.failed(self, text, disk=isinstance(error, OSError))

    def settle(self) -> None:
        """Nothing more is done for it: it is saved, has failed, or is given up."""
        if self.settled:
            return
        self.state = State.SETTLED
        for block in self._blocks:
            block.cancelled = True
        held, self._held = self._held or [], None
        for block in held:
            block.written = block.summed = True
        self._busy -= len(held)
        if not self._busy:
            self._let_go()
        self.owner.moved()

    def _let_go(self) -> None:
        """Close the file, of which no block is under way any more."""
        self._blocks = []
        out, self._out = self._out, None
        if out is not None:
            self._tools.room.release(out)
            self._tools.clerk.ask(out.close, lambda _, __: None)
