"""Nodes on loopback for tests of the copies: each a daemon's door and a worker behind it.

Run as a program (``python peer_samples.py FILE``) it is one such node in a process of
its own, to be killed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from crater_slurm.checkpoint.peers import verbs
from crater_slurm.checkpoint.peers.copies import Copies
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.job import layout
from crater_slurm.job.layout import FileEntry, Manifest
from crater_slurm.node.jobs import JobRecord
from crater_slurm.node.peer_spec import ticket_for
from crater_slurm.node.peers import PeerServer

KEY = bytes(range(32))
UID = 4242
JOB = "4711"


def record(node: str, **changes: Any) -> JobRecord:
    return JobRecord(
        **{"job_id": JOB, "uid": UID, "gid": UID, "cluster": "c1", "node": node} | changes
    )


def make_part(
    folder: Path,
    step: int,
    ranks: Iterable[int],
    *,
    world: int,
    node: str = "a",
    size: int = 100_000,
    run: str = f"{JOB}.0",
    at: float = 0.0,
) -> tuple[str, Manifest]:
    """A whole part in a job's folder: random files and their manifest."""
    path = folder / layout.step_name(step)
    path.mkdir(parents=True, exist_ok=True)
    files = []
    for rank in ranks:
        data = random.Random(f"{step} {rank} {run} {at}").randbytes(size)
        name = layout.file_name(rank)
        (path / name).write_bytes(data)
        files.append(FileEntry(name, rank, size, layout.chunk_sums(memoryview(data))))
    manifest = Manifest(
        step, world, files, run=run, job_id=JOB, cluster="c1", node=node, time=at or float(step)
    )
    (path / layout.part_name(manifest.ranks)).write_text(manifest.to_json())
    return str(path), manifest


class Node:
    """One node: ``folder`` is the job's in its cache."""

    def __init__(
        self,
        name: str,
        folder: Path,
        listen: str = "127.0.0.1:0",
        job: JobRecord | None = None,
        seconds: float = 5.0,
    ) -> None:
        self.name, self.folder = name, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.record = job or record(name)
        self.logged: list[str] = []
        self.flushed: set[tuple[str, int, str]] = set()
        self.flushes: list[tuple[str, Manifest]] = []
        self.sent: list[tuple[Manifest, int]] = []
        self.sent_event = threading.Event()
        self.now = 0.0
        self.copies: Copies | None = None
        self.server = PeerServer(
            listen,
            keys=lambda: (KEY,),
            job=lambda job_id: self.record if job_id == self.record.job_id else None,
            hand_over=self._hand_over,
            seconds=seconds,
        )
        self.address = self.server.address
        self.server.start()

    def _hand_over(self, _: JobRecord, plain: socket.socket, node: str, may_put: bool) -> None:
        """As the daemon does: the worker gets a descriptor of its own."""
        assert self.copies is not None
        self.copies.take(socket.socket(fileno=os.dup(plain.fileno())), node, may_put)

    def work(
        self,
        nodes: list[str],
        peers: dict[str, str],
        *,
        streams: int = 1,
        partners: Iterable[str] | None = None,
        **changes: Any,
    ) -> Copies:
        """Start this node's worker in a job of these nodes, at these addresses."""
        partners = nodes if partners is None else partners
        spec = Spec(
            job_id=JOB,
            cluster="c1",
            user="u",
            uid=UID,
            gid=UID,
            node=self.name,
            run=f"{JOB}.0",
            folder=str(self.folder),
            nodes=tuple(nodes),
            peers={node: at for node, at in peers.items() if node != self.name},
            token=ticket_for(self.record, partners, (KEY,), time.time()),
        )
        self.copies = Copies(
            dataclasses.replace(spec, **changes),
            log=lambda level, text: self.logged.append(f"{level} {text}"),
            is_flushed=lambda name, step, run: (name, step, run) in self.flushed,
            flush=lambda _, folder, manifest: self.flushes.append((folder, manifest)),
            on_sent=self._on_sent,
            streams=streams,
            clock=lambda: self.now,
            first_wait=0.05,
        )
        return self.copies

    def _on_sent(self, manifest: Manifest, count: int, _: float) -> None:
        self.sent.append((manifest, count))
        self.sent_event.set()

    def stop(self) -> None:
        self.server.stop()
        if self.copies:
            self.copies.close()

    def peer_steps(self, owner: str) -> list[str]:
        """Names of the step folders, whole ones, that are kept for another node."""
        place = self.folder / f".peer-{owner}"
        return sorted(p.name for p in place.glob("[!.]*")) if place.exists() else []


class Proxy:
    """Between a node and its partner: may cut, hold or change what goes to the partner."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        #: What becomes of bytes towards the partner: (number of the connection, first byte, bytes).
        self.alter: Callable[[int, int, bytes], bytes | None] = lambda number, at, data: data
        #: What becomes of bytes on their way back.
        self.alter_back: Callable[[bytes], bytes] = lambda data: data
        self.passed: list[int] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._socket.accept()
            except OSError:
                return
            host, port = self._target.rsplit(":", 1)
            self.passed.append(0)
            try:
                far = socket.create_connection((host, int(port)))
            except ConnectionRefusedError:  # nobody is there: so it is for who asked
                near.close()
                continue
            number = len(self.passed) - 1
            threading.Thread(target=self._forward, args=(near, far, number), daemon=True).start()
            threading.Thread(target=self._back, args=(far, near), daemon=True).start()

    def _forward(self, near: socket.socket, far: socket.socket, number: int) -> None:
        while True:
            try:
                data = near.recv(65536)
                passed = self.alter(number, self.passed[number], data) if data else None
                if passed is None:
                    break
                far.sendall(passed)
            except OSError:
                break
            self.passed[number] += len(data)
        _end(near)
        _end(far)

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        while True:
            try:
                data = far.recv(65536)
                if not data:
                    break
                near.sendall(self.alter_back(data))
            except OSError:
                break
        _end(near)

    def close(self) -> None:
        self._socket.close()


def _end(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def wait_until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for another thread or process; a failure says so instead of hanging."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def same_files(folder: Path, other: Path) -> bool:
    """Whether two step folders hold the same files, byte for byte."""
    names = sorted(p.name for p in folder.iterdir())
    return names == sorted(p.name for p in other.iterdir()) and all(
        (folder / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def main(path: str) -> None:
    """One node as a process: FILE says what it is, where it listens, what it sends or fetches.

    Prints its address, then what it logs; and for a fetch what came of it.
    """
    told = json.loads(Path(path).read_text())
    verbs.preload()  # as a worker does
    node = Node(told["name"], Path(told["folder"]), told.get("listen", "127.0.0.1:0"), seconds=60)
    copies = node.work(told["nodes"], told["peers"], transport=told.get("transport", "tcp"))
    print(node.address, flush=True)
    for step_folder in told.get("send", ()):
        (manifest,) = layout.read_parts(step_folder)
        copies.on_saved(step_folder, manifest)
    if "fetch" in told:
        print(copies.fetch("step", told["fetch"]), flush=True)
    shown = 0
    while True:
        for line in node.logged[shown:]:
            print(line, flush=True)
            shown += 1
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1])
