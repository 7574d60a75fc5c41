"""A part reaches the partner whole or not at all: cut, slow, damaged, killed, full, hostile."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer_samples import JOB, Node, Proxy, make_part, record, same_files, wait_until

from crater_slurm.checkpoint.peers import receive, transport
from crater_slurm.checkpoint.peers.frames import TransportError
from crater_slurm.checkpoint.peers.receive import DamagedError, Incoming
from crater_slurm.checkpoint.peers.ring import partner_of
from crater_slurm.checkpoint.peers.transport import Carrier, Connection
from crater_slurm.job import layout
from crater_slurm.job.layout import CHUNK_BYTES, Manifest

THREE_PIECES = 2 * CHUNK_BYTES + 12345


class Two:
    """Nodes a and b of one job; a sends to b through a proxy."""

    def __init__(self, folder: Path) -> None:
        self.a, self.b = Node("a", folder / "a"), Node("b", folder / "b")
        self.proxy = Proxy(self.b.address)
        self.b.work(["a", "b"], {"a": self.a.address})

    def start(self, **changes: object) -> None:
        self.a.work(["a", "b"], {"b": self.proxy.address}, **changes)  # type: ignore[arg-type]

    def save(self, step: int, **facts: object) -> str:
        path, manifest = make_part(self.a.folder, step, [0], world=2, **facts)  # type: ignore[arg-type]
        assert self.a.copies
        self.a.copies.on_saved(path, manifest)
        return path

    def wait_for(self, *steps: str) -> None:
        wait_until(lambda: set(steps) <= set(self.b.peer_steps("a")))
        wait_until(lambda: len(self.a.sent) >= len(steps))

    def kept(self, step: int) -> Path:
        return self.b.folder / ".peer-a" / f"{layout.step_name(step)}.{JOB}.0"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    nodes = Two(tmp_path)
    yield nodes
    nodes.a.stop()
    nodes.b.stop()
    nodes.proxy.close()


def name(step: int) -> str:
    return f"{layout.step_name(step)}.{JOB}.0"


@pytest.mark.parametrize(
    ("nodes", "node", "partner"),
    [("ab", "a", "b"), ("ab", "b", "a"), ("abc", "c", "a"), ("a", "a", ""), ("ab", "x", "")],
)
def test_the_next_node_of_the_ring_is_the_partner(nodes: str, node: str, partner: str) -> None:
    assert partner_of(nodes, node) == partner


def test_a_part_is_kept_by_the_partner_byte_for_byte(two: Two) -> None:
    two.start()
    saved = two.save(120, size=THREE_PIECES)
    two.wait_for(name(120))
    assert same_files(Path(saved), two.kept(120))
    assert [count for _, count in two.a.sent] == [THREE_PIECES]
    assert two.a.copies and two.a.copies.carrier == "tcp" and two.a.copies.error == ""
    assert (two.b.folder / ".peer-a").stat().st_mode & 0o777 == 0o700


def test_several_streams_bring_one_part(two: Two) -> None:
    two.start(streams=3)
    saved = two.save(5, size=5 * CHUNK_BYTES)
    two.wait_for(name(5))
    assert same_files(Path(saved), two.kept(5))
    assert len(two.proxy.passed) == 3


def test_an_empty_file_is_a_part_too(two: Two) -> None:
    two.start()
    two.save(1, size=0)
    two.wait_for(name(1))


def test_the_newest_two_are_kept(two: Two) -> None:
    two.start()
    for step in (1, 2, 3):
        two.save(step)
        two.wait_for(name(step))
    wait_until(lambda: two.b.peer_steps("a") == [name(2), name(3)])


def test_a_cut_connection_costs_only_what_was_not_there_yet(two: Two) -> None:
    two.start()
    two.proxy.alter = lambda number, at, data: (
        data if number or at + len(data) < 2 * CHUNK_BYTES + 200_000 else None
    )
    two.save(7, size=3 * CHUNK_BYTES)
    two.wait_for(name(7))
    (_, sent), *_ = two.a.sent
    assert sent == CHUNK_BYTES, "the two pieces that had come were not sent again"


@pytest.mark.parametrize("at", [30_000, CHUNK_BYTES + 30_000, THREE_PIECES])
def test_a_flipped_bit_never_gets_a_final_name(two: Two, at: int) -> None:
    """On every first connection a bit is flipped; the second one is clean."""
    bad = threading.Event()

    def flip(number: int, first: int, data: bytes) -> bytes:
        if number or not first <= at < first + len(data):
            return data
        bad.set()
        assert two.b.peer_steps("a") == []
        changed = bytearray(data)
        changed[at - first] ^= 1
        return bytes(changed)

    two.proxy.alter = flip
    two.start()
    saved = two.save(7, size=THREE_PIECES)
    two.wait_for(name(7))
    assert bad.is_set()
    assert len(two.proxy.passed) >= 2
    assert same_files(Path(saved), two.kept(7))


def test_a_line_that_always_damages_brings_nothing(two: Two) -> None:
    def flip(_: int, first: int, data: bytes) -> bytes:
        return data if first < 10_000 else bytes(len(data))

    two.proxy.alter = flip
    two.start()
    two.save(7, size=CHUNK_BYTES)
    wait_until(lambda: len(two.proxy.passed) >= 3)
    assert two.b.peer_steps("a") == []
    assert two.a.copies and "damaged" in two.a.copies.error


def test_while_one_part_is_under_way_only_the_newest_waits(two: Two) -> None:
    hold = threading.Event()
    reached = threading.Event()

    def wait(number: int, first: int, data: bytes) -> bytes:
        if number == 0 and first > 100_000:
            reached.set()
            hold.wait(20)
        return data

    two.proxy.alter = wait
    two.start()
    two.save(1, size=CHUNK_BYTES)
    assert reached.wait(20)
    for step in (2, 3, 4):
        two.save(step)
    hold.set()
    two.wait_for(name(1), name(4))
    assert [manifest.step for manifest, _ in two.a.sent] == [1, 4]


def test_a_partner_that_is_away_is_tried_again(two: Two) -> None:
    two.proxy.alter = lambda number, at, data: data if number >= 3 else None
    two.start()
    two.save(1)
    two.wait_for(name(1))
    assert len(two.proxy.passed) == 4
    assert len([line for line in two.a.logged if "couldn't" in line]) <= 2, "told once, not thrice"


def test_a_part_beyond_the_quota_is_refused_once_and_the_newest_stays(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.b.work(["a", "b"], {"a": two.a.address}, quota_bytes=260_000)
    two.start()
    for step in (1, 2):
        two.save(step)
        two.wait_for(name(step))
    two.save(3)  # goes in once step 1 has made room
    two.wait_for(name(3))
    assert two.b.peer_steps("a") == [name(2), name(3)]
    two.save(4, size=300_000)
    wait_until(lambda: two.a.copies and "no room" in two.a.copies.error)
    wait_until(lambda: two.a.copies and two.a.copies.idle)
    assert two.b.peer_steps("a") == [name(3)], "the newest whole one is never given up"
    two.a.stop()
    two.b.stop()


def test_a_full_disk_is_told_and_leaves_no_final_name(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(receive, "write_all", full)
    two.start()
    two.save(1)
    wait_until(lambda: two.a.copies and "No space left" in two.a.copies.error)
    assert two.b.peer_steps("a") == []
    monkeypatch.undo()
    two.wait_for(name(1))


def test_a_ticket_that_does_not_name_the_partner_brings_nothing(two: Two) -> None:
    two.start(partners=["c"])
    two.save(1)
    wait_until(lambda: two.a.copies and "not the partner" in two.a.copies.error)
    assert two.a.copies and two.a.copies.idle, "a refusal is not tried again"
    assert two.b.peer_steps("a") == []


def test_a_step_that_is_saved_again_takes_the_old_copy_s_place(two: Two) -> None:
    two.start()
    two.save(1, at=1.0)
    two.wait_for(name(1))
    saved = two.save(1, at=2.0)
    wait_until(lambda: len(two.a.sent) == 2)
    assert same_files(Path(saved), two.kept(1))
    assert two.b.peer_steps("a") == [name(1)]


def test_a_newer_connection_ends_the_old_one_of_the_same_node(two: Two) -> None:
    two.start()
    path, manifest = make_part(two.a.folder, 1, [0], world=2, size=CHUNK_BYTES)
    old = _reach(two)
    old.send({"op": "put", "session": "old"}, [memoryview(manifest.to_json().encode())])
    assert old.receive(1000)[0]["op"] == "want"
    assert two.a.copies
    two.a.copies.on_saved(path, manifest)
    two.wait_for(name(1))
    with pytest.raises(TransportError):
        old.receive(0, 10)
        old.receive(0, 10)
    old.close()


def _reach(two: Two) -> Connection:
    assert two.a.copies
    return transport.connect(two.b.address, two.a.copies._spec.token, "b", Carrier())


WORDS = ["put", "data", "end", "commit", "ask", "part", "pull", "state", "flushed", "x"]
VALUES = st.one_of(
    st.integers(-1, 2**70), st.text(max_size=30), st.none(), st.lists(st.integers(), max_size=2)
)
HEADERS = st.builds(
    lambda op, rest: {**rest, "op": op},
    st.sampled_from(WORDS),
    st.dictionaries(
        st.sampled_from(
            ["session", "file", "piece", "name", "owner", "step", "run", "rank", "key"]
        ),
        VALUES,
    ),
)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(HEADERS, st.binary(max_size=100)), max_size=5))
def test_hostile_messages_of_another_worker_do_no_harm(
    two: Two, messages: list[tuple[dict[str, object], bytes]]
) -> None:
    if two.a.copies is None:
        two.start()
    connection = _reach(two)
    try:
        for header, data in messages:
            connection.send(header, [memoryview(data)])
        connection.send({"op": "ask", "name": "step"})
        while connection.receive(1000, 10)[0]["op"] != "parts":
            pass
    except TransportError:
        pass  # hung up on, as it should be
    finally:
        connection.close()
    assert two.b.peer_steps("a") == []
    assert not [line for line in two.b.logged if line.startswith("error")]


@pytest.mark.parametrize(
    "change",
    [
        {"files": [{"name": "../x", "rank": 0, "size": 1, "crc32": ["00000000"]}]},
        {"files": [{"name": ".peer-b", "rank": 0, "size": 1, "crc32": ["00000000"]}]},
        {"run": "../../x"},
        {"name": "../x"},
        {"world_size": 0},
        {"files": []},
    ],
)
def test_a_hostile_manifest_touches_nothing(two: Two, change: dict[str, object]) -> None:
    two.start()
    _, manifest = make_part(two.a.folder, 1, [0], world=2)
    told = json.dumps({**json.loads(manifest.to_json()), **change}).encode()
    before = sorted(two.b.folder.rglob("*"))
    connection = _reach(two)
    connection.send({"op": "put", "session": "s"}, [memoryview(told)])
    assert connection.receive(1000, 10)[0]["op"] == "refused"
    connection.close()
    assert sorted(two.b.folder.rglob("*")) == before


def part_of(tmp_path: Path, size: int = THREE_PIECES) -> tuple[Path, Manifest]:
    path, manifest = make_part(tmp_path / "from", 9, [0, 1], world=2, size=size)
    return Path(path), manifest


def piece(path: Path, manifest: Manifest, file: int, number: int) -> memoryview:
    data = (path / manifest.files[file].name).read_bytes()
    return memoryview(data)[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


def test_pieces_may_come_in_any_order_and_twice(tmp_path: Path) -> None:
    path, manifest = part_of(tmp_path)
    incoming = Incoming(str(tmp_path / "to"), manifest)
    todo = incoming.missing() * 2
    random.Random(1).shuffle(todo)
    for file, number in todo:
        incoming.write(file, number, piece(path, manifest, file, number))
    final = incoming.commit()
    incoming.close()
    assert same_files(path, Path(final))


def test_a_part_with_a_piece_missing_can_t_be_finished(tmp_path: Path) -> None:
    path, manifest = part_of(tmp_path)
    incoming = Incoming(str(tmp_path / "to"), manifest)
    for file, number in incoming.missing()[:-1]:
        incoming.write(file, number, piece(path, manifest, file, number))
    with pytest.raises(DamagedError, match="1 pieces have not come"):
        incoming.commit()
    with pytest.raises(DamagedError, match="damaged at byte"):
        incoming.write(1, 2, piece(path, manifest, 0, 2))
    with pytest.raises(DamagedError, match="damaged at byte"):
        incoming.write(1, 2, piece(path, manifest, 1, 2)[:-1])
    incoming.close()
    assert not (tmp_path / "to" / name(9)).exists()


def test_what_an_earlier_try_left_is_checked_and_used(tmp_path: Path) -> None:
    path, manifest = part_of(tmp_path)
    first = Incoming(str(tmp_path / "to"), manifest)
    for number in (0, 2):
        first.write(0, number, piece(path, manifest, 0, number))
    first.close()
    partial = tmp_path / "to" / f".{name(9)}.partial"
    with open(partial / "rank-00000.safetensors", "r+b") as file:
        file.seek(2 * CHUNK_BYTES)
        file.write(b"!")
    (partial / "stranger").write_text("x")
    (partial / "folder").mkdir()
    second = Incoming(str(tmp_path / "to"), manifest)
    assert second.missing() == [[0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert sorted(os.listdir(partial)) == [file.name for file in manifest.files]
    second.close()


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    _, manifest = part_of(tmp_path, size=10)
    (tmp_path / "secret").write_text("0123456789")
    partial = tmp_path / "to" / f".{name(9)}.partial"
    partial.mkdir(parents=True)
    (partial / "rank-00000.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        Incoming(str(tmp_path / "to"), manifest)
    assert (tmp_path / "secret").read_text() == "0123456789"


class Process:
    """A node in a process of its own."""

    def __init__(self, folder: Path, **told: object) -> None:
        spec = folder.with_suffix(".json")
        spec.write_text(json.dumps({"folder": str(folder), **told}))
        program = Path(__file__).with_name("peer_samples.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(spec)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.address = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()


def _after(count: int, then: Callable[[], None]) -> Callable[[int, int, bytes], bytes]:
    """Do something once, after so many bytes of the first connection."""
    done = threading.Event()

    def alter(number: int, at: int, data: bytes) -> bytes:
        if number == 0 and at + len(data) >= count and not done.is_set():
            done.set()
            then()
        return data

    return alter


PLACES = [100, 2_000, 500_000, CHUNK_BYTES + 5_000, THREE_PIECES - 1, THREE_PIECES + 500]


@pytest.mark.parametrize("at", PLACES)
def test_a_sender_killed_at_any_place_leaves_a_whole_part_or_none(tmp_path: Path, at: int) -> None:
    b = Node("b", tmp_path / "b")
    b.work(["a", "b"], {})
    path, _ = make_part(tmp_path / "a", 3, [0], world=2, size=THREE_PIECES)
    proxy = Proxy(b.address)
    told = {"name": "a", "nodes": ["a", "b"], "peers": {"b": proxy.address}, "send": [path]}
    running: list[Process] = []
    go = threading.Event()

    def kill() -> None:
        assert go.wait(10)
        running[0].kill()

    proxy.alter = _after(at, kill)
    running.append(Process(tmp_path / "a", **told))
    go.set()
    wait_until(lambda: running[0].process.returncode is not None)
    wait_until(lambda: b.copies and b.copies.idle)
    assert b.peer_steps("a") in ([], [name(3)])
    again = Process(tmp_path / "a", **told)
    wait_until(lambda: b.peer_steps("a") == [name(3)])
    again.kill()
    assert same_files(Path(path), b.folder / ".peer-a" / name(3))
    b.stop()
    proxy.close()


@pytest.mark.parametrize("at", PLACES)
def test_a_receiver_killed_at_any_place_has_a_whole_part_or_none(tmp_path: Path, at: int) -> None:
    kept = tmp_path / "b" / ".peer-a"
    first = Process(tmp_path / "b", name="b", nodes=["a", "b"], peers={})
    proxy = Proxy(first.address)
    proxy.alter = _after(at, first.kill)
    a = Node("a", tmp_path / "a")
    a.work(["a", "b"], {"b": proxy.address})
    path, manifest = make_part(a.folder, 3, [0], world=2, size=THREE_PIECES)
    assert a.copies
    a.copies.on_saved(path, manifest)
    wait_until(lambda: first.process.returncode is not None)
    assert [p for p in kept.glob("[!.]*") if not same_files(Path(path), p)] == []
    told = {"name": "b", "nodes": ["a", "b"], "peers": {}, "listen": first.address}
    second = Process(tmp_path / "b", **told)
    wait_until(lambda: a.sent)
    second.kill()
    assert same_files(Path(path), kept / name(3))
    a.stop()
    proxy.close()


def test_a_record_of_another_user_s_job_lets_nobody_in(tmp_path: Path) -> None:
    """The same job id on node b was somebody else's: what a sends is turned away there."""
    b = Node("b", tmp_path / "b", job=record("b", uid=1))
    b.work(["a", "b"], {})
    a = Node("a", tmp_path / "a")
    a.work(["a", "b"], {"b": b.address})
    path, manifest = make_part(a.folder, 3, [0], world=2)
    assert a.copies
    a.copies.on_saved(path, manifest)
    wait_until(lambda: a.copies and "another user's" in a.copies.error)
    assert b.peer_steps("a") == []
    a.stop()
    b.stop()
