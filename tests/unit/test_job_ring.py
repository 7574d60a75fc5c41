"""The trainer's end of the ring, against a worker that the test holds in its hand."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_fakes import FakeWorker
from job_session import alone, as_rank

from crater_slurm.job import checkpoint, contact, link, ring, session, wire
from crater_slurm.job.lane import Lane, rounded

__all__ = ["alone"]

WAIT = 30


@pytest.fixture
def worker(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWorker]:
    cache = tmp_path / "cache"
    cache.mkdir()
    made = FakeWorker(cache, tmp_path / "ring.sock")
    made.answers["available"] = {"op": "available", "steps": []}
    monkeypatch.setenv("CRATER_RING", str(made.path))
    monkeypatch.setenv("CRATER_CHECKPOINT_PATH", str(cache))
    yield made
    made.hold = False
    made.die()


def state(size: int = 100_000, fill: int = 0) -> dict[str, bytes]:
    return {"b": bytes([fill]) * size}


def loaded(step: int) -> object:
    found = checkpoint.load(step)
    assert found is not None
    return found.state


def test_a_save_goes_through_the_lane_and_says_who_it_is(worker: FakeWorker) -> None:
    saving = checkpoint.save(state(), 5)
    assert saving.how == "ring" and saving.wait(WAIT)
    assert loaded(5) == state()
    opened, begin = worker.wait_for("open")[0], worker.wait_for("begin")[0]
    assert 0 <= time.time() - opened.pop("began") / 1000 < 3600 * 24
    assert opened | {"bytes": 0} == {
        "op": "open", "version": 1, "job": "4711", "run": "4711.0", "rank": 0, "local_rank": 0,
        "world": 1, "local_world": 1, "slots": 1, "bytes": 0,
    }  # fmt: skip
    assert begin == {
        "op": "begin", "save": 1, "name": "step", "step": 5, "file": "rank-00000.safetensors",
        "rank": 0, "ranks": 1, "local": 1, "start": "", "size": begin["size"],
    }  # fmt: skip


def test_many_saves_go_round_the_lane(worker: FakeWorker) -> None:
    checkpoint.prepare(state(900_000), wait=True)
    for step in range(1, 20):
        saving = checkpoint.save(state(700_000 + 9_000 * step, step), step)
        assert saving.how == "ring"
    assert checkpoint.wait(WAIT)
    assert [loaded(step) for step in (1, 11, 19)] == [
        state(700_000 + 9_000 * step, step) for step in (1, 11, 19)
    ]
    assert len(worker.lanes) == 1


def test_the_state_may_change_as_soon_as_save_returns(worker: FakeWorker) -> None:
    changing = {"b": bytearray(b"a" * 50_000)}
    worker.hold = True
    saving = checkpoint.save(changing, 1)
    changing["b"][:] = b"z" * 50_000
    worker.wait_for("commit")
    worker.die()
    worker.hold = False
    worker.start()
    assert saving.wait(WAIT)
    assert loaded(1) == {"b": bytearray(b"a" * 50_000)}


def test_a_file_larger_than_the_lane_is_streamed(worker: FakeWorker) -> None:
    worker.most = 1 << 20
    saving = checkpoint.save(state(5 << 20, 3), 1)
    assert saving.how == "ring" and saving.wait(WAIT)
    assert loaded(1) == state(5 << 20, 3)
    assert len(worker.wait_for("data")) > 4


def test_a_worker_lost_in_the_midst_of_a_stream_costs_nothing(worker: FakeWorker) -> None:
    worker.most = 1 << 20
    done = threading.Event()

    def cut() -> None:
        worker.wait_for("data", 3)
        worker.hang_up()
        done.set()

    threading.Thread(target=cut, daemon=True).start()
    saving = checkpoint.save(state(20 << 20, 3), 1)
    assert done.wait(WAIT) and saving.wait(WAIT)
    assert loaded(1) == state(20 << 20, 3)


def test_a_larger_state_gets_a_larger_lane(worker: FakeWorker) -> None:
    checkpoint.save(state(100_000), 1)
    saving = checkpoint.save(state(9 << 20), 2)
    assert saving.how == "ring" and saving.wait(WAIT) and len(worker.lanes) == 2
    assert "freed" not in [m["op"] for m in worker.log]


def test_without_room_for_a_lane_the_worker_takes_a_file(worker: FakeWorker) -> None:
    worker.most = 0
    saving = checkpoint.save(state(), 1)
    assert saving.how == "direct" and saving.wait(WAIT)
    assert [m["op"] for m in worker.log[:3]] == ["open", "begin", "direct"]
    assert loaded(1) == state()


def test_with_the_policy_direct_a_full_lane_is_gone_around(worker: FakeWorker) -> None:
    worker.policy = "direct"
    worker.hold = True
    assert checkpoint.save(state(2 << 20, 1), 1).how == "ring"
    second = checkpoint.save(state(2 << 20, 2), 2)
    assert second.how == "direct" and worker.wait_for("direct")


def test_a_killed_worker_is_told_again_what_it_has_not_saved(worker: FakeWorker) -> None:
    worker.hold = True
    saving = checkpoint.save(state(fill=7), 7)
    worker.wait_for("commit")
    worker.die()
    worker.log.clear()
    worker.hold = False
    worker.start()
    assert saving.wait(WAIT)
    assert [m["op"] for m in worker.log] == ["open", "begin", "data", "commit"]
    assert loaded(7) == state(fill=7)
    after = checkpoint.save(state(fill=8), 8)
    assert after.how == "ring" and after.wait(WAIT) and len(worker.lanes) == 2


def test_a_lane_that_is_not_taken_again_is_written_out(worker: FakeWorker) -> None:
    worker.hold = True
    saving = checkpoint.save(state(fill=7), 7)
    worker.wait_for("commit")
    worker.die()
    worker.refuse_lanes, worker.hold = True, False
    worker.start()
    assert saving.wait(WAIT) and loaded(7) == state(fill=7)
    after = checkpoint.save(state(fill=8), 8)
    assert after.how == "ring" and after.wait(WAIT)


def test_when_no_worker_comes_back_the_trainer_writes_its_lane(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "GRACE_SECONDS", 0.2)
    worker.hold = True
    saving = checkpoint.save(state(fill=7), 7)
    worker.die()
    assert saving.wait(WAIT) and loaded(7) == state(fill=7)
    assert checkpoint.save(state(fill=8), 8).how == "direct"
    assert loaded(8) == state(fill=8)


def test_at_the_end_of_the_process_a_lost_lane_is_written(worker: FakeWorker) -> None:
    worker.hold = True
    saving = checkpoint.save(state(fill=7), 7)
    worker.wait_for("commit")
    worker.die()
    session.current().close()
    assert saving.wait(WAIT) and loaded(7) == state(fill=7)


def test_a_failed_save_is_told_and_its_error_kept(
    worker: FakeWorker, capfd: pytest.CaptureFixture[str]
) -> None:
    worker.answers["commit"] = {"op": "failed", "save": 1, "error": "The cache is full."}
    saving = checkpoint.save(state(), 1)
    assert saving.wait(WAIT) is False and saving.error == "The cache is full."
    assert "crater: step 1 is not saved: The cache is full." in capfd.readouterr().err


def test_a_worker_without_progress_is_not_waited_for_for_ever(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ring, "STALL_SECONDS", 0.3)
    worker.hold = True
    checkpoint.save(state(2 << 20, 1), 1)
    second = checkpoint.save(state(2 << 20, 2), 2)
    assert second.how == "direct" and "no progress" in capfd.readouterr().err


def test_a_worker_that_understands_nothing_is_done_without(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.hold = True
    saving = checkpoint.save(state(fill=1), 1)
    worker.wait_for("commit")
    with contextlib.suppress(OSError):  # it may have had enough before the last
        for _ in range(9):
            worker.connections[0].send({"op": "error", "error": "what?"})
    assert saving.wait(WAIT) and loaded(1) == state(fill=1)


@pytest.mark.parametrize(
    "message",
    [
        {"op": "freed", "position": -5}, {"op": "freed", "position": 1 << 60}, {"op": "freed"},
        {"op": "saved", "save": "one"}, {"op": "saved"}, {"op": "failed", "save": 1, "error": 7},
        {"op": "saved", "save": 999}, {"op": "flushed", "name": 1}, {"op": "note"}, {"op": "more"},
    ],
    ids=str,
)  # fmt: skip
def test_nonsense_from_the_worker_does_no_harm(message: dict, worker: FakeWorker) -> None:
    assert checkpoint.save(state(fill=1), 1).wait(WAIT)
    worker.connections[0].send(message)
    saving = checkpoint.save(state(fill=2), 2)
    assert saving.wait(WAIT) and loaded(2) == state(fill=2)


def test_notes_are_told_once(worker: FakeWorker, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint.save(state(), 1).wait(WAIT)
    for _ in range(2):
        worker.connections[0].send({"op": "note", "text": "look\n\x1b[31mhere"})
    checkpoint.save(state(), 2).wait(WAIT)
    assert capfd.readouterr().err.count("crater: look  [31mhere\n") == 1


def test_a_daemon_that_hangs_costs_its_deadline_once(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hung.sock"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(str(path))
    server.listen()
    monkeypatch.setenv("CRATER_RING", str(path))
    monkeypatch.setenv("CRATER_CHECKPOINT_PATH", str(tmp_path / "cache"))
    monkeypatch.setattr(contact, "OPEN_SECONDS", 0.05)
    tries: list[str] = []
    real = wire.Channel.connect
    monkeypatch.setattr(wire.Channel, "connect", lambda *a: (tries.append(a[0]), real(*a))[1])
    assert [checkpoint.save(state(), step).how for step in (1, 2, 3)] == ["direct"] * 3
    assert len(tries) == 1
    server.close()


def test_a_child_process_leaves_its_parent_s_ring_alone(worker: FakeWorker) -> None:
    """As the workers of a DataLoader do: fork, save nothing, end."""
    assert checkpoint.save(state(fill=1), 1).wait(WAIT)
    inherited = {os.readlink(f"/proc/self/fd/{fd}") for fd in _lane_fds()}
    child = os.fork()
    if child == 0:
        kept = {os.readlink(f"/proc/self/fd/{fd}") for fd in _lane_fds()}
        os._exit(0 if inherited and session._current is None and len(kept) < 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert checkpoint.save(state(fill=2), 2).wait(WAIT) and len(worker.connections) == 1


def _lane_fds() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "memfd:lane" in os.readlink(f"/proc/self/fd/{fd}"):
                found.append(fd)
        except OSError:
            continue
    return found


def test_a_step_saved_twice_has_the_second_state(worker: FakeWorker) -> None:
    assert checkpoint.save(state(fill=1), 1, name="last").wait(WAIT)
    assert checkpoint.save(state(fill=2), 1, name="last").wait(WAIT)
    found = checkpoint.load(name="last")
    assert found is not None and found.state == state(fill=2)


def test_requeue_is_the_worker_s_word(
    worker: FakeWorker, capfd: pytest.CaptureFixture[str]
) -> None:
    worker.answers["requeue"] = {"op": "requeued", "ok": True, "error": None}
    assert checkpoint.requeue("signal") is True
    assert worker.wait_for("requeue")[0]["reason"] == "signal"
    worker.answers["requeue"] = {"op": "requeued", "ok": False, "error": "5 restarts of 5"}
    assert checkpoint.requeue("signal") is False
    assert "not requeued: 5 restarts of 5" in capfd.readouterr().err


def test_a_step_that_is_elsewhere_is_brought(worker: FakeWorker, tmp_path: Path) -> None:
    checkpoint.save(state(fill=4), 4).wait(WAIT)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (worker.folder / "step-000000004").rename(elsewhere / "step-000000004")
    worker.answers["available"] = {"op": "available", "steps": [[4, "7.0", 1.0], ["x"], 3]}
    worker.answers["restore"] = {
        "op": "restored", "step": 4, "run": "7.0", "folder": str(elsewhere / "step-000000004"),
        "source": "remote", "error": None,
    }  # fmt: skip
    found = checkpoint.load()
    assert found is not None and found.state == state(fill=4) and found.source == "remote"
    asked = worker.wait_for("restore")[0]
    assert (asked["step"], asked["run"], asked["ranks"]) == (4, "7.0", [0])


def test_a_step_that_can_t_be_brought_gives_way_to_an_older(worker: FakeWorker) -> None:
    checkpoint.save(state(fill=4), 4).wait(WAIT)
    worker.answers["available"] = {"op": "available", "steps": [[9, "7.0", 1.0]]}
    worker.answers["restore"] = {"op": "restored", "folder": None, "error": "S3 is away"}
    with pytest.warns(RuntimeWarning, match="step 9 is left out: S3 is away"):
        found = checkpoint.load()
    assert found is not None and found.step == 4


def test_a_rank_asks_also_for_what_one_rank_saved_alone(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(monkeypatch, 3, 4)
    assert checkpoint.load() is None
    assert [m["ranks"] for m in worker.wait_for("available", 2)] == [[3], None]


# A lane by itself


def lane(size: int) -> Lane:
    fd = os.memfd_create("x")
    os.ftruncate(fd, size)
    return Lane(fd, size)


def test_pieces_don_t_wrap_and_lie_on_pages() -> None:
    ours = lane(16 * 4096)
    assert ours.take(5000) == [(0, 0, 5000)] and ours.head == 8192
    ours.take(10 * 4096)
    ours.tail = ours.head
    assert ours.take(6 * 4096 + 1) == [
        (0, 12 * 4096, 4 * 4096),
        (4 * 4096, 16 * 4096, 2 * 4096 + 1),
    ]
    assert ours.room == 16 * 4096 - rounded(6 * 4096 + 1)


def test_a_lane_s_end_is_skipped_where_room_allows() -> None:
    ours = lane(10 * 4096)
    ours.take(9 * 4096)
    ours.skip_to_start(9 * 4096)
    assert ours.head == 9 * 4096, "nothing is free yet"
    ours.tail = ours.head
    ours.skip_to_start(9 * 4096)
    assert ours.take(9 * 4096) == [(0, 10 * 4096, 9 * 4096)] and ours.room == 0


def test_a_lane_smaller_than_said_is_refused_before_it_kills() -> None:
    """Touching memory behind a file's end is SIGBUS."""
    fd = os.memfd_create("x")
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="not as large as 8192"):
        Lane(fd, 8192)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_touching_pages_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from crater_slurm.job import lane as module

    for advice in (module._POPULATE_WRITE, 12345):
        monkeypatch.setattr(module, "_POPULATE_WRITE", advice)
        ours = lane(64 * 4096)
        ours.memory[5000:5003] = b"abc"
        module.prefault(ours, 2)
        assert ours.memory[5000:5003] == b"abc"
        assert os.fstat(ours.fd).st_blocks * 512 == 64 * 4096, "all pages are there"


def test_signals_don_t_break_a_save(worker: FakeWorker) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda n, f: heard.append(n))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        savings = [checkpoint.save(state(300_000, step), step) for step in range(1, 9)]
        assert all(saving.wait(WAIT) for saving in savings)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard and loaded(8) == state(300_000, 8)
