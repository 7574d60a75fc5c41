"""Frames over TCP: whole, in order, within their time, whatever the other end does."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.checkpoint.peers import frames
from crater_slurm.checkpoint.peers.frames import TransportError
from crater_slurm.checkpoint.peers.tcp import TcpConnection
from crater_slurm.checkpoint.peers.transport import Carrier


def pair(seconds: float = 10.0) -> tuple[TcpConnection, TcpConnection]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return TcpConnection(near, seconds), TcpConnection(far, seconds)


@pytest.fixture
def ends() -> Iterator[tuple[TcpConnection, TcpConnection]]:
    near, far = pair()
    yield near, far
    near.close()
    far.close()


def test_a_header_and_many_buffers_arrive_as_one(ends: tuple[TcpConnection, TcpConnection]) -> None:
    near, far = ends
    parts = [os.urandom(size) for size in (0, 1, 4095, 70_000, *[3] * 2000)]
    thread = threading.Thread(
        target=near.send, args=({"op": "x", "a": [1]}, map(memoryview, parts))
    )
    thread.start()
    header, data = far.receive(1 << 20)
    thread.join()
    assert header == {"op": "x", "a": [1]}
    assert bytes(data) == b"".join(parts)


def test_a_piece_of_a_file_arrives_and_the_next_frame_is_whole(
    ends: tuple[TcpConnection, TcpConnection], tmp_path: Path
) -> None:
    near, far = ends
    content = os.urandom(5 << 20)
    (tmp_path / "f").write_bytes(content)
    fd = os.open(tmp_path / "f", os.O_RDONLY)

    def send() -> None:
        near.send_file({"op": "data"}, fd, 1000, (4 << 20) + 7)
        near.send({"op": "end"})

    thread = threading.Thread(target=send)
    thread.start()
    assert bytes(far.receive(8 << 20)[1]) == content[1000 : 1000 + (4 << 20) + 7]
    assert far.receive()[0] == {"op": "end"}
    thread.join()
    with pytest.raises(TransportError, match="beyond its end"):
        near.send_file({"op": "data"}, fd, 5 << 20, 1)
    os.close(fd)


def test_who_does_not_read_holds_nobody_for_ever(tmp_path: Path) -> None:
    near, far = pair(0.2)
    (tmp_path / "f").write_bytes(bytes(64 << 20))
    with pytest.raises(TransportError, match="too slow"):
        near.send({"op": "x"}, [memoryview(bytes(64 << 20))])
    near.close()
    far.close()
    near, far = pair(0.2)
    with open(tmp_path / "f", "rb") as file, pytest.raises(TransportError, match="too slow"):
        near.send_file({"op": "x"}, file.fileno(), 0, 64 << 20)
    near.close()
    far.close()


def test_who_hangs_up_without_reading_is_noticed_at_once() -> None:
    near, far = pair(60)
    far.abort()  # and is not closed, so that the kernel goes on taking data until it is full
    with pytest.raises(TransportError, match=r"closed the connection|Broken pipe|reset"):
        near.send({"op": "x"}, [memoryview(bytes(64 << 20))])
    near.close()
    far.close()


def test_one_byte_now_and_then_is_no_way_to_stay() -> None:
    """The time is for the whole frame: the clock here goes on by a second at each look."""
    near, far = socket.socketpair()
    ticks = iter(range(1000))
    connection = TcpConnection(far, 10, clock=lambda: next(ticks))
    near.sendall(frames.encode({"op": "x"}, 1000))
    stop = threading.Event()

    def dribble() -> None:
        while not stop.wait(0.01):
            try:
                near.send(b"x")
            except OSError:
                return

    thread = threading.Thread(target=dribble)
    thread.start()
    with pytest.raises(TransportError, match="too slow"):
        connection.receive(1000)
    stop.set()
    thread.join()
    near.close()
    connection.close()


def test_another_thread_can_end_a_wait(ends: tuple[TcpConnection, TcpConnection]) -> None:
    near, _ = ends
    failed: list[str] = []

    def wait() -> None:
        try:
            near.receive()
        except TransportError as error:
            failed.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    near.abort()
    thread.join(10)
    assert failed == ["go on: the other end closed the connection"]


def test_more_data_than_was_expected_is_not_taken(
    ends: tuple[TcpConnection, TcpConnection],
) -> None:
    near, far = ends
    near.send({"op": "x"}, [memoryview(b"12345")])
    with pytest.raises(TransportError, match="take 5 bytes of data, 4 at most"):
        far.receive(4)


def test_a_cut_frame_is_an_error(ends: tuple[TcpConnection, TcpConnection]) -> None:
    near, far = ends
    whole = frames.encode({"op": "x"}, 100) + bytes(99)
    os.write(near.fileno(), whole)
    near.close()
    with pytest.raises(TransportError, match="closed the connection"):
        far.receive(100)


@settings(max_examples=200)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=100).map(
            lambda text: struct.pack("!4sIQ", b"CRP1", len(text), 0) + text
        ),
        st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)).map(
            lambda lengths: struct.pack("!4sIQ", b"CRP1", *lengths)
        ),
        st.text(max_size=40).map(
            lambda text: (
                struct.pack("!4sIQ", b"CRP1", 2 + len(text.encode()), 0)
                + b"[" * (2 + len(text.encode()))
            )
        ),
    )
)
def test_hostile_bytes_are_an_error_and_nothing_else(data: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        with pytest.raises(TransportError):
            while True:
                TcpConnection(far, 1).receive(1000, 1)


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none()))
def test_values_of_a_header_are_checked(header: dict[str, object]) -> None:
    for read in (lambda: frames.whole(header, "n", 5), lambda: frames.text(header, "n", 3)):
        try:
            value = read()
        except TransportError:
            continue
        assert value == header["n"]


@pytest.mark.parametrize("value", [True, -1, 6, 1.0, "1", None])
def test_what_is_no_whole_number(value: object) -> None:
    with pytest.raises(TransportError):
        frames.whole({"n": value}, "n", 5)


def test_a_carrier_is_tcp_or_a_device() -> None:
    assert Carrier.parse("tcp").kind == "tcp"
    whole = Carrier.parse("rdma:mlx5_0:2:3")
    assert (whole.kind, whole.device, whole.port, whole.gid_index) == ("rdma", "mlx5_0", 2, 3)
    assert Carrier.parse("rdma:rxe0").port == 1
    for wrong in ("", "rdma", "rdma:", "rdma:a:b", "tcp:1", "ib", "rdma:a:1:2:3"):
        with pytest.raises(ValueError, match="A transport is|are numbers"):
            Carrier.parse(wrong)
