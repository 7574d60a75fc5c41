"""A checkpoint worker that a test holds in its hand: it speaks the wire protocol, as documented,
and answers when the test lets it. It writes real files, one rank to a part."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import threading
from pathlib import Path

from crater_slurm.job import layout, wire

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def new_lane(size: int) -> int:
    fd = os.memfd_create("lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


class FakeWorker:
    """``most``: bytes of a lane at most. ``hold``: messages are kept in ``log``, none is answered
    but ``open``. ``streaming``: pieces are freed as they come."""

    def __init__(
        self, folder: Path, path: Path, *, most: int = 1 << 40, policy: str = "wait"
    ) -> None:
        self.folder, self.path, self.most, self.policy = folder, path, most, policy
        self.hold = False
        self.refuse_lanes = False
        self.log: list[dict] = []
        self.lanes: list[int] = []
        self.answers: dict[str, dict] = {}
        self.files: dict[int, bytearray] = {}
        self.begun: dict[int, dict] = {}
        self.arrived = threading.Condition()
        self.server: socket.socket | None = None
        self.connections: list[wire.Channel] = []
        self.start()

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server.bind(str(self.path))
        self.server.listen()
        threading.Thread(target=self._accept, args=(self.server,), daemon=True).start()

    def die(self) -> None:
        """As after kill -9: the listening socket and all connections are gone, and what it knew."""
        assert self.server is not None
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        self.path.unlink(missing_ok=True)
        self.hang_up()

    def hang_up(self) -> None:
        self.files, self.begun = {}, {}
        for channel in self.connections:
            with contextlib.suppress(OSError):
                channel.socket.shutdown(socket.SHUT_RDWR)
        self.connections = []

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                channel = wire.Channel(server.accept()[0])
            except OSError:
                return
            threading.Thread(target=self._serve, args=(channel,), daemon=True).start()

    def _serve(self, channel: wire.Channel) -> None:
        lane: mmap.mmap | None = None
        self.connections.append(channel)
        try:
            while True:
                message, fds = channel.receive()
                if message["op"] == "open":
                    lane = self._open(channel, message, fds)
                with self.arrived:
                    self.log.append(message)
                    self.arrived.notify_all()
                if not self.hold:
                    self._take(channel, lane, message)
        except (OSError, wire.WireError):
            pass
        finally:
            channel.socket.close()

    def _open(self, channel: wire.Channel, message: dict, fds: list[int]) -> mmap.mmap | None:
        size = min(message["bytes"], self.most)
        answer = {"op": "lane", "version": 1, "policy": self.policy, "bytes": size}
        answer["partial_root"] = str(self.folder)
        if not size:
            channel.send(answer)
            return None
        offered = bool(fds) and not self.refuse_lanes
        fd = fds[0] if offered else new_lane(size)
        self.lanes.append(fd)
        channel.send(answer, () if offered else (fd,))
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)

    def _take(self, channel: wire.Channel, lane: mmap.mmap | None, message: dict) -> None:
        op = message["op"]
        if op in self.answers:
            channel.send(self.answers[op])
        elif op == "begin":
            self.begun[message["save"]] = message
            self.files[message["save"]] = bytearray(message["size"])
        elif op == "data":
            assert lane is not None
            self._data(channel, lane, message)
        elif op == "direct":
            begin = self.begun[message["save"]]
            partial = self.folder / layout.partial_name(
                layout.step_name(begin["step"], begin["name"])
            )
            data = (partial / begin["file"]).read_bytes()
            assert len(data) == begin["size"]
            self.files[message["save"]][:] = data
            self._finish(channel, begin)
        elif op == "commit":
            self._finish(channel, self.begun[message["save"]])
        elif op == "stream":
            channel.send({"op": "error", "error": "there is no destination"})

    def _data(self, channel: wire.Channel, lane: mmap.mmap, message: dict) -> None:
        at, position, count = message["at"], message["position"], message["bytes"]
        assert at % layout.ALIGN == position % layout.ALIGN == 0
        place = position % len(lane)
        assert place + count <= len(lane), "a piece wraps"
        if message["save"] not in self.files:  # the test has hung up meanwhile
            return
        self.files[message["save"]][at : at + count] = lane[place : place + count]
        self.freed = position + -(-count // layout.ALIGN) * layout.ALIGN
        if self.begun[message["save"]]["size"] > len(lane):
            channel.send({"op": "freed", "position": self.freed})

    def _finish(self, channel: wire.Channel, begin: dict) -> None:
        data = bytes(self.files[begin["save"]])
        rank = begin.get("rank", 0)
        folder = self.folder / layout.step_name(begin["step"], begin["name"])
        folder.mkdir(exist_ok=True)
        (folder / begin["file"]).write_bytes(data)
        entry = layout.FileEntry(
            begin["file"], rank, len(data), layout.chunk_sums(memoryview(data))
        )
        manifest = layout.Manifest(begin["step"], begin["ranks"], [entry], begin["name"], "7.0")
        (folder / layout.part_name([rank])).write_text(manifest.to_json())
        word = {"save": begin["save"], "name": begin["name"], "step": begin["step"]}
        channel.send({"op": "saved", **word})
        if hasattr(self, "freed"):
            channel.send({"op": "freed", "position": self.freed})

    def wait_for(self, op: str, times: int = 1) -> list[dict]:
        """Messages of a kind, once so many have come; a deadlock guard, not a measure."""
        with self.arrived:
            found = self.arrived.wait_for(
                lambda: len([m for m in self.log if m["op"] == op]) >= times, 20
            )
            assert found, f"only {[m['op'] for m in self.log]}"
            return [m for m in self.log if m["op"] == op]
