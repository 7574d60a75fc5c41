"""A trainer's connection and its lane: every message checked, nothing believed, nobody held up.

A lane is a stream cut into the memory's length. Its bytes are free again when the disk and the
checksum are done with them and, of a save that fits the lane whole, when the save is settled: as
long as it isn't, the trainer can announce it anew to a worker that comes after a killed one.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from typing import Protocol

from crater_slurm.checkpoint import memory
from crater_slurm.checkpoint.connection import Connection
from crater_slurm.checkpoint.disk import Block
from crater_slurm.checkpoint.memory import LaneError, Memory
from crater_slurm.checkpoint.outfile import padded
from crater_slurm.checkpoint.save import Place, Save, State
from crater_slurm.checkpoint.steps import Steps
from crater_slurm.checkpoint.tools import Tools
from crater_slurm.job import layout, wire
from crater_slurm.job.layout import LayoutError
from crater_slurm.job.wire import WireError

_MOST_POSITION = 1 << 62
_MOST_BYTES = 1 << 50
_MOST_RANKS = 10**6
_MOST_BLOCKS = 16384
_MOST_SAVES = 64
_LEAST_LANE = 1 << 20


class Desk(Protocol):
    """Who answers a trainer's questions that are not about its own saves: the worker."""

    def ask(self, lane: Lane, message: dict[str, object], fds: list[int]) -> None: ...


class Budget:
    """The node's memory for the job's lanes. ``total`` bytes, of which ``used`` are given out."""

    def __init__(self, total: int, huge_pages: str) -> None:
        self.total, self.huge_pages = total, huge_pages
        self.used = 0

    def lane(self, wanted: int, limit: int, ranks: int) -> tuple[Memory, int] | None:
        """Memory for one of ``ranks`` lanes and its open file; None when there is no room."""
        length = min(wanted, limit, self.total // max(1, ranks), self.total - self.used)
        if length < min(wanted, _LEAST_LANE) or length < layout.ALIGN:
            return None
        return memory.create(length, self.huge_pages)


class Lane(Connection):
    """One rank. ``opened`` is the message that it came with."""

    def __init__(
        self, connection: socket.socket, tools: Tools, steps: Steps, budget: Budget, desk: Desk
    ) -> None:
        super().__init__(connection)
        self.rank = -1
        #: When the trainer's process was started, as time.time().
        self.began = 0.0
        self.memory: Memory | None = None
        self._tools, self._steps, self._budget, self._desk = tools, steps, budget, desk
        self._saves: dict[int, Save] = {}
        self._last_save = -1
        self._blocks: deque[Block] = deque()
        self._end: int | None = None  # of the stream, as announced
        self._freed: int | None = None
        self._told: int | None = None
        self.changed = False

    # Coming and going

    def open(self, message: dict[str, object], limit: int, offered: int | None) -> None:
        """Answer a trainer's ``open``; ``offered`` is its lane from before. Raises WireError."""
        version = wire.whole(message, "version", 1 << 20)
        if version != wire.VERSION:
            raise WireError(f"speak version {version} of the messages, only {wire.VERSION}")
        run = wire.text(message, "run")
        if run != self._tools.spec.run:
            raise WireError(f"take run {run:.40}: this node's is {self._tools.spec.run}")
        world = wire.whole(message, "world", _MOST_RANKS, 1)
        local_world = wire.whole(message, "local_world", _MOST_RANKS, 1)
        rank = wire.whole(message, "rank", world - 1)
        wanted = wire.whole(message, "bytes", _MOST_BYTES)
        if message.get("began") is not None:
            self.began = wire.whole(message, "began", _MOST_POSITION) / 1000
        fds: tuple[int, ...] = ()
        try:
            if offered is not None:
                self.memory = memory.adopt(offered, wanted)
            elif wanted:
                made = self._budget.lane(wanted, limit, local_world)
                if made is not None:
                    self.memory, fds = made[0], (made[1],)
        except LaneError as error:
            self._tools.log("warning", f"rank {rank}: {error}")
        self.rank = rank
        length = self.memory.length if self.memory else 0
        self._budget.used += length
        policy = self._tools.spec.policy if length or not wanted else "direct"
        answer = {"op": "lane", "bytes": length, "version": wire.VERSION, "policy": policy}
        self.send({**answer, "partial_root": self._tools.folder.path}, fds)
        for fd in fds:
            os.close(fd)

    def close(self) -> None:
        """The trainer is gone: what it has said all of goes on, the rest is given up."""
        if not self.closed:
            super().close()
            for save in list(self._saves.values()):
                if not save.committed:
                    self._steps.abandon(save)
            self.changed = True

    @property
    def pieces(self) -> int:
        """How many blocks of it are not free yet."""
        return len(self._blocks)

    @property
    def writing(self) -> bool:
        """Whether the disk or a checksum still reads from it."""
        return any(not block.free for block in self._blocks)

    @property
    def idle(self) -> bool:
        """Whether nothing of it is under way."""
        return not self._blocks and not self._saves

    def let_go(self) -> None:
        """Give the memory back, of a lane that is closed and idle."""
        if self.memory is not None:
            self._budget.used -= self.memory.length
            with contextlib.suppress(BufferError):  # a thread lets go of its view a moment later
                self.memory.close()
            self.memory = None

    # What the saves tell

    def tell(self, message: dict[str, object]) -> None:
        self.send(message)

    def moved(self) -> None:
        self.changed = True

    def settle(self) -> None:
        """Forget what is done, and tell the trainer how far its stream is free."""
        self.changed = False
        self._saves = {n: save for n, save in self._saves.items() if not save.settled}
        while self._blocks and self._blocks[0].free and self._may_go(self._blocks[0]):
            block = self._blocks.popleft()
            self._freed = block.position + padded(block.length)
        if self._freed is not None and self._freed != self._told:
            self._told = self._freed
            self.send({"op": "freed", "position": self._freed})

    def _may_go(self, block: Block) -> bool:
        """Whether the trainer may overwrite a block that nobody reads any more.

        Of a save that fits the lane nothing goes before it is settled; of a larger one the last
        piece goes when the file is whole on disk, so that the trainer knows that it is.
        """
        save = block.save
        if save is None or save.settled or self.closed:
            return True
        if save.size <= (self.memory.length if self.memory else 0):
            return False
        return block.at + block.length < save.size or save.state is State.KEPT or not save.writes

    # Messages

    def take(self, message: dict[str, object], fds: list[int]) -> None:
        take = _TAKES.get(str(message["op"]))
        if take is None:
            self._desk.ask(self, message, fds)
        else:
            take(self, message)

    def _begin(self, message: dict[str, object]) -> None:
        number = wire.whole(message, "save", _MOST_POSITION)
        if number <= self._last_save:
            raise WireError(f"begin save {number} after {self._last_save}: the number has to grow")
        if len(self._saves) >= _MOST_SAVES:
            raise WireError(f"begin more than {_MOST_SAVES} saves at once")
        size = wire.whole(message, "size", _MOST_BYTES)
        place = self._place(message)
        self._last_save = number
        save = Save(self, number, place, size, self._tools, self._steps, self.began)
        save.in_lane = self.memory is not None and size <= self.memory.length
        self._saves[number] = save
        self._steps.begin(save)

    def _place(self, message: dict[str, object]) -> Place:
        world = wire.whole(message, "ranks", _MOST_RANKS, 1)
        local = wire.whole(message, "local", world, 1)
        # A save of one rank alone is a whole checkpoint, whatever rank that was.
        rank = 0 if world == 1 else self.rank
        if message.get("rank") is not None:
            rank = wire.whole(message, "rank", world - 1)
        name = wire.text(message, "name", "step")
        step = wire.whole(message, "step", 10**15 - 1)
        file = wire.text(message, "file", layout.file_name(rank))
        try:
            run = layout.run_name(self._tools.spec.run, wire.text(message, "start", ""))
            entry = layout.FileEntry(file, rank, 0, [])
            layout.Manifest.from_json(layout.Manifest(step, world, [entry], name).to_json())
        except LayoutError as error:
            raise WireError(f"save {file!r:.80} of rank {rank}: {error}") from error
        return Place(name, step, file, rank, local, world, run)

    def _save(self, message: dict[str, object]) -> Save | None:
        """The save that a message means; None when it is settled. Raises WireError."""
        number = wire.whole(message, "save", _MOST_POSITION)
        if number > self._last_save:
            raise WireError(f"go on with save {number}, which has not begun")
        return self._saves.get(number)

    def _data(self, message: dict[str, object]) -> None:
        save = self._save(message)
        at = wire.whole(message, "at", _MOST_BYTES)
        position = wire.whole(message, "position", _MOST_POSITION)
        length = wire.whole(message, "bytes", _MOST_BYTES, 1)
        whole = self._checked(position, length)
        if save is None:
            gap = Block(whole, None, position, 0, length)
            gap.written = gap.summed = True
            self._blocks.append(gap)
            self._end = position + padded(length)
            self.changed = True
            return
        if at != save.announced or at + length > save.size or save.committed:
            raise WireError(
                f"take bytes {at} to {at + length} of save {save.number}, which has "
                f"{save.announced} of {save.size}"
            )
        if length % layout.ALIGN and at + length != save.size:
            raise WireError(f"take {length} bytes in the midst of a file: whole pages belong there")
        self._blocks += save.add(whole, position, length)
        self._end = position + padded(length)
        self.changed = True

    def _checked(self, position: int, length: int) -> Memory:
        """The lane, if those bytes may be announced now. Raises WireError."""
        if self.memory is None:
            raise WireError("take data without a lane")
        whole = self.memory.length
        if self._end is None or self._freed is None:  # an adopted lane is somewhere in its stream
            self._end = self._freed = self._told = position
        if position % layout.ALIGN or position % whole + length > whole:
            raise WireError(f"find {length} bytes at {position}: they don't lie on whole pages")
        if position < self._end or position + length > self._freed + whole:
            raise WireError(
                f"take {length} bytes at {position} of the lane: it is at "
                f"{self._end}, free up to {self._freed}"
            )
        if len(self._blocks) >= _MOST_BLOCKS:
            raise WireError(f"have more than {_MOST_BLOCKS} pieces under way")
        return self.memory

    def _commit(self, message: dict[str, object]) -> None:
        save = self._save(message)
        if save is not None and save.announced != save.size:
            raise WireError(
                f"finish save {save.number}: only {save.announced} of its {save.size} bytes came"
            )
        if save is not None:
            save.commit()
            self._steps.committed(save)

    def _direct(self, message: dict[str, object]) -> None:
        save = self._save(message)
        if save is None or not save.writes:
            return
        if save.announced or save.committed:
            raise WireError(f"take save {save.number} from its file: it has data in the lane")
        save.direct()

    def _abandon(self, message: dict[str, object]) -> None:
        save = self._save(message)
        if save is not None:
            self._steps.abandon(save)


_TAKES = {
    "begin": Lane._begin,
    "data": Lane._data,
    "commit": Lane._commit,
    "direct": Lane._direct,
    "abandon": Lane._abandon,
}
