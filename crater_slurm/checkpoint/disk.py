"""From the lanes' own pages to disk: blocks of many files, taken in turn, a number at once.

One thread decides what is written next and checks every result; io_uring, or a few threads with
pwritev, does the writing. A file system that refuses direct I/O for a file gets it buffered.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from crater_slurm.checkpoint.memory import Memory
from crater_slurm.checkpoint.outfile import OutFile, padded
from crater_slurm.checkpoint.rate import TokenBucket
from crater_slurm.checkpoint.uring import Uring
from crater_slurm.job import layout

if TYPE_CHECKING:
    from crater_slurm.checkpoint.save import Save

#: As much under way as keeps a drive busy; bench/checkpoint.py shows the drain beside fio's.
BLOCK_BYTES = 4 << 20
DEPTH = 16
_AGAIN = (-errno.EAGAIN, -errno.EINTR)


class Block:
    """Up to BLOCK_BYTES of a file, as they lie in a lane; in no more than one chunk.

    ``written`` says that the disk is done with it (``error`` is an errno then, or 0), ``summed``
    that its checksum is known. ``cancelled``: don't begin any more.
    """

    __slots__ = (
        "at",
        "cancelled",
        "done",
        "error",
        "file",
        "length",
        "memory",
        "position",
        "save",
        "sum",
        "summed",
        "written",
    )

    def __init__(
        self, memory: Memory, save: Save | None, position: int, at: int, length: int
    ) -> None:
        self.save = save
        self.memory, self.position, self.at, self.length = memory, position, at, length
        self.file: OutFile | None = None
        self.done = self.error = self.sum = 0
        self.written = self.summed = self.cancelled = False

    @property
    def start(self) -> int:
        """Where in the lane the block begins."""
        return self.position % self.memory.length

    @property
    def free(self) -> bool:
        """Whether nobody reads the lane's bytes any more."""
        return self.written and self.summed


class UringEngine:
    """Writes by io_uring; raises OSError where there is none."""

    name = "io_uring"

    def __init__(self, depth: int) -> None:
        self._ring = Uring(depth)
        self.wake = self._ring.wake

    def write(self, fd: int, offset: int, block: Block, length: int) -> None:
        address = block.memory.address + block.start + block.done
        self._ring.write(fd, offset, address, length, block)

    def wait(self, seconds: float | None) -> list[tuple[Block, int]]:
        return self._ring.wait(seconds)  # type: ignore[return-value]


class ThreadEngine:
    """Writes by threads, each with one pwritev at a time."""

    name = "threads"

    def __init__(self, depth: int) -> None:
        self._work: queue.SimpleQueue[tuple[int, int, Block, int]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Block, int] | None] = queue.SimpleQueue()
        for _ in range(depth):
            threading.Thread(target=self._run, name="crater-write", daemon=True).start()

    def _run(self) -> None:
        while True:
            fd, offset, block, length = self._work.get()
            start = block.start + block.done
            try:
                result = os.pwritev(fd, [block.memory.view[start : start + length]], offset)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            self._results.put((block, result))

    def write(self, fd: int, offset: int, block: Block, length: int) -> None:
        self._work.put((fd, offset, block, length))

    def wait(self, seconds: float | None) -> list[tuple[Block, int]]:
        try:
            found = [self._results.get(timeout=seconds)]
        except queue.Empty:
            return []
        while not self._results.empty():
            found.append(self._results.get())
        return [result for result in found if result is not None]

    def wake(self) -> None:
        self._results.put(None)


def make_engine(wanted: str, depth: int) -> UringEngine | ThreadEngine:
    """``auto`` and ``io_uring`` take io_uring where the kernel allows it; else threads."""
    if wanted in ("auto", "io_uring"):
        try:
            return UringEngine(depth)
        except OSError:
            pass
    return ThreadEngine(min(depth, 8))


class Drain:
    """Writes blocks; ``written(block)`` is called, in the drain's thread, for each that is done."""

    def __init__(
        self,
        written: Callable[[Block], None],
        bucket: TokenBucket,
        log: Callable[[str, str], None],
        engine: str = "auto",
        depth: int = DEPTH,
        make: Callable[[str, int], UringEngine | ThreadEngine] = make_engine,
    ) -> None:
        self._written, self.bucket, self._log = written, bucket, log
        self._wanted, self._depth, self._make = engine, depth, make
        self._inbox: deque[Block] = deque()
        self._ready: dict[OutFile, deque[Block]] = {}
        self._turn: deque[OutFile] = deque()
        self._engine: UringEngine | ThreadEngine | None = None
        self._flying = 0
        self._lock = threading.Lock()
        self.engine_name = ""

    def add(self, blocks: list[Block]) -> None:
        """Have blocks written whose files are open; from any thread."""
        with self._lock:
            self._inbox.extend(blocks)
            if not self.engine_name:
                self.engine_name = "starting"
                threading.Thread(target=self._run, name="crater-drain", daemon=True).start()
        self.wake()

    def wake(self) -> None:
        """Look again: at new blocks, or at a rate that has changed."""
        if self._engine is not None:
            self._engine.wake()

    def _run(self) -> None:
        self._engine = self._make(self._wanted, self._depth)
        self.engine_name = self._engine.name
        while True:
            try:
                self._round(self._engine)
            except Exception:  # the trainers' blocks go on, whatever became of one round
                self._log("error", traceback.format_exc())

    def _round(self, engine: UringEngine | ThreadEngine) -> None:
        while self._inbox:
            block = self._inbox.popleft()
            assert block.file is not None
            if block.file not in self._ready:
                self._ready[block.file] = deque()
                self._turn.append(block.file)
            self._ready[block.file].append(block)
        delay = self._submit(engine)
        for block, result in engine.wait(delay):
            self._flying -= 1
            self._check(engine, block, result)

    def _submit(self, engine: UringEngine | ThreadEngine) -> float | None:
        """Begin what may begin; seconds until the rate allows more, None when it's not the rate."""
        while self._turn and self._flying < self._depth:
            file = self._turn[0]
            block = self._ready[file][0]
            delay = 0.0 if block.cancelled else self.bucket.ask(block.length)
            if delay:
                return delay
            self._ready[file].popleft()
            self._turn.rotate(-1)
            if not self._ready[file]:
                del self._ready[file]
                self._turn.remove(file)
            if block.cancelled:
                self._finish(block, 0)
            else:
                self._write(engine, block)
        return None

    def _write(self, engine: UringEngine | ThreadEngine, block: Block) -> None:
        file = block.file
        assert file is not None
        length = block.length - block.done
        if file.direct:
            length = padded(length)
        self._flying += 1
        engine.write(file.fd, block.at + block.done, block, length)

    def _check(self, engine: UringEngine | ThreadEngine, block: Block, result: int) -> None:
        file = block.file
        assert file is not None
        if result in _AGAIN:
            self._write(engine, block)
            return
        if result > 0 and block.done + result >= block.length:
            self._finish(block, 0)
            return
        if file.direct and (result == -errno.EINVAL or 0 < result < layout.ALIGN):
            try:
                file.go_buffered()
            except OSError as error:
                self._finish(block, error.errno or errno.EIO)
                return
            result = max(0, result)
        elif result <= 0:
            self._finish(block, -result or errno.EIO)
            return
        block.done += result - (result % layout.ALIGN if file.direct else 0)
        self._write(engine, block)

    def _finish(self, block: Block, error: int) -> None:
        block.error = error
        self._written(block)
