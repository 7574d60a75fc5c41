"""Trainers that mean harm, or are mad: refused, dropped, and nobody else notices."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_worker import MIB, Daemon, Trainer, a_spec, content, hear, running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crater_slurm.checkpoint import memory
from crater_slurm.job.wire import WireError


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One worker for all of them: whatever they send, it goes on."""
    tmp = tmp_path_factory.mktemp("hostile")
    (tmp / "ckpt").mkdir()
    with running(tmp, a_spec(tmp / "ckpt")) as daemon:
        yield daemon


_steps = iter(range(1, 10**6))


def still_serves(daemon: Daemon) -> None:
    """Another trainer saves and gets its bytes back."""
    assert daemon.process is not None and daemon.process.poll() is None
    step, data = next(_steps), os.urandom(10_000)
    trainer = Trainer(daemon, lane_bytes=MIB)
    trainer.saved(trainer.save(step, data, name="other"))
    path = Path(daemon.spec.folder) / f"other-{step:09d}" / "rank-00000.safetensors"
    assert path.read_bytes() == data
    trainer.close()


def told(trainer: Trainer) -> str:
    return str(trainer.hear("error")["error"])


NUMBERS = st.one_of(
    st.integers(-2, 5),
    st.sampled_from([4096, 8192, MIB, 2 * MIB, 1 << 40, 1 << 63, -(1 << 63), 2**200]),
)
VALUES = st.one_of(
    NUMBERS, st.none(), st.booleans(), st.floats(), st.text(max_size=8),
    st.lists(NUMBERS, max_size=3), st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2),
)  # fmt: skip
KEYS = st.sampled_from(
    ["save", "name", "step", "file", "size", "ranks", "local", "at", "position", "bytes", "path",
     "reason", "run", "open", "version", "x"]
)  # fmt: skip
OPERATIONS = st.sampled_from(
    ["begin", "data", "commit", "direct", "abandon", "restore", "available", "stage", "requeue",
     "status", "open", "lane", "ended", "spec", "freed", "", "_begin", "__init__"]
)  # fmt: skip
SANE = st.fixed_dictionaries(
    {
        "op": st.sampled_from(["begin", "data", "commit", "direct", "abandon"]),
        "save": st.integers(0, 4), "name": st.just("fuzz"), "step": st.integers(0, 3),
        "file": st.sampled_from(["rank-00000.safetensors", "a", "../b", ".c", "manifest-00000.json"]),
        "size": st.sampled_from([0, 1, 4096, 5000, MIB, 3 * MIB]),
        "ranks": st.integers(1, 2), "local": st.integers(1, 2),
        "at": st.sampled_from([0, 4096, MIB]), "position": st.sampled_from([0, 4096, 8192, MIB]),
        "bytes": st.sampled_from([1, 4096, 5000, MIB, 2 * MIB]),
    }
)  # fmt: skip
MESSAGES = st.one_of(
    SANE,
    st.builds(lambda op, d: {**d, "op": op}, OPERATIONS, st.dictionaries(KEYS, VALUES, max_size=8)),
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(messages=st.lists(MESSAGES, max_size=12))
def test_any_messages_in_any_order(served: Daemon, messages: list[dict[str, Any]]) -> None:
    trainer = Trainer(served, lane_bytes=MIB)
    try:
        for message in messages:
            trainer.channel.send(message)
    except (OSError, WireError):
        pass  # dropped: too many mistakes
    trainer.close()
    still_serves(served)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(packets=st.lists(st.binary(min_size=1, max_size=300), max_size=30))
def test_any_bytes(served: Daemon, packets: list[bytes]) -> None:
    trainer = Trainer(served, lane_bytes=MIB)
    try:
        for packet in packets:
            trainer.channel.socket.send(packet, socket.MSG_NOSIGNAL)
    except OSError:
        pass
    trainer.close()
    still_serves(served)


def test_deep_json_and_a_message_that_is_too_long(served: Daemon) -> None:
    trainer = Trainer(served)
    trainer.channel.socket.send(b"[" * 50_000)
    assert "no JSON" in told(trainer)
    trainer.channel.socket.send(b'{"op": "status", "x": "' + b"y" * 100_000 + b'"}')
    assert "too long" in told(trainer)
    trainer.send("status")
    trainer.hear("status")
    still_serves(served)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"op": "begin", "save": 2, "step": 1, "size": -1, "ranks": 1, "local": 1}, "use size=-1"),
        ({"op": "begin", "save": 2, "step": 1, "size": 1, "ranks": 1, "local": 2}, "use local=2"),
        ({"op": "begin", "save": 2, "step": True, "size": 1, "ranks": 1, "local": 1}, "use step="),
        (
            {"op": "begin", "save": 2, "step": 1, "size": 1, "ranks": 1, "local": 1, "name": "../x"},
            "can't be called '../x'",
        ),
        (
            {"op": "begin", "save": 2, "step": 1, "size": 1, "ranks": 1, "local": 1, "file": "../x"},
            "save '../x' of rank 0",
        ),
        (
            {"op": "begin", "save": 2, "step": 1, "size": 1, "ranks": 1, "local": 1,
             "file": "manifest-00000.json"},
            "save 'manifest-00000.json' of rank 0",
        ),
        ({"op": "begin", "save": 1, "step": 1, "size": 1, "ranks": 1, "local": 1}, "has to grow"),
        ({"op": "data", "save": 9, "at": 0, "position": 0, "bytes": 1}, "has not begun"),
        ({"op": "data", "save": 1, "at": 0, "position": 1, "bytes": 1}, "don't lie on whole pages"),
        ({"op": "data", "save": 1, "at": 4096, "position": 0, "bytes": 1}, "take bytes 4096"),
        ({"op": "data", "save": 1, "at": 0, "position": 0, "bytes": 100}, "whole pages belong"),
        ({"op": "data", "save": 1, "at": 0, "position": 0, "bytes": 2 * MIB}, "don't lie on whole"),
        ({"op": "data", "save": 1, "at": 0, "position": MIB - 4096, "bytes": 8192}, "whole pages"),
        ({"op": "commit", "save": 1}, "only 0 of its 10000 bytes came"),
        ({"op": "restore", "step": -1}, "use step=-1"),
        ({"op": "restore", "ranks": [1.5]}, "use rank="),
        ({"op": "stage"}, "use path=None"),
        ({"op": "conquer"}, "knows none of that name"),
    ],
)  # fmt: skip
def test_what_can_t_be_is_named(served: Daemon, message: dict[str, Any], error: str) -> None:
    trainer = Trainer(served, lane_bytes=MIB)
    trainer.begin(next(_steps), 10_000, name="wrong")
    trainer.channel.send(message)
    assert error in told(trainer)
    trainer.close()


def test_a_window_beyond_the_lane_is_refused(served: Daemon) -> None:
    """Bytes that the worker has not freed can't be announced a second time."""
    trainer = Trainer(served, lane_bytes=MIB)
    number = trainer.begin(next(_steps), 4 * MIB, name="window")
    trainer.send("data", save=number, at=0, position=0, bytes=MIB // 2)
    trainer.send("data", save=number, at=MIB // 2, position=5 * MIB, bytes=MIB // 2)
    assert "free up to" in told(trainer)
    trainer.send("data", save=number, at=MIB // 2, position=0, bytes=MIB // 2)
    assert "take" in told(trainer)
    trainer.close()
    still_serves(served)


def test_who_goes_on_with_mistakes_is_dropped(served: Daemon) -> None:
    trainer = Trainer(served, lane_bytes=MIB)
    with pytest.raises((WireError, OSError)):
        for _ in range(200):
            trainer.send("nonsense")
        while True:
            trainer.channel.receive()
    still_serves(served)


def test_who_never_reads_is_dropped_and_holds_nobody_up(served: Daemon) -> None:
    trainer = Trainer(served, lane_bytes=0)
    trainer.channel.socket.settimeout(20)
    with pytest.raises(OSError):
        for _ in range(100_000):
            trainer.channel.socket.send(b'{"op":"status"}', socket.MSG_NOSIGNAL)
    still_serves(served)


def test_many_saves_at_once_are_bounded(served: Daemon) -> None:
    trainer = Trainer(served, 0, 2, MIB)
    for number in range(70):
        trainer.channel.send(
            {"op": "begin", "save": number, "name": f"n{number}", "step": 1, "size": 10,
             "file": "a", "ranks": 2, "local": 2}
        )  # fmt: skip
    assert "more than 64 saves" in told(trainer)
    trainer.close()
    still_serves(served)


def offered(daemon: Daemon, fd: int, length: int) -> dict[str, Any]:
    """The answer to a trainer that offers a lane."""
    known = Trainer(daemon, lane_bytes=0).opening
    channel = daemon.lane({**known, "bytes": length}, fd)
    return hear(channel, "lane")


def a_memfd(length: int, seals: int = memory.SEALS) -> int:
    fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_lanes_that_are_none_are_refused(served: Daemon, tmp_path: Path) -> None:
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, MIB)
    in_tmpfs = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE)
    os.ftruncate(in_tmpfs, MIB)
    reading, _ = os.pipe()
    ends = socket.socketpair()
    forged = {
        "a file on disk": plain,
        "a file in a tmpfs": in_tmpfs,
        "a pipe": reading,
        "a socket": ends[0].fileno(),
        "a folder": os.open(tmp_path, os.O_RDONLY),
        "a device": os.open("/dev/zero", os.O_RDWR),
        "a memfd that may shrink": a_memfd(MIB, fcntl.F_SEAL_GROW),
        "a memfd that may grow": a_memfd(MIB, fcntl.F_SEAL_SHRINK),
        "a smaller memfd": a_memfd(MIB // 2),
        "a larger memfd": a_memfd(2 * MIB),
        "only its path": os.open(tmp_path / "file", os.O_PATH),
    }
    for what, fd in forged.items():
        assert offered(served, fd, MIB)["bytes"] == 0, what
    assert offered(served, a_memfd(5000), 5000)["bytes"] == 0, "no whole pages"
    good = a_memfd(MIB)
    assert offered(served, good, MIB)["bytes"] == MIB
    writable_only = os.open(f"/proc/self/fd/{good}", os.O_WRONLY)
    assert offered(served, writable_only, MIB)["bytes"] == 0
    still_serves(served)


def test_the_lane_given_can_t_be_shrunk_by_its_trainer(served: Daemon) -> None:
    trainer = Trainer(served, lane_bytes=MIB)
    for size in (0, MIB // 2, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(trainer.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(trainer.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_holes_punched_into_a_lane_are_zeros_and_no_fault(served: Daemon) -> None:
    trainer = Trainer(served, lane_bytes=MIB)
    number = trainer.begin(77, 600_000, name="holes")
    assert trainer.map is not None
    trainer.map[:600_000] = os.urandom(600_000)
    trainer.map.madvise(mmap.MADV_REMOVE)
    trainer.send("data", save=number, at=0, position=0, bytes=600_000)
    trainer.send("commit", save=number)
    trainer.saved(number)
    path = Path(served.spec.folder) / "holes-000000077" / "rank-00000.safetensors"
    assert path.read_bytes() == bytes(600_000)


def test_a_trainer_that_overwrites_while_it_is_written_harms_itself_alone(
    served: Daemon, tmp_path: Path
) -> None:
    trainer = Trainer(served, lane_bytes=8 * MIB)
    stop = threading.Event()

    def scribble() -> None:
        assert trainer.map is not None
        while not stop.is_set():
            trainer.map[: 4 * MIB] = os.urandom(4 * MIB)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        trainer.saved(trainer.save(1, bytes(8 * MIB), 4 * MIB, name="scribbled"))
    finally:
        stop.set()
        thread.join()
    still_serves(served)


def test_descriptors_sent_along_are_closed(served: Daemon) -> None:
    assert served.process is not None
    trainer = Trainer(served, lane_bytes=0)
    fds = Path(f"/proc/{served.process.pid}/fd")
    before = len(list(fds.iterdir()))
    for _ in range(50):
        trainer.channel.send({"op": "status"}, [0, 1, 2])
        trainer.hear("status")
    trainer.send("status")  # answered after the last ones were closed
    trainer.hear("status")
    assert len(list(fds.iterdir())) <= before


def test_the_daemon_s_socket_takes_messages_that_are_wrong(served: Daemon) -> None:
    """The daemon is trusted; a defect of it must not end the saves all the same."""
    for message in (
        {"op": "lane"}, {"op": "lane", "open": 3}, {"op": "limits", "ring_bytes": "x"},
        {"op": "spec", "spec": "no JSON"}, {"op": "requeued"}, {"op": "what", "id": 1},
    ):  # fmt: skip
        served.send(message)
    still_serves(served)


def test_links_in_the_way_are_not_followed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "ckpt", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "file").write_text("precious")
    (folder / ".step-000000001.partial").symlink_to(outside)
    (folder / "step-000000001").symlink_to(outside)
    partial = folder / ".step-000000002.partial"
    partial.mkdir()
    (partial / "rank-00000.safetensors").symlink_to(outside / "file")
    (partial / "manifest-00000.json").symlink_to(outside / "file")
    (partial / "sub").symlink_to(outside)
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon)
        for step in (1, 2):
            trainer.saved(trainer.save(step, b"new"))
            assert content(folder, step) == b"new"
    assert (outside / "file").read_text() == "precious"
    assert os.listdir(outside) == ["file"]
    assert not (folder / "step-000000001").is_symlink()


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "ckpt").symlink_to(tmp_path / "real")
    with running(tmp_path, a_spec(tmp_path / "ckpt")) as daemon:
        trainer = Trainer(daemon)
        number = trainer.save(1, b"x")
        error = trainer.hear("failed", save=number)["error"]
        assert "is not saved" in error and str(tmp_path / "ckpt") in error
    assert os.listdir(tmp_path / "real") == []


def test_manifests_that_lie_are_not_counted_and_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    for name, text in {
        "step-000000001": "no JSON",
        "step-000000002": json.dumps([1] * 100),
        "step-000000003": "[" * 100_000,
    }.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "manifest-00000.json").write_text(text)
    os.mkfifo(folder / "step-000000001" / "manifest-00001.json")
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon)
        trainer.saved(trainer.save(4, b"x"))
        trainer.send("available", name="step")
        assert [s[0] for s in trainer.hear("available")["steps"]] == [4]
        daemon.send({"op": "ended"})
        trainer.close()
        daemon.hear("state", done=True)
    assert len(os.listdir(folder)) == 4
