"""Who may talk to a job's worker on another node: genuine tickets, this job's, this user's."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_samples import JOB, KEY, UID, record, wait_until

from crater_slurm.checkpoint.peers import frames, ticket
from crater_slurm.checkpoint.peers.frames import TransportError
from crater_slurm.checkpoint.peers.handshake import RefusedError, Visitor, offer
from crater_slurm.checkpoint.peers.tcp import TcpConnection
from crater_slurm.checkpoint.peers.ticket import Ticket, TicketError
from crater_slurm.model.plan import Plan
from crater_slurm.model.token import SignedPlan, sign
from crater_slurm.node.jobs import JobRecord
from crater_slurm.node.peer_spec import ticket_for
from crater_slurm.node.peers import PeerServer

GOOD = Ticket(JOB, "c1", UID, "a", ("b",), 2000)


def show(text: str, keys: tuple[bytes, ...] = (KEY,), now: float = 1000) -> Ticket:
    body, secret = ticket.split(text)
    return ticket.check(body, ticket.prove(secret, "w"), ("w",), keys, now)[0]


def test_a_ticket_says_what_was_signed() -> None:
    assert show(ticket.issue(GOOD, KEY)) == GOOD


def test_an_older_key_still_counts_while_keys_are_changed() -> None:
    assert show(ticket.issue(GOOD, KEY), keys=(b"n" * 32, KEY)) == GOOD


def test_a_ticket_ends() -> None:
    with pytest.raises(TicketError, match="ended at 2000"):
        show(ticket.issue(GOOD, KEY), now=2000)


def test_another_cluster_s_key_signs_nothing_here() -> None:
    with pytest.raises(TicketError, match="plan key"):
        show(ticket.issue(GOOD, b"x" * 32))


def test_the_open_half_is_no_ticket_and_does_not_hold_the_secret() -> None:
    body, secret = ticket.split(ticket.issue(GOOD, KEY))
    with pytest.raises(TicketError):
        ticket.split(body)
    with pytest.raises(TicketError, match="plan key"):
        ticket.check(body, "", ("w",), (KEY,), 0)
    assert ticket.split(ticket.issue(GOOD, KEY)) == (body, secret)


def test_a_plan_token_of_the_same_key_is_no_ticket() -> None:
    token = sign(SignedPlan(Plan(id="p"), UID, "c1", 1000), KEY)
    with pytest.raises(TicketError):
        ticket.split(token.removeprefix("crater-plan:"))


@given(st.integers(0, 10**6), st.characters(codec="ascii"))
def test_a_changed_ticket_is_none(at: int, letter: str) -> None:
    body, secret = ticket.split(ticket.issue(GOOD, KEY))
    at %= len(body)
    changed = body[:at] + letter + body[at + 1 :]
    if changed != body:
        with pytest.raises(TicketError):
            ticket.check(changed, ticket.prove(secret, "w"), ("w",), (KEY,), 0)


@given(st.text(max_size=300), st.text(max_size=100))
def test_no_text_of_a_stranger_is_a_ticket(body: str, proof: str) -> None:
    with pytest.raises(TicketError):
        ticket.split(body)
    with pytest.raises(TicketError):
        ticket.check(body, proof.encode("ascii", "replace").decode(), ("w",), (KEY,), 0)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "-a", "a..b", "x" * 65, 7, None])
def test_what_is_no_node_s_name(name: object) -> None:
    assert not ticket.is_node(name)


class Door:
    """A daemon's door on node b, and what it let through."""

    def __init__(self, job: JobRecord, seconds: float = 5.0) -> None:
        self.let_in: list[tuple[str, bool]] = []
        self.server = PeerServer(
            "127.0.0.1:0",
            keys=lambda: (KEY,),
            job=lambda job_id: job if job_id == job.job_id else None,
            hand_over=lambda _, __, node, may_put: self.let_in.append((node, may_put)),
            seconds=seconds,
        )
        self.server.start()

    def call(self, text: str, to: str = "b") -> None:
        with self.plain() as plain:
            offer(TcpConnection(plain, 5), text, to, 5)
        wait_until(lambda: self.let_in)

    def plain(self) -> socket.socket:
        host, port = self.server.address.split(":")
        return socket.create_connection((host, int(port)), timeout=5)


@pytest.fixture
def door() -> Iterator[Door]:
    found = Door(record("b"))
    yield found
    found.server.stop()


def of_a(partners: tuple[str, ...] = ("b",), **changes: object) -> str:
    return ticket_for(record("a", **changes), partners, (KEY,), time.time())


def test_the_partner_of_the_ticket_may_bring_parts(door: Door) -> None:
    door.call(of_a())
    assert door.let_in == [("a", True)]


def test_another_node_of_the_job_may_only_read(door: Door) -> None:
    door.call(of_a(("c",)))
    assert door.let_in == [("a", False)]


@pytest.mark.parametrize(
    ("text", "to", "said"),
    [
        (of_a(uid=UID + 1), "b", "another user's"),
        (of_a(cluster="c2"), "b", "another user's or cluster's"),
        (of_a(job_id="1"), "b", "not known on this node"),
        (of_a(), "c", "This node is b, not 'c'"),
        (ticket_for(record("b"), ("b",), (KEY,), time.time()), "b", "this node's own"),
        (ticket_for(record("a"), ("b",), (KEY,), 0), "b", "ended at"),
        (ticket_for(record("a"), ("b",), (b"x" * 32,), time.time()), "b", "says: no"),
    ],
)
def test_what_is_turned_away(door: Door, text: str, to: str, said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        door.call(text, to)
    assert door.let_in == []


def test_what_was_overheard_opens_no_second_connection(door: Door) -> None:
    body, secret = ticket.split(of_a())
    with door.plain() as plain:
        talk = TcpConnection(plain, 5)
        nonce = talk.receive(0, 5)[0]["nonce"]
        proof = ticket.prove(secret, "client", "b", nonce, "n")
        shown = {"op": "ticket", "ticket": body, "to": "b", "nonce": "n", "proof": proof}
        talk.send(shown)
        assert talk.receive(0, 5)[0]["op"] == "welcome"
    wait_until(lambda: door.let_in)
    with door.plain() as plain:
        talk = TcpConnection(plain, 5)
        talk.receive(0, 5)
        talk.send(shown)
        assert talk.receive(0, 5)[0] == {"op": "refused", "error": "no"}
    assert len(door.let_in) == 1


def test_a_worker_trusts_no_address_that_somebody_else_has_taken() -> None:
    near, far = socket.socketpair()
    impostor = TcpConnection(far, 5)
    impostor.send({"op": "hello", "version": 1, "nonce": "1"})
    impostor.send({"op": "welcome", "proof": "0" * 64})
    with pytest.raises(RefusedError, match="can't prove"):
        offer(TcpConnection(near, 5), of_a(), "b", 5)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", frames.encode({"op": "put"})])
def test_a_stranger_who_says_nothing_good_is_gone_soon(said: bytes) -> None:
    door = Door(record("b"), seconds=0.1)
    with door.plain() as plain:
        plain.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while plain.recv(4096):
                pass  # the greeting, and then the end
    assert door.let_in == []
    door.server.stop()


def test_one_host_can_t_take_every_place() -> None:
    door = Door(record("b"), seconds=60)
    held = [door.plain() for _ in range(32)]
    for plain in held:
        assert plain.recv(1) == b"C"  # has a thread
    with door.plain() as late:
        assert late.recv(1) == b""
    for plain in held:
        plain.close()
    door.server.stop()


def test_without_a_plan_key_there_are_no_tickets() -> None:
    assert ticket_for(record("a"), ("b",), (), 0) == ""
    assert ticket_for(record(""), ("b",), (KEY,), 0) == ""


@given(st.binary(max_size=200))
def test_hostile_bytes_end_the_meeting_and_nothing_else(data: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        with pytest.raises((TransportError, TicketError)):
            Visitor(TcpConnection(far, 1)).meet((KEY,), 0, 1)
