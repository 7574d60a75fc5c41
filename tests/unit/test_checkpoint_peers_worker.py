"""Two real workers in processes of their own: a trainer saves on one node, the other keeps it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_worker import Daemon, Trainer, a_spec
from peer_samples import KEY, make_part, record, same_files, wait_until
from peer_samples import Node as Peer

from crater_slurm.checkpoint.folder import LocalStep
from crater_slurm.checkpoint.onward import Onward
from crater_slurm.checkpoint.peers.lost import LostNode
from crater_slurm.checkpoint.peers.services import WithCopies
from crater_slurm.checkpoint.peers.store import PeerStore, key_of
from crater_slurm.checkpoint.services import Nothing
from crater_slurm.checkpoint.spec import Remote, Spec
from crater_slurm.job import layout
from crater_slurm.job.layout import Manifest
from crater_slurm.node.jobs import JobRecord
from crater_slurm.node.peer_spec import ticket_for
from crater_slurm.node.peers import PeerServer
from crater_slurm.node.worker import WorkerError


class Node:
    """A node: the daemon's door, the daemon's end of the worker, the worker."""

    def __init__(self, name: str, place: Path) -> None:
        self.name, self.place = name, place
        self.folder = place / "job"
        self.folder.mkdir(parents=True)
        self.record = record(name, uid=os.getuid())
        self.server = PeerServer(
            "127.0.0.1:0", keys=lambda: (KEY,), job=lambda _: self.record, hand_over=self._hand_over
        )
        self.server.start()
        self.daemon: Daemon | None = None

    def _hand_over(self, _: JobRecord, plain: socket.socket, node: str, may_put: bool) -> None:
        assert self.daemon is not None
        self.daemon.send({"op": "peer", "node": node, "put": may_put}, (plain.fileno(),))

    def start(self, nodes: dict[str, str]) -> None:
        spec = a_spec(
            self.folder,
            node=self.name,
            nodes=tuple(nodes),
            peers={node: at for node, at in nodes.items() if node != self.name},
            token=ticket_for(self.record, nodes, (KEY,), time.time()),
        )
        self.daemon = Daemon(self.place, spec)
        self.daemon.start()

    def stop(self) -> None:
        self.server.stop()
        if self.daemon:
            self.daemon.stop()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    nodes = [Node(name, tmp_path / name) for name in ("n1", "n2")]
    addresses = {node.name: node.server.address for node in nodes}
    for node in nodes:
        node.start(addresses)
    yield nodes[0], nodes[1]
    for node in nodes:
        node.stop()


DATA = [os.urandom(3_000_000), os.urandom(3_000_000)]


def test_what_a_trainer_saves_outlives_its_node(pair: tuple[Node, Node]) -> None:
    one, two = pair
    assert one.daemon and two.daemon
    for rank, node in enumerate(pair):
        assert node.daemon
        trainer = Trainer(node.daemon, rank=rank, world=2)
        trainer.saved(trainer.save(40, DATA[rank], local=1))
    kept = two.folder / ".peer-n1" / "step-000000040.4711.0"
    wait_until(kept.exists, 60)
    assert same_files(one.folder / "step-000000040", kept)
    wait_until((one.folder / ".peer-n2" / "step-000000040.4711.0").exists, 60)

    one.daemon.kill()
    shutil.rmtree(one.folder)
    one.folder.mkdir()
    one.start({"n1": one.server.address, "n2": two.server.address})
    trainer = Trainer(one.daemon, rank=0, world=2)
    trainer.send("restore", name="step", step=None, ranks=[0])
    answer = trainer.hear("restored")
    assert (answer["step"], answer["run"], answer["source"]) == (40, "4711.0", "peer"), answer
    assert (Path(answer["folder"]) / "rank-00000.safetensors").read_bytes() == DATA[0]
    trainer.send("restore", name="step", step=None)
    answer = trainer.hear("restored")
    assert answer["folder"], answer["error"]
    assert (Path(answer["folder"]) / "rank-00001.safetensors").read_bytes() == DATA[1]


def test_workers_with_copies_end_when_the_job_has(pair: tuple[Node, Node]) -> None:
    for node in pair:
        assert node.daemon
        node.daemon.send({"op": "ended"})
    for node in pair:
        assert node.daemon and node.daemon.process
        assert node.daemon.process.wait(60) == 0
        node.daemon.hear("state", done=True)


class Flusher:
    """Stands for the destination: what is given is there once ``there`` says so."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.there, self.stopped = spec, False, False
        self.given: list[tuple[str, int]] = []

    def add(self, folder: str, manifest: Manifest) -> None:
        assert os.path.dirname(folder) == self.spec.folder
        self.given.append((manifest.node, manifest.step))

    def flushed(self, name: str, step: int, run: str) -> bool:
        return self.there

    def stop(self) -> None:
        self.stopped = True


def test_a_lost_node_s_part_keeps_the_worker_until_it_is_at_the_destination(
    pair: tuple[Node, Node],
) -> None:
    one, two = pair
    assert one.daemon and two.daemon
    trainer = Trainer(one.daemon, rank=0, world=1)
    trainer.saved(trainer.save(40, DATA[0]))
    wait_until((two.folder / ".peer-n1" / "step-000000040.4711.0").exists, 60)
    one.stop()
    two.daemon.kill()

    made: list[Flusher] = []
    now = [0.0]
    services = WithCopies(
        _with_remote(two.daemon.spec),
        Nothing(),
        lambda: None,
        lambda level, text: None,
        lambda spec: made.append(Flusher(spec)) or made[-1],  # type: ignore[func-returns-value]
        clock=lambda: now[0],
        round_seconds=0.01,
    )
    services.start()
    services.ended()
    assert not services.idle

    def later() -> bool:
        """Time goes on while the owner does not answer."""
        now[0] += 100.0
        return bool(made and made[0].given)

    wait_until(later)
    assert made[0].given == [("n1", 40)]
    assert made[0].spec.node == "n1" and made[0].spec.folder == str(two.folder / ".peer-n1")
    assert not services.idle
    made[0].there = True
    wait_until(lambda: services.idle)
    services.stop()
    assert made[0].stopped


def _with_remote(spec: Spec) -> Spec:
    return dataclasses.replace(spec, remote=Remote(url="/shared"))


def test_a_lost_node_s_part_lies_whole_at_a_real_destination(tmp_path: Path) -> None:
    """Node a's partner b brings a's part into a folder, with the flusher that b has for its own."""
    a, b = Peer("a", tmp_path / "a"), Peer("b", tmp_path / "b")
    b.work(["a", "b"], {})
    copies = a.work(["a", "b"], {"b": b.address})
    path, manifest = make_part(a.folder, 3, [0], world=1, node="a")
    copies.on_saved(path, manifest)
    wait_until(lambda: a.sent)
    a.stop()
    b.stop()
    shutil.rmtree(a.folder)
    target = tmp_path / "shared"
    target.mkdir()
    now = [0.0]
    spec = a_spec(b.folder, node="b", nodes=("a", "b"), remote=Remote(url=str(target)))
    logged: list[str] = []

    def log(level: str, text: str) -> None:
        logged.append(f"{level} {text}")

    services = WithCopies(
        spec,
        Onward(spec, lambda: None, log),
        lambda: None,
        log,
        lambda lost: LostNode(lost, lambda: None, log),
        clock=lambda: now[0],
        round_seconds=0.01,
    )
    services.start()
    services.ended()

    def there() -> bool:
        now[0] += 100.0
        return services.idle

    wait_until(there, 60)
    services.stop()
    final = target / "step-000000003"
    assert layout.covers(layout.read_parts(str(final))), logged
    (entry,) = manifest.files
    assert layout.check_file(str(final / entry.name), entry) == ""
    assert any("a is lost; step 3" in line for line in logged)


def test_the_partner_is_told_of_what_is_at_the_destination(tmp_path: Path) -> None:
    a, b = Peer("a", tmp_path / "a"), Peer("b", tmp_path / "b")
    b.work(["a", "b"], {})
    (tmp_path / "shared").mkdir()
    spec = a_spec(
        a.folder,
        node="a",
        nodes=("a", "b"),
        peers={"b": b.address},
        token=ticket_for(a.record, ["b"], (KEY,), time.time()),
        remote=Remote(url=str(tmp_path / "shared")),
    )
    log: list[str] = []
    inner = Onward(spec, lambda: None, lambda level, text: log.append(text))
    services = WithCopies(
        spec,
        inner,
        lambda: None,
        lambda level, text: log.append(text),
        lambda lost: LostNode(lost, lambda: None, lambda level, text: log.append(text)),
        round_seconds=0.01,
    )
    services.start()
    path, manifest = make_part(a.folder, 3, [0], world=1, node="a")
    services.saved(path, manifest)
    store = PeerStore(str(b.folder))
    wait_until(lambda: store.is_flushed("a", key_of(manifest)), 60)
    services.ended()
    wait_until(lambda: services.idle, 60)
    services.stop()
    b.stop()


def test_a_partner_that_is_away_keeps_no_worker_for_ever(tmp_path: Path) -> None:
    now = [0.0]
    spec = a_spec(
        tmp_path / "a",
        node="a",
        nodes=("a", "b"),
        peers={"b": "127.0.0.1:1"},
        token=ticket_for(record("a"), ["b"], (KEY,), time.time()),
    )
    path, manifest = make_part(tmp_path / "a", 3, [0], world=1)
    services = WithCopies(
        spec,
        Nothing(),
        lambda: None,
        lambda level, text: None,
        clock=lambda: now[0],
        round_seconds=0.01,
    )
    services.start()
    services.saved(path, manifest)
    services.ended()
    wait_until(lambda: not services._waiting)
    assert not services.idle
    now[0] = 121.0
    assert services.idle
    services.stop()


def test_a_node_s_own_saves_come_before_its_copies_for_others(tmp_path: Path) -> None:
    spec = a_spec(tmp_path, node="b", nodes=("a", "b"))
    for step in (1, 2, 3):
        make_part(tmp_path / ".peer-a", step, [0], world=1)
    services = WithCopies(spec, Nothing(), lambda: None, lambda level, text: None)
    services.start()

    def kept() -> list[str]:
        return sorted(path.name[-1] for path in (tmp_path / ".peer-a").glob("step-*"))

    assert services.removable([], 0) == [] and kept() == ["1", "2", "3"]
    assert services.removable([], 150_000) == [] and kept() == ["3"]
    assert services.removable([], 1) == [] and kept() == []
    services.stop()


class Far(Nothing):
    """A destination with step 7 that may be away."""

    def __init__(self, away: bool = False) -> None:
        self.away = away
        self.fetched: list[int] = []

    def available(self, name: str) -> list[tuple[int, str, float]]:
        if self.away:
            raise OSError("away")
        return [(7, "4711.0", 7.0), (5, "4711.0", 5.0)]

    def fetch(self, name: str, step: int, run: str, ranks: list[int] | None) -> tuple[str, str]:
        self.fetched.append(step)
        return "/far", "remote"

    def removable(self, steps: Any, over_bytes: int) -> list[LocalStep]:
        return []


def test_the_nodes_are_asked_before_the_destination(tmp_path: Path) -> None:
    other = Peer("a", tmp_path / "a")
    other.work(["a", "b"], {})
    make_part(other.folder, 7, [0], world=1)
    spec = a_spec(
        tmp_path / "b",
        node="b",
        nodes=("b",),
        uid=other.record.uid,
        peers={"a": other.address},
        token=ticket_for(record("b"), (), (KEY,), time.time()),
    )
    (tmp_path / "b").mkdir()
    far = Far()
    services = WithCopies(spec, far, lambda: None, lambda level, text: None)
    services.start()
    assert services.available("step") == [(7, "4711.0", 7.0), (5, "4711.0", 5.0)]
    folder, source = services.fetch("step", 7, "4711.0", None)
    assert source == "peer" and (Path(folder) / "rank-00000.safetensors").exists()
    assert services.fetch("step", 5, "4711.0", None) == ("/far", "remote")
    assert far.fetched == [5]
    far.away = True
    assert services.available("step") == [(7, "4711.0", 7.0)]
    other.stop()
    services._copies = None
    with pytest.raises(OSError, match="away"):
        services.available("step")
    services.stop()


def test_a_worker_that_can_t_be_reached_costs_the_visitor_its_connection(tmp_path: Path) -> None:
    """The door stays open for the next one."""
    from crater_slurm.checkpoint.peers import transport
    from crater_slurm.checkpoint.peers.frames import TransportError

    calls: list[str] = []

    def fails(*_: object) -> None:
        calls.append("x")
        raise TransportError(str(WorkerError("reach the worker")))

    server = PeerServer(
        "127.0.0.1:0", keys=lambda: (KEY,), job=lambda _: record("b"), hand_over=fails
    )
    server.start()
    text = ticket_for(record("a"), ("b",), (KEY,), time.time())
    for count in (1, 2):
        with pytest.raises(TransportError, match="closed the connection|reset by peer"):
            transport.connect(server.address, text, "b", transport.Carrier())
        assert len(calls) == count
    server.stop()
