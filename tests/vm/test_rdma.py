# SPDX-License-Identifier: Apache-2.0
"""Copies between nodes by RDMA: two workers in one guest, over soft-RoCE on its own network card.

What is emulated here is slow; what is seen is that queue pairs, registered memory, completions and
credits of real verbs carry parts whole, and that whatever is missing leads to TCP.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from .errors import GuestError
from .guest import Guest
from .node import SOURCE, push_source

PROGRAM = Path(__file__).resolve().parents[1] / "unit" / "peer_samples.py"
PLACE = "/var/tmp/peers"
SIZE = 45_000_000
"""Six pieces, through four slots."""

_ports = itertools.count(9300)


@pytest.fixture(scope="module")
def rdma(guest: Guest) -> str:
    """The transport to name: the soft-RoCE device, with the index of its IPv4 GID."""
    guest.check(  # the bed's own kernel has it: nothing here may be skipped
        "set -e; modprobe rdma_rxe; card=$(basename $(ls -d /sys/class/net/e*))\n"
        "rdma link show rxe0/1 >/dev/null 2>&1 || rdma link add rxe0 type rxe netdev $card"
    )
    gids = "/sys/class/infiniband/rxe0/ports/1/gids"
    index = guest.check(f"grep -l :ffff: {gids}/* | head -n 1 | xargs basename")
    push_source(guest)
    guest.write(f"{SOURCE}/peer_samples.py", PROGRAM.read_text("utf-8"))
    return f"rdma:rxe0:1:{index}"


@dataclasses.dataclass(frozen=True)
class Worker:
    """A node's daemon and worker in one process of the guest."""

    guest: Guest
    name: str
    address: str

    def log(self) -> str:
        return self.guest.read(f"{PLACE}/{self.name}.log")

    def wait_for(self, text: str) -> None:
        """Wait until it has said something; a failure shows what it said instead."""
        try:
            self.guest.wait_for(f"grep -qF {shlex.quote(text)} {PLACE}/{self.name}.log", 240)
        except GuestError as error:
            raise GuestError(f"{error}\n{self.log()}") from error

    def came_by(self) -> str:
        """What it says of the transport to node b, once it does."""
        self.wait_for("info peers: b by ")
        return self.log().partition("info peers: b by ")[2].splitlines()[0]

    def kill(self) -> None:
        self.guest.check(f"kill -9 $(cat {PLACE}/{self.name}.pid); sleep 0.2")


def start(guest: Guest, name: str, *, limit_kib: int = 0, **told: object) -> Worker:
    """Start node a or b; with ``limit_kib`` as alice, who may lock only so much memory."""
    address = f"127.0.0.1:{next(_ports)}"
    spec = {"name": name, "folder": f"{PLACE}/{name}", "listen": address, "nodes": ["a", "b"]}
    guest.write(f"{PLACE}/{name}.json", json.dumps({**spec, **told}))
    command = f"python3 -u {SOURCE}/peer_samples.py {PLACE}/{name}.json"
    if limit_kib:
        command = (
            f"prlimit --memlock={limit_kib * 1024} setpriv --reuid alice --clear-groups {command}"
        )
    guest.check(
        f"cd /; PYTHONPATH={SOURCE} {command} >{PLACE}/{name}.log 2>&1 </dev/null &\n"
        f"echo $! >{PLACE}/{name}.pid"
    )
    worker = Worker(guest, name, address)
    worker.wait_for(address)
    return worker


@pytest.fixture(scope="module")
def made(guest: Guest, rdma: str) -> Iterator[str]:
    """A folder with a part of node a, to be copied: an emulated machine takes long to make it."""
    code = (
        "from pathlib import Path; from peer_samples import make_part; "
        f"make_part(Path('{PLACE}.made'), 7, [0], world=1, size={SIZE})"
    )
    guest.check(f'rm -rf {PLACE}.made; cd {SOURCE} && PYTHONPATH=. python3 -c "{code}"')
    yield f"{PLACE}.made"
    guest.check(f"rm -rf {PLACE} {PLACE}.made")


@pytest.fixture
def part(guest: Guest, made: str) -> Iterator[str]:
    """A part on node a: its step's folder. Whatever runs at the end is ended."""
    guest.check(f"rm -rf {PLACE}; mkdir -p {PLACE}/b; cp -r {made} {PLACE}/a; chmod -R 777 {PLACE}")
    yield f"{PLACE}/a/step-000000007"
    guest.run(f"for pid in $(cat {PLACE}/*.pid); do kill -9 $pid; done")


def same(guest: Guest, one: str, other: str) -> bool:
    return guest.run(f"diff -r {one} {other}").rc == 0


KEPT = f"{PLACE}/b/.peer-a/step-000000007.4711.0"


def test_a_part_goes_to_the_partner_by_rdma(guest: Guest, rdma: str, part: str) -> None:
    b = start(guest, "b", peers={}, transport=rdma)
    a = start(guest, "a", peers={"b": b.address}, transport=rdma, send=[part])
    b.wait_for("keeps step-000000007.4711.0")
    assert a.came_by() == "rdma"
    assert same(guest, part, KEPT)


def test_a_part_comes_back_by_rdma(guest: Guest, rdma: str, part: str) -> None:
    """Node a has the step, node b lacks it: the data goes from the one who was asked."""
    a = start(guest, "a", peers={}, transport=rdma)
    b = start(guest, "b", peers={"a": a.address}, transport=rdma, fetch=7)
    b.wait_for("Brought(name='step', step=7")
    assert f"fetched_bytes={SIZE}" in b.log()
    assert same(guest, part, f"{PLACE}/b/step-000000007")


def test_a_receiver_killed_amid_rdma_is_served_again(guest: Guest, rdma: str, part: str) -> None:
    b = start(guest, "b", peers={}, transport=rdma)
    a = start(guest, "a", peers={"b": b.address}, transport=rdma, send=[part])
    guest.wait_for(f"[ -d {PLACE}/b/.peer-a ]", 240, interval=0.01)
    b.kill()
    assert guest.run(f"[ ! -e {KEPT} ] || diff -r {part} {KEPT}").rc == 0
    guest.write(f"{PLACE}/b.json", guest.read(f"{PLACE}/b.json"))
    again = f"PYTHONPATH={SOURCE} python3 -u {SOURCE}/peer_samples.py {PLACE}/b.json"
    guest.check(f"cd /; {again} >{PLACE}/b.log 2>&1 </dev/null & echo $! >{PLACE}/b.pid")
    b.wait_for(b.address)
    guest.wait_for(f"[ -d {KEPT} ]", 240)
    assert same(guest, part, KEPT)
    assert "by rdma" in a.log()


def test_a_user_who_may_lock_no_memory_gets_tcp(guest: Guest, rdma: str, part: str) -> None:
    b = start(guest, "b", peers={}, transport=rdma)
    a = start(guest, "a", limit_kib=1024, peers={"b": b.address}, transport=rdma, send=[part])
    b.wait_for("keeps step-000000007.4711.0")
    assert a.came_by().startswith("tcp: RDMA device rxe0 can't be used: ")
    assert same(guest, part, KEPT)


def test_a_user_with_enough_of_it_gets_rdma(guest: Guest, rdma: str, part: str) -> None:
    b = start(guest, "b", peers={}, transport=rdma)
    a = start(guest, "a", limit_kib=256 << 10, peers={"b": b.address}, transport=rdma, send=[part])
    b.wait_for("keeps step-000000007.4711.0")
    assert a.came_by() == "rdma"
    assert same(guest, part, KEPT)


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [("tcp", "RDMA is off on this node"), ("rdma:none0", "RDMA device none0 can't be used")],
)
def test_a_partner_without_rdma_gets_tcp(
    guest: Guest, rdma: str, part: str, theirs: str, reason: str
) -> None:
    b = start(guest, "b", peers={}, transport=theirs)
    a = start(guest, "a", peers={"b": b.address}, transport=rdma, send=[part])
    b.wait_for("keeps step-000000007.4711.0")
    assert a.came_by().startswith("tcp: the other node: " + reason)
    assert same(guest, part, KEPT)


def test_a_wrong_device_here_leads_to_tcp(guest: Guest, rdma: str, part: str) -> None:
    b = start(guest, "b", peers={}, transport=rdma)
    a = start(guest, "a", peers={"b": b.address}, transport="rdma:rxe0:1:99", send=[part])
    b.wait_for("keeps step-000000007.4711.0")
    assert a.came_by() == "tcp: RDMA device rxe0 can't be used: port 1 has no GID 99."
    assert same(guest, part, KEPT)
