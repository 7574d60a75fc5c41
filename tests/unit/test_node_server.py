"""The daemon's socket: credentials, callers that hang or lie, and many at once."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from node_fakes import USER, answer_of, as_user, wait_for

from crater_slurm.hooks import frame
from crater_slurm.node import listener as listener_module
from crater_slurm.node.request import Answer, Request
from crater_slurm.node.server import Server, dispatch


@pytest.fixture
def served(open_path: Path):
    """A server that answers with what it was asked, and remembers who asked."""
    asked: list[Request] = []

    def handler(request: Request) -> Answer:
        asked.append(request)
        if request.operation == "slow":
            time.sleep(0.5)
        if request.operation == "fail":
            return dispatch(None, request)  # type: ignore[arg-type]
        return Answer(lines=[f"print {request.operation}"])

    server = Server(open_path / "node.sock", handler, timeout=0.5)
    server.start()
    server.asked = asked
    server.path = open_path / "node.sock"
    yield server
    server.stop()


def connect(server) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    connection.connect(str(server.path))
    return connection


def question(server, *pairs: tuple[str, str]) -> dict[str, list[str]]:
    with connect(server) as connection:
        connection.sendall(frame.encode(pairs))
        return answer_of(connection)


def test_a_question_gets_its_answer(served) -> None:
    answer = question(served, ("op", "ping"), ("env.SLURM_JOB_ID", "7"), ("new", "x"))
    assert answer == {"status": ["ok"], "exit": ["0"], "line": ["print ping"]}
    assert served.asked[0].env == {"SLURM_JOB_ID": "7"}


def test_the_kernel_says_who_asks(served) -> None:
    question(served, ("op", "ping"), ("env.SLURM_JOB_UID", "4711"))
    peer = served.asked[0].peer
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.geteuid(), os.getegid())


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, so it needs root")
def test_anyone_may_connect_and_is_known_for_who_he_is(served) -> None:
    body = frame.encode([("op", "ping"), ("env.SLURM_JOB_UID", "0")])
    done = as_user(
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        f"s.sendall({body!r}); print(s.recv(100)[:7])",
        str(served.path),
    )
    assert done.stdout == "b'CRATER1'\n", done.stderr
    assert served.asked[0].peer.uid == USER


GARBAGE = [
    b"", b"x", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"CRATER1 \n", b"CRATER1 -5\n",
    b"CRATER1 9999999999\n", b"CRATER1 5\n2:op,", b"CRATER1 4\nabcd", b"CRATER1 4\n2:op,trailing",
    b"CRATER2 0\n", b"\0" * 4096, b"CRATER1 7\n99:op,x",
]  # fmt: skip


@pytest.mark.parametrize("data", GARBAGE)
def test_garbage_is_closed_without_an_answer_and_without_harm(served, data: bytes) -> None:
    with connect(served) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # closed with our bytes unread
            assert connection.recv(100) == b""
    assert question(served, ("op", "ping"))["status"] == ["ok"]
    assert [request.operation for request in served.asked] == ["ping"]


def test_callers_that_hang_disturb_nobody_and_are_let_go(served) -> None:
    hanging = [connect(served) for _ in range(50)]
    for connection in hanging[:25]:
        connection.sendall(b"CRATER1 10")
    start = time.monotonic()
    assert question(served, ("op", "ping"))["status"] == ["ok"]
    assert time.monotonic() - start < 0.4
    assert all(connection.recv(1) == b"" for connection in hanging)
    assert time.monotonic() - start < 3
    for connection in hanging:
        connection.close()
    assert wait_for(lambda: served._by_uid.total() == 0)


def test_one_byte_at_a_time_is_no_way_to_stay(served) -> None:
    data = frame.encode([("op", "ping"), ("x", "y" * 1000)])
    start = time.monotonic()
    with connect(served) as connection, pytest.raises(OSError, match=r"Broken pipe|reset"):
        for i in range(len(data)):
            connection.sendall(data[i : i + 1])
            time.sleep(0.02)
    assert time.monotonic() - start < 3
    assert served.asked == []


def test_a_caller_that_leaves_early_is_served_all_the_same(served) -> None:
    with connect(served) as connection:
        connection.sendall(frame.encode([("op", "slow")]))
    assert wait_for(lambda: served.asked)
    assert question(served, ("op", "ping"))["status"] == ["ok"]


@pytest.mark.parametrize(("operation", "served_late"), [("prolog", False), ("epilog", True)])
def test_a_prolog_that_nobody_waits_for_is_not_begun(
    tmp_path: Path, operation: str, served_late: bool
) -> None:
    """What a stopped daemon finds in its backlog: the job's hooks have given up and gone on."""
    asked: list[str] = []
    server = Server(tmp_path / "node.sock", lambda r: asked.append(r.operation) or Answer())
    server._socket.bind(str(tmp_path / "node.sock"))
    server._socket.listen()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(tmp_path / "node.sock"))
        connection.sendall(frame.encode([("op", operation)]))
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(str(tmp_path / "node.sock"))
        waiting.sendall(frame.encode([("op", "prolog")]))
        server._thread.start()
        assert answer_of(waiting)["status"] == ["ok"]
    assert wait_for(lambda: not server._by_uid)
    server.stop()
    assert sorted(asked) == sorted(["prolog", *([operation] if served_late else [])])


def test_slow_answers_run_side_by_side(served) -> None:
    start = time.monotonic()
    threads = [threading.Thread(target=question, args=(served, ("op", "slow"))) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < 3  # one after the other they would take 5 s


def test_one_user_can_not_take_every_thread(served, monkeypatch) -> None:
    monkeypatch.setattr(listener_module, "MOST", 3)
    hanging = [connect(served) for _ in range(3)]
    assert wait_for(lambda: served._by_uid.total() == 3)
    with connect(served) as refused:
        refused.settimeout(5)
        assert refused.recv(1) == b""
    for connection in hanging:
        connection.close()
    assert wait_for(lambda: served._by_uid.total() == 0)
    assert question(served, ("op", "ping"))["status"] == ["ok"]


def test_an_unknown_operation_is_said(served) -> None:
    answer = question(served, ("op", "fail"))
    assert answer["status"] == ["error"]
    assert answer["exit"] == ["0"]
    assert answer["log"] == ["couldn't understand the operation 'fail'"]


def test_work_left_for_afterwards_comes_after_the_answer_and_survives_a_fault(tmp_path) -> None:
    order: list[str] = []

    def fail() -> None:
        raise RuntimeError("surprise")

    answer = Answer(afterwards=[fail, lambda: order.append("second")])
    server = Server(tmp_path / "s", lambda request: answer)
    server.path = tmp_path / "s"
    server.start()
    question(server, ("op", "ping"))
    assert wait_for(lambda: order == ["second"])
    server.stop()


def test_a_stale_socket_is_replaced_and_the_own_one_removed(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    path.write_text("left by a crash")
    server = Server(path, lambda request: Answer())
    server.start()
    assert path.is_socket()
    assert oct(path.stat().st_mode)[-3:] == "666"
    server.stop()
    assert not path.exists()


def test_another_daemons_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    first = Server(path, lambda request: Answer())
    first.start()
    second = Server(path, lambda request: Answer())
    second.start()
    first.stop()
    assert path.is_socket()
    second.stop()
