"""The daemon's part of copies: what a worker is told, whom the door lets in, and to whom."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_fakes import KEY, USER, wait_for
from peer_samples import make_part, record, same_files
from worker_fakes import Node as Fake

from crater_slurm.checkpoint.peers import ticket, transport
from crater_slurm.checkpoint.peers.handshake import RefusedError
from crater_slurm.config.checkpoints import Checkpoints
from crater_slurm.node import peer_door, peer_spec, worker_spec
from crater_slurm.node.jobs import ENDED
from crater_slurm.node.worker import Launcher
from crater_slurm.node.workers import Workers

#: Two nodes of one machine, whose names are their addresses.
ONE, TWO = "127.0.0.1", "127.0.0.2"


def free_port() -> int:
    with socket.create_server((ONE, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Node(Fake):
    """A daemon with real workers and the door for other nodes."""

    def __init__(self, folder: Path, name: str, port: int, uid: int) -> None:
        self.name = name
        folder.mkdir()
        super().__init__(folder, uid, peer_listen=f"{name}:{port}")

    def start(self) -> None:
        super().start()
        self.rings.stop()
        self.workers.stop()
        self.workers = Workers(self.services, Launcher(scope=False))
        self.workers.start()
        door = peer_door.server_of(self.services, self.workers)
        assert door is not None
        self.door = door
        self.door.start()

    def stop(self) -> None:
        self.door.stop()
        self.workers.stop()

    def has_job(self, nodes: str, phase: str = "prepared") -> Path:
        """Job 7 is, or was, here; its folder of checkpoints."""
        found = self.job()
        found.node, found.nodes, found.phase = self.name, nodes, phase
        found.user = "nobody" if self.uid else "root"
        if phase == ENDED:  # as a job that asked to be requeued leaves it
            found.checkpoints = {"used": True, "saved": True, "requeue": "r", "done": True}
        self.services.store.save(found)
        return Path(found.folders["checkpoint"])

    def own(self, path: Path) -> None:
        for below in (path, *path.rglob("*")):
            os.chown(below, self.uid, self.uid)


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    # Not in pytest's own folder, which every other run of pytest closes to other users.
    with tempfile.TemporaryDirectory(prefix="crater-peers-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        port = free_port()
        made = [Node(folder / name, name, port, USER) for name in (ONE, TWO)]
        yield made[0], made[1]
        for node in made:
            node.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="starts workers of another user")
@pytest.mark.parametrize("phase", ["prepared", ENDED])
def test_a_worker_gets_a_step_from_a_node_through_its_daemon(
    nodes: tuple[Node, Node], phase: str
) -> None:
    """The other node's worker is started for it, also when the job has ended there."""
    one, two = nodes
    one.has_job(f"{ONE},{TWO}")
    folder = two.has_job(f"{ONE},{TWO}", phase)
    path, _ = make_part(folder, 9, [0], world=1, node=TWO, run="7.0")
    two.own(folder)
    one.workers.hand_over(one.record(), {"op": "status", "id": "x"}, [])  # one is started
    answer = one.workers.ask("7", {"op": "restore", "name": "step", "step": None}, 60)
    assert (answer["step"], answer["source"], answer["error"]) == (9, "peer", None)
    assert same_files(Path(answer["folder"]), Path(path))
    assert (Path(answer["folder"]).stat().st_uid, Path(answer["folder"]).stat().st_gid) == (
        USER,
    ) * 2
    if phase == ENDED:
        assert wait_for(lambda: two.record().checkpoints.get("done") is True, 20)


def test_a_job_that_was_never_here_or_has_no_ring_lets_nobody_in(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    one.has_job(f"{ONE},{TWO}")
    text = peer_spec.fields(one.services, one.record(), (ONE, TWO))["token"]
    address = two.door.address
    with pytest.raises(RefusedError, match="not known"):
        transport.connect(address, text, TWO, transport.Carrier())
    two.has_job(f"{ONE},{TWO}")
    gone = two.record()
    gone.folders = {}
    two.services.store.save(gone)
    with pytest.raises(RefusedError, match="not known"):
        transport.connect(address, text, TWO, transport.Carrier())


def test_what_a_worker_is_told(nodes: tuple[Node, Node]) -> None:
    one, _ = nodes
    one.has_job(f"{ONE},{TWO}")
    place = worker_spec.destination(one.services, one.record())
    spec = worker_spec.build(one.services, one.record(), place)
    port = one.door.address.rpartition(":")[2]
    assert spec.peers == {TWO: f"{TWO}:{port}"}
    assert spec.transport == "tcp"
    body, secret = ticket.split(spec.token)
    shown, _ = ticket.check(body, ticket.prove(secret, "w"), ["w"], (KEY,), time.time())
    assert (shown.job_id, shown.uid, shown.node, shown.partners) == ("7", USER, ONE, (TWO,))
    assert KEY.hex() not in spec.to_json()


def test_without_copies_a_worker_is_told_nothing_of_them(tmp_path: Path) -> None:
    node = Fake(tmp_path)
    found = node.job()
    assert peer_spec.fields(node.services, found, ("n1", "n2")) == {}
    assert peer_door.server_of(node.services, node.workers) is None
    node.close()


def test_a_huge_job_s_spec_names_the_nearest_nodes_only(nodes: tuple[Node, Node]) -> None:
    one, _ = nodes
    names = tuple(f"n{number}" for number in range(5000))
    found = record("n4999", job_id="7")
    told = peer_spec.fields(one.services, found, names)["peers"]
    assert len(told) == 256
    assert {"n0", "n1", "n127", "n4998", "n4871"} <= told.keys()
    assert "n4999" not in told and "n2000" not in told


def test_a_node_whose_name_is_no_name_is_left_out(nodes: tuple[Node, Node]) -> None:
    one, _ = nodes
    told = peer_spec.fields(one.services, record("a", job_id="7"), ("a", "../x", "b"))
    assert list(told["peers"]) == ["b"]


def test_a_port_that_is_taken_costs_the_copies_and_not_the_daemon(
    nodes: tuple[Node, Node], caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = nodes
    assert peer_door.server_of(one.services, one.workers) is None
    assert "no copies are taken here" in caplog.text


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("peer_listen", ["", "0.0.0.0:9195", "[::]:9195"], ["9195", ":1", "h:0", "h:x", "h:70000"]),
        ("peer_host", ["%n", "%n-ib", "%n.ib.site"], ["", "n", "%n/", "%n:1", "%n %n"]),
        (
            "peer_transport",
            ["tcp", "rdma:mlx5_0", "rdma:mlx5_0:1:3"],
            ["", "rdma", "ib0", "rdma:a:b", "rdma:a:1:2:3", "tcp:1"],
        ),
    ],
)
def test_settings_are_checked(name: str, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert getattr(Checkpoints(**{name: text}), name) == text  # type: ignore[arg-type]
    for text in bad:
        with pytest.raises(ValueError, match=name):
            Checkpoints(**{name: text})  # type: ignore[arg-type]
