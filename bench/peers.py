"""Copies between nodes on loopback: ``python -m bench peers [MiB]``.

Each figure is taken in the same run, in turns: the plainest way (a bare socket, sendfile into
recv_into), ours without a disk (frames, checksums of every piece), and ours whole (written, on
disk, renamed), which is compared with a plain copy of the file on the same disk with fsync. Sender
and receiver are two processes; both share this machine's cores, so a network card does better.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from bench.table import show
from crater_slurm.checkpoint.peers.checks import pieces
from crater_slurm.checkpoint.peers.send import Courier
from crater_slurm.checkpoint.peers.serve import Service
from crater_slurm.checkpoint.peers.store import PeerStore
from crater_slurm.checkpoint.peers.tcp import TcpConnection
from crater_slurm.checkpoint.sums import crc32
from crater_slurm.job import layout
from crater_slurm.job.layout import CHUNK_BYTES, FileEntry, Manifest

MIB = 512
ROUNDS = 5


def _sink(listener: socket.socket, kind: str, folder: str, told: Pipe) -> None:
    """The receiving process: takes one connection after another."""
    store = PeerStore(folder)
    service = Service(store, is_flushed=lambda *_: False, others=dict, log=lambda *_: None)
    told.send("ready")
    while True:
        connection, _ = listener.accept()
        if kind == "raw":
            buffer = memoryview(bytearray(CHUNK_BYTES))
            while connection.recv_into(buffer):
                pass
            connection.close()
            told.send("done")
        elif kind == "frames":
            framed = TcpConnection(connection)
            while True:
                header, data = framed.receive(CHUNK_BYTES)
                if header["op"] == "end":
                    break
                crc32(data)
            framed.send({"op": "got"})
            framed.close()
        else:
            told_of = (TcpConnection(connection), "a", True)
            threading.Thread(target=service.serve, args=told_of, daemon=True).start()


def raw(address: tuple[str, int], part: Path, manifest: Manifest, told: Pipe) -> None:
    with (
        socket.create_connection(address) as plain,
        (part / manifest.files[0].name).open("rb") as f,
    ):
        plain.sendfile(f)
    told.recv()


def frames(address: tuple[str, int], part: Path, manifest: Manifest, _: Pipe) -> None:
    connection = TcpConnection(socket.create_connection(address))
    entry = manifest.files[0]
    with (part / entry.name).open("rb") as file:
        for number, at, length in pieces(entry):
            connection.send_file({"op": "data", "piece": number}, file.fileno(), at, length)
    connection.send({"op": "end"})
    connection.receive()
    connection.close()


def whole(streams: int) -> Callable[[tuple[str, int], Path, Manifest, Pipe], None]:
    def bring(address: tuple[str, int], part: Path, manifest: Manifest, _: Pipe) -> None:
        def connect() -> TcpConnection:
            return TcpConnection(socket.create_connection(address))

        Courier(connect, streams).bring(str(part), manifest)

    return bring


WAYS = {
    "raw socket, sendfile": ("raw", raw),
    "ours, no disk": ("frames", frames),
    "ours, to disk, 1 stream": ("whole", whole(1)),
    "ours, to disk, 2 streams": ("whole", whole(2)),
}


def make(folder: Path, mib: int) -> tuple[Path, Manifest]:
    """A part of one file, whose pages are in memory."""
    part = folder / "from" / layout.step_name(1)
    part.mkdir(parents=True)
    path = part / layout.file_name(0)
    path.write_bytes(os.urandom(1 << 20) * mib)
    data = path.read_bytes()
    entry = FileEntry(path.name, 0, len(data), layout.chunk_sums(memoryview(data), crc32))
    return part, Manifest(1, 1, [entry], run="1.0")


def plain_copy(part: Path, manifest: Manifest, folder: Path) -> None:
    """What the disk allows: the same file copied and synced."""
    target = folder / "plain"
    shutil.copyfile(part / manifest.files[0].name, target)
    fd = os.open(target, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    target.unlink()


def run(mib: int = MIB) -> None:
    """Print the table."""
    found: dict[str, list[float]] = defaultdict(list)
    place = Path(os.environ.get("BENCH_DIR") or tempfile.gettempdir())
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        part, manifest = make(folder, mib)
        sinks = {kind: _start(kind, folder / kind) for kind, _ in WAYS.values()}
        for _ in range(ROUNDS):
            for way, (kind, bring) in WAYS.items():
                address, told, _ = sinks[kind]
                shutil.rmtree(folder / kind, ignore_errors=True)
                found[way].append(
                    _seconds(lambda b=bring, a=address, t=told: b(a, part, manifest, t))
                )
            found["cp + fsync"].append(_seconds(lambda: plain_copy(part, manifest, folder)))
        for _, _, process in sinks.values():
            process.terminate()
            process.join()
    rows = [
        [
            way,
            f"{mib * 2**20 / 1e6 / statistics.median(s):,.0f}",
            f"{mib * 2**20 / 1e6 / min(s):,.0f}",
        ]
        for way, s in found.items()
    ]
    show(
        f"A part of {mib} MiB to the next node, on loopback, MB/s (`python -m bench peers`)",
        ["way", "median", "best"],
        rows,
    )


def _start(kind: str, folder: Path) -> tuple[tuple[str, int], Pipe, multiprocessing.Process]:
    listener = socket.create_server(("127.0.0.1", 0))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(
        target=_sink, args=(listener, kind, str(folder), theirs), daemon=True
    )
    process.start()
    ours.recv()
    return listener.getsockname(), ours, process


def _seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
