"""A real worker process, its daemon and trainers: what it saves, answers and gives up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import make_step
from checkpoint_worker import MIB, Daemon, Trainer, a_spec, content, running

from crater_slurm.checkpoint.spec import Remote
from crater_slurm.job import layout
from crater_slurm.job.wire import WireError

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ckpt").mkdir()
    return tmp_path / "ckpt"


def manifest(folder: Path, step: int) -> layout.Manifest:
    return layout.read_parts(str(folder / layout.step_name(step)))[0]


def test_a_file_of_one_rank_and_its_manifest(tmp_path: Path, folder: Path) -> None:
    data = os.urandom(9 * MIB + 4711)
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon, lane_bytes=16 * MIB)
        trainer.saved(trainer.save(120, data))
        assert content(folder, 120) == data
        found = manifest(folder, 120)
        assert (found.run, found.job_id, found.cluster, found.node) == (
            "4711.0",
            "4711",
            "c1",
            "n1",
        )
        assert (found.world_size, found.ranks, found.size) == (1, [0], len(data))
        assert abs(found.time - time.time()) < 60
        assert sorted(os.listdir(folder)) == ["step-000000120"]
        assert sorted(os.listdir(folder / "step-000000120")) == [
            "manifest-00000.json", "rank-00000.safetensors",
        ]  # fmt: skip


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 4 * MIB, 8 * MIB, 8 * MIB + 1])
def test_every_size(tmp_path: Path, folder: Path, size: int) -> None:
    data = os.urandom(size)
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon, lane_bytes=16 * MIB)
        trainer.saved(trainer.save(1, data))
    assert content(folder, 1) == data


def test_many_ranks_share_the_ring_and_the_step_needs_them_all(
    tmp_path: Path, folder: Path
) -> None:
    with running(tmp_path, a_spec(folder, ring_bytes=8 * MIB)) as daemon:
        ranks = [Trainer(daemon, rank, 8, 64 * MIB) for rank in range(8)]
        assert [trainer.length for trainer in ranks] == [MIB] * 8
        data = [os.urandom(MIB - 5000 * rank) for rank in range(8)]
        numbers = [t.save(3, data[t.rank]) for t in ranks[:-1]]
        time.sleep(0.2)
        assert not (folder / "step-000000003").exists()
        numbers.append(ranks[-1].save(3, data[-1]))
        for trainer, number in zip(ranks, numbers, strict=True):
            trainer.saved(number)
    assert [content(folder, 3, rank) for rank in range(8)] == data
    assert manifest(folder, 3).ranks == list(range(8))


def test_a_stream_larger_than_its_lane(tmp_path: Path, folder: Path) -> None:
    data = os.urandom(23 * MIB + 11)
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon, lane_bytes=2 * MIB)
        trainer.saved(trainer.save(1, data))
        again = os.urandom(3 * MIB)
        trainer.saved(trainer.save(2, again, 300 * 4096))
    assert content(folder, 1) == data
    assert content(folder, 2) == again


def test_saves_that_fit_are_freed_when_they_are_saved_and_not_before(
    tmp_path: Path, folder: Path
) -> None:
    with running(tmp_path, a_spec(folder)) as daemon:
        first, second = (Trainer(daemon, rank, 2, MIB) for rank in range(2))
        number = first.save(1, b"a" * 10_000)
        time.sleep(0.3)
        with pytest.raises(AssertionError):
            first.hear("freed", 0.1)
        second.save(1, b"b" * 10_000)
        first.saved(number)
        assert first.hear("freed")["position"] == 12288


def test_the_same_step_again_is_answered_at_once(tmp_path: Path, folder: Path) -> None:
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon)
        trainer.saved(trainer.save(1, b"first"))
        before = (folder / "step-000000001" / "rank-00000.safetensors").stat().st_ino
        trainer.saved(trainer.begin(1, 1000))
        assert (folder / "step-000000001" / "rank-00000.safetensors").stat().st_ino == before


def test_a_later_run_replaces_the_step_of_an_earlier_one(tmp_path: Path, folder: Path) -> None:
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon)
        trainer.saved(trainer.save(1, b"first"))
    with running(tmp_path, a_spec(folder, run="4711.1")) as daemon:
        trainer = Trainer(daemon)
        trainer.saved(trainer.save(1, b"second"))
        assert content(folder, 1) == b"second"
        assert manifest(folder, 1).run == "4711.1"
        daemon.send({"op": "ended"})
        trainer.close()
        daemon.hear("state", done=True)
    assert os.listdir(folder) == ["step-000000001"]


def test_one_rank_saves_alone(tmp_path: Path, folder: Path) -> None:
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon, 3, 4)
        trainer.saved(trainer.save(9, b"alone", ranks=1, local=1))
    assert manifest(folder, 9).world_size == 1
    assert content(folder, 9) == b"alone"


def test_a_rank_that_never_saves_is_named(tmp_path: Path, folder: Path) -> None:
    with running(tmp_path, a_spec(folder)) as daemon:
        ranks = [Trainer(daemon, rank, 4, MIB) for rank in range(4)]
        numbers = [t.save(100, b"x" * 5000) for t in ranks if t.rank != 2]
        ranks[2].save(200, b"x" * 5000)
        error = ranks[0].hear("failed", save=numbers[0])["error"]
        assert error == (
            "step 100: rank 2 of this node never saved it (saved: rank 0, 1, 3 of 4 here); call "
            "save() on every rank, or save(..., only_rank=0)."
        )
        ranks[3].hear("failed", save=numbers[2])
        later = [t.save(200, b"y" * 5000) for t in ranks if t.rank != 2]
        ranks[0].saved(later[0])
    assert sorted(n for n in os.listdir(folder) if not n.startswith(".")) == ["step-000000200"]


def test_a_save_taken_back_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon)
        number = trainer.begin(1, 3 * MIB)
        part = os.urandom(MIB)
        trainer.send("data", save=number, at=0, position=trainer.put(part), bytes=MIB)
        trainer.send("abandon", save=number)
        assert trainer.hear("freed")["position"] == MIB
        trainer.saved(trainer.save(1, b"now"))
        daemon.send({"op": "ended"})
        trainer.close()
        daemon.hear("state", done=True)
    assert content(folder, 1) == b"now"
    assert os.listdir(folder) == ["step-000000001"]


def test_a_file_that_the_trainer_wrote_itself_is_checked_and_taken(
    tmp_path: Path, folder: Path
) -> None:
    data = os.urandom(9 * MIB + 3)
    with running(tmp_path, a_spec(folder)) as daemon:
        ring, own = Trainer(daemon, 0, 2), Trainer(daemon, 1, 2, 0)
        assert own.answer["bytes"] == 0
        partial = Path(own.answer["partial_root"]) / layout.partial_name("step-000000001")
        partial.mkdir()
        number = own.begin(1, len(data))
        (partial / layout.file_name(1)).write_bytes(data)
        own.send("direct", save=number)
        ring.save(1, b"from the ring")
        own.saved(number)
        bad = own.begin(2, 1000)
        (folder / ".step-000000002.partial").mkdir()
        (folder / ".step-000000002.partial" / layout.file_name(1)).write_bytes(b"short")
        own.send("direct", save=bad)
        assert "has 5 bytes, not the 1000 announced" in own.hear("failed", save=bad)["error"]
        missing = own.begin(3, 1000)
        own.send("direct", save=missing)
        assert "is gone" in own.hear("failed", save=missing)["error"]
    assert content(folder, 1, 1) == data


def test_ranks_that_wrote_without_a_worker_are_joined(tmp_path: Path, folder: Path) -> None:
    """Rank 1 lost the worker and wrote into the final folder; rank 0's save joins it there."""
    final = folder / "step-000000004"
    final.mkdir()
    (final / "rank-00001.safetensors").write_bytes(b"own work")
    entry = layout.FileEntry(
        "rank-00001.safetensors", 1, 8, layout.chunk_sums(memoryview(b"own work"))
    )
    whole = layout.Manifest(4, 2, [entry], run="4711.0", time=1.0)
    (final / "manifest-00001.json").write_text(whole.to_json())
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon, 0, 2)
        trainer.saved(trainer.save(4, b"by the ring"))
    parts = layout.read_parts(str(final))
    assert layout.covers(parts)
    assert content(folder, 4, 0) == b"by the ring"
    assert content(folder, 4, 1) == b"own work"


def test_a_faulty_cache_hides_nothing_that_lies_at_the_destination(
    tmp_path: Path, folder: Path
) -> None:
    away = tmp_path / "away"
    make_step(away, 3, {0: 100}, run="4711.0")
    with running(tmp_path, a_spec(folder, remote=Remote(url=str(away)))) as daemon:
        alone = Trainer(daemon, 0, 1, 0)
        alone.send("status")
        alone.hear("status")
        folder.rename(tmp_path / "gone")
        folder.write_text("no folder")  # as an unreadable disk: any error but "not there"
        alone.send("available", name="step", ranks=[0])
        assert [s[:2] for s in alone.hear("available")["steps"]] == [[3, "4711.0"]]
        alone.send("restore", name="step", step=3, run="4711.0", ranks=[0])
        answer = alone.hear("restored")
        assert (answer["folder"], answer["source"]) == (str(away / "step-000000003"), "remote")
        alone.send("restore", name="step", step=None)
        assert alone.hear("restored")["folder"] == str(away / "step-000000003")


def test_what_can_be_loaded_is_told(tmp_path: Path, folder: Path) -> None:
    with running(tmp_path, a_spec(folder)) as daemon:
        ranks = [Trainer(daemon, rank, 2, MIB) for rank in range(2)]
        for step in (1, 2):
            numbers = [t.save(step, b"x" * 100) for t in ranks]
            for trainer, number in zip(ranks, numbers, strict=True):
                trainer.saved(number)
                trainer.freed = trainer.head
        alone = Trainer(daemon, 0, 1, 0)
        alone.send("restore", name="step", step=None)
        answer = alone.hear("restored")
        assert (answer["step"], answer["run"], answer["source"]) == (2, "4711.0", "cache")
        assert answer["folder"] == str(folder / "step-000000002")
        alone.send("restore", name="step", step=1, ranks=[1])
        assert alone.hear("restored")["folder"] == str(folder / "step-000000001")
        alone.send("restore", name="step", step=7)
        assert alone.hear("restored")["folder"] is None
        alone.send("available", name="step", ranks=None)
        assert [s[:2] for s in alone.hear("available")["steps"]] == [[2, "4711.0"], [1, "4711.0"]]
        alone.send("available", name="step", ranks=[0, 5])
        assert alone.hear("available")["steps"] == []
        alone.send("status")
        assert [s["step"] for s in alone.hear("status")["steps"]] == [1, 2]
        alone.send("stage", path="/data/set")
        assert "not among the data that this job stages" in alone.hear("staged")["error"]


def test_a_requeue_is_the_daemon_s_to_grant(tmp_path: Path, folder: Path) -> None:
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon)
        trainer.send("requeue", reason="time is nearly up")
        asked = daemon.hear("requeue")
        assert asked["reason"] == "time is nearly up"
        daemon.send(
            {"op": "requeued", "id": asked["id"], "ok": False, "error": "3 times is enough"}
        )
        answer = trainer.hear("requeued")
        assert (answer["ok"], answer["error"]) == (False, "3 times is enough")


def test_verify_finds_a_flipped_bit(tmp_path: Path, folder: Path) -> None:
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon)
        trainer.saved(trainer.save(1, bytes(10_000)))
        daemon.send({"op": "verify", "id": "v1"})
        assert daemon.hear("answer", id="v1")["damaged"] == []
        path = folder / "step-000000001" / "rank-00000.safetensors"
        with path.open("r+b") as file:
            file.seek(5000)
            file.write(b"\x01")
        daemon.send({"op": "verify", "id": "v2", "step": 1})
        assert daemon.hear("answer", id="v2")["damaged"] == [
            "cache: step-000000001: rank-00000.safetensors is damaged between byte 0 and 10000"
        ]


def test_the_end_of_the_job_finishes_what_is_committed_and_removes_the_rest(
    tmp_path: Path, folder: Path
) -> None:
    data = os.urandom(3 * MIB)
    with running(tmp_path, a_spec(folder, rate_bytes_s=20 * MIB)) as daemon:
        first, second = (Trainer(daemon, rank, 2, 4 * MIB) for rank in range(2))
        for trainer in (first, second):
            trainer.save(1, data)
        first.save(2, b"alone")
        second.begin(2, 1000)
        for trainer in (first, second):
            trainer.close()
        daemon.send({"op": "ended"})
        state = daemon.hear("state", done=True)
        assert [step["step"] for step in state["steps"]] == [1]
        assert daemon.process is not None and daemon.process.wait(10) == 0
    assert os.listdir(folder) == ["step-000000001"]
    assert content(folder, 1, 1) == data


def test_sigterm_ends_it_soon_and_leaves_what_the_next_can_finish(
    tmp_path: Path, folder: Path
) -> None:
    with running(tmp_path, a_spec(folder)) as daemon:
        first, second = (Trainer(daemon, rank, 2, MIB) for rank in range(2))
        number = first.save(1, b"a" * 5000)
        partial = folder / ".step-000000001.partial"
        while not list(partial.glob(".rank-*.json")):
            time.sleep(0.01)
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(10) == 0
        daemon.start()
        second.again()
        later = second.save(1, b"b" * 5000)
        second.saved(later)
        first.again()
        first.saved(number)
    assert content(folder, 1, 0) == b"a" * 5000


def test_limits_change_while_it_runs(tmp_path: Path, folder: Path) -> None:
    with running(tmp_path, a_spec(folder, rate_bytes_s=4096)) as daemon:
        trainer = Trainer(daemon, lane_bytes=8 * MIB)
        number = trainer.save(1, bytes(8 * MIB))
        daemon.send({"op": "limits", "rate_bytes_s": 0, "ring_bytes": 0})
        trainer.saved(number)
        assert Trainer(daemon).length == 0


def test_a_lane_is_bounded_by_what_the_daemon_says_and_by_the_ring(
    tmp_path: Path, folder: Path
) -> None:
    with running(tmp_path, a_spec(folder, ring_bytes=6 * MIB)) as daemon:
        first = Trainer(daemon, lane_bytes=4 * MIB + 100)
        assert first.length == 4 * MIB
        second = Trainer(daemon, lane_bytes=4 * MIB)
        assert second.length == 2 * MIB
        third = Trainer(daemon, lane_bytes=4 * MIB)
        assert (third.length, third.answer["policy"]) == (0, "direct")
        second.close()
        deadline = time.monotonic() + 10
        while Trainer(daemon, lane_bytes=MIB).length == 0:
            assert time.monotonic() < deadline
        channel = daemon.lane({**first.opening, "bytes": 4 * MIB}, limit=4096)
        assert channel.receive()[0]["bytes"] == 0


def test_it_costs_nothing_while_it_is_idle(tmp_path: Path, folder: Path) -> None:
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon, lane_bytes=4 * MIB)
        trainer.saved(trainer.save(1, bytes(MIB)))
        daemon.hear("state", idle=True)
        assert daemon.process is not None
        pid = daemon.process.pid
        before = switches(pid)
        time.sleep(2)
        assert switches(pid) - before <= 2
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        own = int(fields["RssAnon"].split()[0]) + int(fields["RssFile"].split()[0])
        assert own < 25 * 1024, status


def switches(pid: int) -> int:
    """How often the threads of a process have gone to sleep."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        total += int(fields["voluntary_ctxt_switches"])
    return total


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A checkpoint folder that other users can reach; pytest's own can't be."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        os.chmod(name, 0o755)
        (Path(name) / "ckpt").mkdir()
        yield Path(name) / "ckpt"


@root
def test_it_becomes_the_user_and_its_memory_is_nobody_s(tmp_path: Path, open_folder: Path) -> None:
    os.chown(open_folder, NOBODY, NOBODY)
    with running(tmp_path, a_spec(open_folder, uid=NOBODY, gid=NOBODY, user="nobody")) as daemon:
        trainer = Trainer(daemon)
        trainer.saved(trainer.save(1, b"mine"))
        assert daemon.process is not None
        status = Path(f"/proc/{daemon.process.pid}/status").read_text()
        fields = {k: v.split() for k, v in (line.split(":", 1) for line in status.splitlines())}
        assert set(fields["Uid"]) == set(fields["Gid"]) == {str(NOBODY)}
        assert set(fields["CapEff"]) == set(fields["CapPrm"]) == {"0" * 16}
        assert fields["NoNewPrivs"] == ["1"]
        assert Path(f"/proc/{daemon.process.pid}/mem").stat().st_uid == 0  # not dumpable
        code = f"import os; os.setgid({NOBODY}); os.setuid({NOBODY}); open('/proc/{daemon.process.pid}/environ', 'rb').read()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "PermissionError" in done.stderr
    path = open_folder / "step-000000001" / "rank-00000.safetensors"
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (NOBODY, 0o600)
    assert path.parent.stat().st_mode & 0o777 == 0o700


@root
def test_another_user_s_folder_is_not_written_to(tmp_path: Path, open_folder: Path) -> None:
    with running(tmp_path, a_spec(open_folder, uid=NOBODY, gid=NOBODY, user="nobody")) as daemon:
        trainer = Trainer(daemon)
        number = trainer.save(1, b"mine")
        error = trainer.hear("failed", save=number)["error"]
        assert error.startswith(
            f"step 1 of rank 0 is not saved: you may not write to {open_folder}"
        )


def test_without_a_daemon_it_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); "
        "from crater_slurm.checkpoint import worker; worker._CONNECT_S = 0.2; worker.main()"
    )
    daemon = Daemon(tmp_path, a_spec(tmp_path), program)
    monkeypatch.setattr(daemon, "connect", lambda: None)
    daemon.start()
    assert daemon.process is not None
    assert daemon.process.wait(10) == 1


def test_a_spec_of_another_version_ends_it_with_a_sentence(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, a_spec(tmp_path))
    daemon.spec = type("Odd", (), {"to_json": lambda self: '{"unknown": 1, "remote": {}}'})()  # type: ignore[assignment]
    daemon.start()
    assert daemon.process is not None
    assert daemon.process.wait(10) == 1


def a_trainer_of(daemon: Daemon, **changed: Any) -> dict[str, Any]:
    """The answer to an ``open`` with some values changed."""
    good = Trainer(daemon).opening
    channel = daemon.lane({**good, **changed})
    answer, _ = channel.receive()
    with pytest.raises(WireError):
        channel.receive()
    return answer


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"version": 2}, "speak version 2 of the messages, only 1"),
        ({"run": "4711.1"}, "take run 4711.1: this node's is 4711.0"),
        ({"rank": 1}, "use rank=1: a whole number from 0 to 0 belongs"),
        ({"bytes": "many"}, "use bytes='many'"),
        ({"world": 0}, "use world=0"),
    ],
)
def test_an_opening_that_can_t_be_is_refused(
    tmp_path: Path, folder: Path, changed: dict[str, Any], error: str
) -> None:
    with running(tmp_path, a_spec(folder)) as daemon:
        assert error in a_trainer_of(daemon, **changed)["error"]
        trainer = Trainer(daemon)
        trainer.saved(trainer.save(1, b"still at work"))


def test_huge_pages_fall_back_to_small_ones(tmp_path: Path, folder: Path) -> None:
    """Without reserved huge pages, which a test can't count on, the lane is there all the same."""
    with running(tmp_path, a_spec(folder, huge_pages="hugetlb")) as daemon:
        trainer = Trainer(daemon, lane_bytes=4 * MIB)
        assert trainer.length == 4 * MIB
        trainer.saved(trainer.save(1, b"x" * 100_000))
    assert content(folder, 1) == b"x" * 100_000


@root
def test_reserved_huge_pages_are_used_where_they_are(tmp_path: Path, folder: Path) -> None:
    pool = Path("/proc/sys/vm/nr_hugepages")
    before = pool.read_text()
    try:
        pool.write_text("8")
        if int(pool.read_text()) < 8:
            pytest.skip("no huge pages to be had")
        with running(tmp_path, a_spec(folder, huge_pages="hugetlb")) as daemon:
            trainer = Trainer(daemon, lane_bytes=9 * MIB)
            assert trainer.length == 8 * MIB
            assert os.fstat(trainer.fd).st_blksize == 2 * MIB
            data = os.urandom(12 * MIB + 1)
            trainer.saved(trainer.save(1, data))
            trainer.again()
            trainer.saved(trainer.save(2, b"by a lane that was offered"))
        assert content(folder, 1) == data
    finally:
        pool.write_text(before)
