"""RDMA's own rules (slots, credits, falling back) over memory that stands for the adapter.

Real verbs run in the guest: tests/vm/test_rdma.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crater_slurm.checkpoint.peers import frames, transport, verbs
from crater_slurm.checkpoint.peers.frames import TransportError
from crater_slurm.checkpoint.peers.rdma import RdmaConnection
from crater_slurm.checkpoint.peers.tcp import TcpConnection
from crater_slurm.checkpoint.peers.transport import Carrier
from crater_slurm.checkpoint.peers.verbs import RdmaError

SLOT = 8192
CARRIER = Carrier("rdma", "fake0", slot_bytes=SLOT, slots=3)


class Completions:
    """Counts what has completed; its descriptor is readable when there is something."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._count = 0

    def add(self) -> None:
        with self._lock:
            self._count += 1
        os.eventfd_write(self.fd, 1)

    def take(self) -> int:
        with self._lock:
            count, self._count = self._count, 0
        return count

    def rearm(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)


class Slots:
    def __init__(self, carrier: Carrier) -> None:
        self.bytes = carrier.slot_bytes
        self.memory = bytearray(carrier.slots * carrier.slot_bytes)

    def view(self, slot: int) -> memoryview:
        return memoryview(self.memory)[slot * self.bytes : (slot + 1) * self.bytes]


class Endpoint:
    """An adapter whose other end is in this process. Breaks the rules: an assertion, not a hang."""

    def __init__(self, carrier: Carrier = CARRIER) -> None:
        self.carrier, self.verbs = carrier, SimpleNamespace(errors=(OSError,))
        self.incoming, self.outgoing = Slots(carrier), Slots(carrier)
        self.sent, self.arrived = Completions(), Completions()
        self.other: Endpoint | None = None
        self.expected = 0
        self.closed = False

    def card(self) -> dict[str, Any]:
        slots, size = self.carrier.slots, self.carrier.slot_bytes
        return {"address": 0, "rkey": 7, "slots": slots, "slot_bytes": size}

    def join(self, card: dict[str, Any]) -> None:
        self.expected = self.carrier.slots

    def expect(self) -> None:
        self.expected += 1

    def write(self, slot: int, length: int, address: int, rkey: int) -> None:
        assert rkey == 7 and self.other is not None
        assert self.other.expected > 0, "written into a slot that has not been read"
        self.other.expected -= 1
        self.other.incoming.memory[address : address + length] = self.outgoing.view(slot)[:length]
        self.sent.add()
        self.other.arrived.add()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def ends() -> Iterator[tuple[RdmaConnection, RdmaConnection]]:
    yield from make()


def make(
    near_carrier: Carrier = CARRIER, far_carrier: Carrier = CARRIER
) -> Iterator[tuple[RdmaConnection, RdmaConnection]]:
    near_socket, far_socket = socket.socketpair()
    near, far = Endpoint(near_carrier), Endpoint(far_carrier)
    near.other, far.other = far, near
    near.join({})
    far.join({})
    pair = (
        RdmaConnection(TcpConnection(near_socket, 10), near, far.card()),  # type: ignore[arg-type]
        RdmaConnection(TcpConnection(far_socket, 10), far, near.card()),  # type: ignore[arg-type]
    )
    yield pair
    for end in pair:
        end.close()


def pieces(count: int, size: int = SLOT) -> list[bytes]:
    return [os.urandom(size - (number % 2)) for number in range(count)]


@pytest.mark.parametrize("far_slots", [1, 2, 3, 8])
def test_many_pieces_through_few_slots_arrive_in_order(far_slots: int) -> None:
    (ends,) = list(_kept(make(far_carrier=Carrier("rdma", "f", slot_bytes=SLOT, slots=far_slots))))
    near, far = ends
    sent = pieces(50)
    thread = threading.Thread(
        target=lambda: [
            near.send({"op": "data", "n": n}, [memoryview(p)]) for n, p in enumerate(sent)
        ]
    )
    thread.start()
    for number, piece in enumerate(sent):
        header, data = far.receive(SLOT, 10)
        assert header["n"] == number and bytes(data) == piece
    thread.join()


def _kept(made: Iterator[Any]) -> Iterator[Any]:
    """The first of a generator whose end comes with the test's."""
    yield next(made)


def test_answers_and_pieces_travel_both_ways(ends: tuple[RdmaConnection, RdmaConnection]) -> None:
    near, far = ends

    def serve() -> None:
        while True:
            header, data = far.receive(SLOT, 10)
            if header["op"] == "end":
                return
            far.send({"op": "back", "n": header["n"]}, [memoryview(bytes(data))])

    thread = threading.Thread(target=serve)
    thread.start()
    for number, piece in enumerate(pieces(20)):
        near.send({"op": "data", "n": number}, [memoryview(piece)])
        header, data = near.receive(SLOT, 10)
        assert header["n"] == number and bytes(data) == piece
    near.send({"op": "end"})
    thread.join()


def test_a_word_of_the_other_end_amid_pieces_is_not_lost(
    ends: tuple[RdmaConnection, RdmaConnection],
) -> None:
    near, far = ends
    far.send({"op": "refused", "error": "no room"})
    thread = threading.Thread(
        target=lambda: [near.send({"op": "data"}, [memoryview(p)]) for p in pieces(6)]
    )
    thread.start()
    for _ in range(6):
        assert far.receive(SLOT, 10)[0]["op"] == "data"
    thread.join()
    assert near.receive(0, 10)[0] == {"op": "refused", "error": "no room"}


def test_what_is_small_or_larger_than_a_slot_goes_by_tcp(
    ends: tuple[RdmaConnection, RdmaConnection], tmp_path: Any
) -> None:
    near, far = ends
    for size in (0, 1, 4095, SLOT + 1, 5 * SLOT):
        piece = os.urandom(size)
        (tmp_path / "f").write_bytes(piece)
        near.send({"op": "x"}, [memoryview(piece)])
        header, data = far.receive(6 * SLOT, 10)
        assert "rdma" not in header and bytes(data) == piece
        with open(tmp_path / "f", "rb") as file:
            near.send_file({"op": "x"}, file.fileno(), 0, size)
        assert bytes(far.receive(6 * SLOT, 10)[1]) == piece


def test_a_piece_of_a_file_goes_through_a_slot(
    ends: tuple[RdmaConnection, RdmaConnection], tmp_path: Any
) -> None:
    near, far = ends
    (tmp_path / "f").write_bytes(os.urandom(3 * SLOT))
    with open(tmp_path / "f", "rb") as file:
        near.send_file({"op": "x"}, file.fileno(), 100, SLOT)
        header, data = far.receive(SLOT, 10)
        assert header["rdma"] == SLOT
        assert bytes(data) == (tmp_path / "f").read_bytes()[100 : 100 + SLOT]
        with pytest.raises(TransportError, match="beyond its end"):
            near.send_file({"op": "x"}, file.fileno(), 3 * SLOT - 10, SLOT)


def test_the_end_of_the_connection_ends_every_wait(
    ends: tuple[RdmaConnection, RdmaConnection],
) -> None:
    near, far = ends
    for piece in pieces(3):
        near.send({"op": "data"}, [memoryview(piece)])
    far.abort()
    with pytest.raises(TransportError):
        near.send({"op": "data"}, [memoryview(pieces(1)[0])])
    ours, theirs = socket.socketpair()
    alone = RdmaConnection(TcpConnection(ours, 10), Endpoint(), Endpoint().card())  # type: ignore[arg-type]
    theirs.sendall(frames.encode({"op": "data", "rdma": SLOT}))
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(TransportError, match="closed the connection"):
        alone.receive(SLOT, 10)


def test_a_piece_longer_than_was_asked_for_or_than_a_slot_is_refused(
    ends: tuple[RdmaConnection, RdmaConnection],
) -> None:
    near, far = ends
    near.send({"op": "data"}, [memoryview(pieces(1)[0])])
    with pytest.raises(TransportError, match="rdma="):
        far.receive(SLOT - 1, 10)
    near._control.send({"op": "data", "rdma": SLOT + 1})
    with pytest.raises(TransportError, match="rdma="):
        far.receive(10 * SLOT, 10)


VALUES = st.one_of(st.none(), st.integers(-1, 2**65), st.text(max_size=5))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # however busy the machine
@given(st.dictionaries(st.sampled_from(["address", "rkey", "slots", "slot_bytes"]), VALUES))
def test_a_hostile_card_is_an_error(card: dict[str, object]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.suppress(TransportError):
        made = RdmaConnection(TcpConnection(ours), Endpoint(), card)  # type: ignore[arg-type]
        assert 1 <= made._their_slots <= 64 and made._their_bytes <= 64 << 20


def test_without_pyverbs_the_reason_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    with pytest.raises(RdmaError, match="python3-pyverbs"):
        verbs.Endpoint(Carrier("rdma", "mlx5_0"))


class Adapter:
    """A device as pyverbs shows it, up to what an endpoint asks it first."""

    def __init__(
        self, state: int = 4, gid: str = "fe80:0000:0000:0000:0000:0000:0000:0001"
    ) -> None:
        self.state, self.gid, self.closed = state, gid, False

    def query_port(self, port: int) -> Any:
        return SimpleNamespace(state=self.state, lid=0, active_mtu=3)

    def query_gid(self, port: int, index: int) -> str:
        return self.gid

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        (Adapter(gid=":".join(8 * ["0000"])), "can't be used: port 1 has no GID 99."),
        (Adapter(gid="::"), "can't be used: port 1 has no GID 99."),
        (Adapter(state=1), "can't be used: port 1 is not active."),
        (Adapter(), "can't be used: no memory."),
    ],
)
def test_what_is_wrong_with_this_end_is_said_of_this_end(
    monkeypatch: pytest.MonkeyPatch, adapter: Adapter, reason: str
) -> None:
    def no_domain(context: object) -> Any:
        raise OSError("no memory")

    fake = SimpleNamespace(
        errors=(OSError,),
        device=SimpleNamespace(Context=lambda name: adapter),
        pd=SimpleNamespace(PD=no_domain),
    )
    monkeypatch.setattr(verbs, "Verbs", lambda: fake)
    with pytest.raises(RdmaError) as raised:
        verbs.Endpoint(Carrier("rdma", "mlx5_0", 1, 99))
    assert str(raised.value) == f"RDMA device mlx5_0 {reason}"
    assert adapter.closed


def _arranged(
    monkeypatch: pytest.MonkeyPatch, client: Any, server: Any, *, server_kind: str = "rdma"
) -> tuple[transport.Connection, transport.Connection]:
    """Both ends of a connection, when these stand for the devices (or raise RdmaError)."""
    monkeypatch.setattr(
        verbs, "Endpoint", lambda carrier: (client if carrier.port == 1 else server)()
    )
    near, far = socket.socketpair()
    found: list[transport.Connection] = []
    thread = threading.Thread(
        target=lambda: found.append(transport.accept(far, Carrier(server_kind, "fake0", 2)))
    )
    thread.start()
    monkeypatch.setattr(transport, "_reach", lambda *_: TcpConnection(near))
    mine = transport.connect("b:1", "ticket", "b", Carrier("rdma", "fake0", 1))
    thread.join()
    return mine, found[0]


def missing() -> Any:
    raise RdmaError("RDMA device fake0 can't be used: it is not there.")


class Odd(Endpoint):
    """A device that can't be joined to the other."""

    def join(self, card: dict[str, Any]) -> None:
        raise TransportError("join: no route")


@pytest.mark.parametrize(
    ("client", "server", "kind", "name", "reason"),
    [
        (Endpoint, Endpoint, "rdma", "rdma", ""),
        (missing, Endpoint, "rdma", "tcp", "it is not there"),
        (Endpoint, missing, "rdma", "tcp", "the other node: .*it is not there"),
        (Endpoint, Endpoint, "tcp", "tcp", "the other node: RDMA is off on this node"),
        (Endpoint, Odd, "rdma", "tcp", "the other node: RDMA could not be arranged.*no route"),
    ],
)
def test_both_ends_agree_on_what_carries(
    monkeypatch: pytest.MonkeyPatch, client: Any, server: Any, kind: str, name: str, reason: str
) -> None:
    near, far = _arranged(monkeypatch, client, server, server_kind=kind)
    assert (near.name, far.name) == (name, name)
    assert re.search(reason, near.reason)
    near.send({"op": "x"})
    assert far.receive(0, 10)[0] == {"op": "x"}
    near.close()
    far.close()
