"""The filter's socket: one frame in, one out, and callers that hang, lie or leave."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crater_slurm.errors import CraterError
from crater_slurm.hooks import frame
from crater_slurm.scheduler import socket as filter_socket
from crater_slurm.scheduler.socket import FilterSocket, Pairs


class Asked:
    """A handler that remembers, and answers with what it was asked."""

    def __init__(self) -> None:
        self.messages: list[Pairs] = []
        self.fails = False
        self.waits = threading.Event()
        self.waits.set()

    def __call__(self, message: Pairs) -> Pairs:
        self.messages.append(message)
        self.waits.wait(5)
        if self.fails:
            raise RuntimeError("a fault of ours")
        return [("verdict", "accept"), *message]


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def served(tmp_path: Path, asked: Asked) -> Iterator[FilterSocket]:
    server = FilterSocket(tmp_path / "run" / "filter.sock", ["root", "nobody-here"], asked)
    server.start()
    yield server
    server.stop()


def connect(server: FilterSocket) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    connection.connect(str(server._path))
    return connection


def ask(server: FilterSocket, pairs: Pairs) -> Pairs:
    with connect(server) as connection:
        connection.sendall(frame.encode(pairs))
        return frame.receive(connection)


def ended(connection: socket.socket) -> bool:
    """Whether the server closed without a word."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def wait_until(condition: object, seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_message_gets_its_answer_with_order_and_repeats_kept(served: FilterSocket) -> None:
    pairs = [("op", "submit"), ("x", "1"), ("x", "2"), ("script", "a\nb\x00c"), ("", "")]
    assert ask(served, pairs) == [("verdict", "accept"), *pairs]
    wait_until(lambda: served.answered == 1)  # counted after the answer is out
    assert served.failed == 0


def test_bytes_that_are_no_utf8_come_through_as_they_are(served: FilterSocket) -> None:
    with connect(served) as connection:
        connection.sendall(frame.encode([(b"comment", b"\xff\xfe")]))
        assert frame.receive(connection)[1] == ("comment", "\udcff\udcfe")


def test_the_socket_is_for_everybody_and_the_peer_s_uid_decides(
    served: FilterSocket, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served._path.stat().st_mode & 0o777 == 0o666
    monkeypatch.setattr(filter_socket, "_peer_uid", lambda connection: 54321)
    with connect(served) as connection:
        with contextlib.suppress(BrokenPipeError):  # it may have closed before we said a word
            connection.sendall(frame.encode([("op", "submit")]))
        assert ended(connection)
    assert asked.messages == []


def test_the_peer_s_uid_is_the_kernel_s_word(served: FilterSocket) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert filter_socket._peer_uid(ours) == os.geteuid()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"CRATER1 abc\n",
        b"CRATER1 99999999\n",
        b"CRATER1 5\nabcde",
        b"CRATER1 6\n1:a,1:",
        b"CRATER1 4\n1:a,",
        b"CRATER1 4\n1:a,trailing",
        b"\x00" * 100,
    ],
)
def test_garbage_is_closed_without_an_answer_and_the_next_is_served(
    served: FilterSocket, asked: Asked, data: bytes
) -> None:
    with connect(served) as connection:
        connection.sendall(data)
        assert ended(connection)
    wait_until(lambda: served.failed == 1)
    assert asked.messages == []
    assert ask(served, [("op", "submit")])


def test_a_caller_that_leaves_halfway_costs_nothing(served: FilterSocket) -> None:
    with connect(served) as connection:
        connection.sendall(b"CRATER1 100\nabc")
    wait_until(lambda: served.failed == 1)
    assert ask(served, [("op", "submit")])


def test_a_caller_that_does_not_wait_for_its_answer_costs_nothing(
    served: FilterSocket, asked: Asked
) -> None:
    asked.waits.clear()
    with connect(served) as connection:
        connection.sendall(frame.encode([("op", "submit")]))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    asked.waits.set()
    wait_until(lambda: served.answered + served.failed == 1)
    assert ask(served, [("op", "submit")])


def test_a_silent_caller_is_given_up_and_holds_up_nobody(
    served: FilterSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filter_socket, "_TIMEOUT_SECONDS", 0.5)
    with connect(served) as silent:
        assert ask(served, [("op", "submit")])
        assert served.failed == 0, "the silent one is still there"
        assert ended(silent)
    wait_until(lambda: served.failed == 1)


def test_a_fault_of_ours_closes_the_connection_so_that_the_job_goes_through(
    served: FilterSocket, asked: Asked
) -> None:
    asked.fails = True
    with connect(served) as connection:
        connection.sendall(frame.encode([("op", "submit")]))
        assert ended(connection)
    asked.fails = False
    assert ask(served, [("op", "submit")])
    wait_until(lambda: (served.failed, served.answered) == (1, 1))


def test_many_at_once_are_each_answered_with_their_own(served: FilterSocket) -> None:
    answers: dict[int, Pairs] = {}

    def one(number: int) -> None:
        answers[number] = ask(served, [("number", str(number))])

    threads = [threading.Thread(target=one, args=(n,)) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert answers == {n: [("verdict", "accept"), ("number", str(n))] for n in range(40)}


def test_a_second_scheduler_does_not_take_the_socket_from_the_first(
    served: FilterSocket, asked: Asked
) -> None:
    with pytest.raises(CraterError, match="another crater-scheduler already listens at"):
        FilterSocket(served._path, [], asked).start()
    assert ask(served, [("op", "submit")])


def test_a_socket_that_a_killed_scheduler_left_is_replaced(tmp_path: Path, asked: Asked) -> None:
    path = tmp_path / "filter.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    server = FilterSocket(path, [], asked)
    server.start()
    assert ask(server, [("op", "submit")])
    server.stop()
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []
