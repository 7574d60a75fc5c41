"""A real checkpoint worker for tests, with a small daemon and trainers that speak its messages."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crater_slurm.checkpoint.spec import Spec
from crater_slurm.job import layout
from crater_slurm.job.layout import ALIGN
from crater_slurm.job.wire import VERSION, Channel, WireError

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
_PROGRAM = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from crater_slurm.checkpoint.worker import main; main()"
MIB = 1 << 20


def a_spec(folder: Path, **changed: Any) -> Spec:
    """A job of this user, whose checkpoints lie in ``folder``."""
    known: dict[str, Any] = {
        "job_id": "4711", "cluster": "c1", "user": "root", "uid": os.getuid(), "gid": os.getgid(),
        "node": "n1", "run": "4711.0", "folder": str(folder), "ring_bytes": 1 << 30,
    }  # fmt: skip
    return Spec(**{**known, **changed})


class Daemon:
    """Starts a worker, hands it connections, and remembers what it says."""

    def __init__(self, tmp: Path, spec: Spec, program: str = _PROGRAM) -> None:
        self.spec, self._program = spec, program
        self.path = str(tmp / "worker.sock")
        self.messages: list[dict[str, Any]] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: Channel | None = None

    def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self.path)
        listener.listen(8)
        number = listener.fileno()
        program = f"import os; os.dup2({number}, 3) if {number} != 3 else None; {self._program}"
        self.process = subprocess.Popen([sys.executable, "-I", "-c", program], pass_fds=(number,))
        listener.close()
        self.connect()

    def connect(self) -> None:
        """What a daemon does at first, and one that has been started anew."""
        self.channel = Channel.connect(self.path)
        self.channel.send({"op": "spec", "spec": self.spec.to_json()})

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        assert self.channel is not None
        self.channel.send(message, fds)

    def lane(
        self, opening: dict[str, Any], lane: int | None = None, limit: int = 1 << 40
    ) -> Channel:
        """Hand a new connection over; the trainer's end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = (theirs.fileno(),) if lane is None else (theirs.fileno(), lane)
        self.send({"op": "lane", "open": opening, "limit": limit, "pid": os.getpid()}, fds)
        theirs.close()
        return Channel(ours)

    def hear(self, operation: str, seconds: float = PATIENCE_S, **wanted: Any) -> dict[str, Any]:
        """The next message of that kind with those values; the others are kept in ``messages``."""
        assert self.channel is not None
        return hear(self.channel, operation, seconds, self.messages, **wanted)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def running(tmp: Path, spec: Spec, program: str = _PROGRAM) -> Iterator[Daemon]:
    daemon = Daemon(tmp, spec, program)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


def hear(
    channel: Channel,
    operation: str,
    seconds: float = PATIENCE_S,
    others: list[dict[str, Any]] | None = None,
    **wanted: Any,
) -> dict[str, Any]:
    """The next message of that kind with those values; raises WireError at the end."""
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        if left <= 0 or not select.select([channel], [], [], left)[0]:
            raise AssertionError(f"no {operation} came, only {others}")
        message, fds = channel.receive()
        if message["op"] == operation and all(message.get(k) == v for k, v in wanted.items()):
            message["fds"] = fds
            return message
        if others is not None:
            others.append(message)


class Trainer:
    """One rank: copies bytes into its lane and announces them; keeps what is not saved."""

    def __init__(
        self, daemon: Daemon, rank: int = 0, world: int = 1, lane_bytes: int = 8 * MIB
    ) -> None:
        self.daemon, self.rank, self.world = daemon, rank, world
        self.opening = {
            "op": "open", "version": VERSION, "job": daemon.spec.job_id, "run": daemon.spec.run,
            "rank": rank, "local_rank": rank, "world": world, "local_world": world,
            "bytes": lane_bytes, "slots": 2,
        }  # fmt: skip
        self.channel = daemon.lane(self.opening)
        self.messages: list[dict[str, Any]] = []
        answer = self.hear("lane")
        self.answer = answer
        self.length = answer["bytes"]
        self.fd = answer["fds"][0] if answer["fds"] else -1
        self.map = mmap.mmap(self.fd, self.length) if self.length else None
        self.head = self.freed = 0
        self.number = 0
        self.unsaved: dict[int, list[dict[str, Any]]] = {}

    def hear(self, operation: str, seconds: float = PATIENCE_S, **wanted: Any) -> dict[str, Any]:
        message = hear(self.channel, operation, seconds, self.messages, **wanted)
        for known in (message, *self.messages):
            if known["op"] in ("saved", "failed"):
                self.unsaved.pop(known["save"], None)
            elif known["op"] == "freed":
                self.freed = max(self.freed, known["position"])
        return message

    def send(self, operation: str, **values: Any) -> None:
        message = {"op": operation, **values}
        if "save" in values:
            self.unsaved.setdefault(values["save"], []).append(message)
        self.channel.send(message)

    def begin(self, step: int, size: int, **changed: Any) -> int:
        """Announce a file."""
        self.number += 1
        known = {
            "save": self.number, "name": "step", "step": step, "size": size,
            "file": layout.file_name(self.rank), "ranks": self.world, "local": self.world,
        }  # fmt: skip
        self.send("begin", **{**known, **changed})
        return self.number

    def room(self) -> int:
        return self.length - (self.head - self.freed)

    def put(self, data: bytes) -> int:
        """Copy into the lane, waiting for room; the position. Must not cross the lane's end."""
        assert self.map is not None
        while self.room() < len(data):
            self.hear("freed")
        position = self.head
        start = position % self.length
        self.map[start : start + len(data)] = data
        self.head += -(-len(data) // ALIGN) * ALIGN
        return position

    def save(self, step: int, data: bytes, piece: int = 0, **changed: Any) -> int:
        """Save whole, or piece by piece; the number."""
        piece = piece or max(ALIGN, self.length // 4 // ALIGN * ALIGN)
        number = self.begin(step, len(data), **changed)
        at = 0
        while at < len(data):
            part = data[at : at + min(piece, self.length - self.head % self.length)]
            position = self.put(part)
            self.send("data", save=number, at=at, position=position, bytes=len(part))
            at += len(part)
        self.send("commit", save=number)
        return number

    def saved(self, number: int) -> dict[str, Any]:
        return self.hear("saved", save=number)

    def again(self) -> None:
        """Connect anew and offer the lane."""
        self.channel.close()
        self.channel = self.daemon.lane({**self.opening, "bytes": self.length}, self.fd)
        answer = self.hear("lane")
        assert answer["bytes"] == self.length and not answer["fds"]
        for messages in self.unsaved.values():
            for message in messages:
                self.channel.send(message)

    def close(self) -> None:
        self.channel.close()


def content(folder: Path, step: int, rank: int = 0) -> bytes:
    """A rank's file of a final step, after its manifest's sums were checked against it."""
    path = folder / layout.step_name(step)
    parts = layout.read_parts(str(path))
    entry = next(f for p in parts for f in p.files if f.rank == rank)
    assert layout.check_file(str(path / entry.name), entry) == ""
    return (path / entry.name).read_bytes()


__all__ = ["Channel", "Daemon", "Trainer", "WireError", "a_spec", "content", "hear", "running"]
