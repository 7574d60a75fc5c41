"""A real worker with a destination: flushed after each save, by the rules, killed, brought back."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import content as files
from checkpoint_samples import make_step, spec
from checkpoint_worker import MIB, Daemon, Trainer, a_spec, content, running
from s3_server import KEY, SECRET, Server

from crater_slurm.checkpoint.folder import Folder
from crater_slurm.checkpoint.onward import Onward
from crater_slurm.checkpoint.outfile import OutFile
from crater_slurm.checkpoint.rate import TokenBucket
from crater_slurm.checkpoint.spec import Remote, Spec
from crater_slurm.checkpoint.stage import Stager
from crater_slurm.checkpoint.tools import Room
from crater_slurm.job import layout


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def away(tmp_path: Path) -> Path:
    return tmp_path / "away"


def to(cache: Path, away: Path, **more: Any) -> Spec:
    return a_spec(cache, remote=Remote(url=str(away)), **more)


def state(daemon: Daemon, **counters: float) -> dict[str, Any]:
    """The next state whose counters have reached these."""
    while True:
        found = daemon.hear("state")
        if all(found["counters"].get(name, 0) >= value for name, value in counters.items()):
            return found


def steps(folder: Path) -> list[int]:
    names = (layout.parse_step_name(name) for name in os.listdir(folder))
    return sorted(found[1] for found in names if found)


def save(daemon: Daemon, trainer: Trainer, step: int, data: bytes) -> None:
    trainer.saved(trainer.save(step, data))


@pytest.fixture
def flushing(tmp_path: Path, cache: Path, away: Path) -> Iterator[Daemon]:
    with running(tmp_path, to(cache, away, keep_last=2)) as daemon:
        yield daemon


def test_what_is_saved_is_flushed_and_both_places_keep_the_rules(
    flushing: Daemon, cache: Path, away: Path
) -> None:
    trainer = Trainer(flushing)
    data = {step: os.urandom(MIB + step) for step in (1, 2, 3, 4)}
    for count, (step, some) in enumerate(data.items(), 1):
        save(flushing, trainer, step, some)
        trainer.hear("flushed", step=step)
        found = state(flushing, flushed=count, flushed_bytes=1)
    assert steps(away) == [3, 4]
    assert [content(away, step) for step in (3, 4)] == [data[3], data[4]]
    assert found["counters"]["flushed_bytes"] == sum(map(len, data.values()))
    assert found["counters"]["flush_seconds"] > 0
    assert found["counters"]["unflushed"] == 0
    save(flushing, trainer, 5, b"x")  # the rules are applied to the cache with each save
    state(flushing, flushed=5)
    assert set(steps(cache)) <= {3, 4, 5}


def test_what_the_cache_lost_comes_back_and_is_counted_and_not_flushed_again(
    flushing: Daemon, cache: Path, away: Path
) -> None:
    trainer = Trainer(flushing)
    data = os.urandom(2 * MIB)
    save(flushing, trainer, 7, data)
    trainer.hear("flushed", step=7)
    shutil.rmtree(cache / "step-000000007")
    trainer.send("restore", name="step", step=None, run=None, ranks=[0])
    answer = trainer.hear("restored")
    assert (answer["step"], answer["source"], answer["error"]) == (7, "remote", None)
    assert content(cache, 7) == data
    found = state(flushing, restored=1)["counters"]
    assert (found["restored_bytes"], found["cache_misses"], found["unflushed"]) == (len(data), 1, 0)
    assert found["flushed"] == 1
    trainer.send("restore", name="step", step=7, run="4711.0", ranks=None)
    assert trainer.hear("restored")["source"] == "cache"


def test_sigterm_in_the_middle_of_a_flush_and_the_next_worker_goes_on(
    tmp_path: Path, cache: Path, away: Path
) -> None:
    data = os.urandom(24 * MIB)
    with running(tmp_path, to(cache, away, rate_bytes_s=16 * MIB)) as daemon:
        trainer = Trainer(daemon, lane_bytes=32 * MIB)
        save(daemon, trainer, 1, data)
        until = time.monotonic() + 30
        while not list(away.glob("step-000000001/.*.partial")) and time.monotonic() < until:
            time.sleep(0.01)
        daemon.stop()
    assert not list(away.glob("step-000000001/manifest-*")), "it was in the middle"
    with running(tmp_path, to(cache, away)) as daemon:
        daemon.send({"op": "ended"})
        found = daemon.hear("state", done=True)
        assert found["counters"]["flushed"] == 1
    assert content(away, 1) == data


def test_one_rate_holds_drain_and_flush_and_follows_the_daemon(
    tmp_path: Path, cache: Path, away: Path
) -> None:
    with running(tmp_path, to(cache, away, rate_bytes_s=1024)) as daemon:
        trainer = Trainer(daemon)
        trainer.save(1, os.urandom(MIB))
        with pytest.raises(AssertionError, match="no flushed"):
            trainer.hear("flushed", 1.0)  # the drain's debt alone lasts for a quarter of an hour
        daemon.send({"op": "limits", "rate_bytes_s": 0})
        trainer.hear("flushed", step=1)


def test_a_full_quota_costs_flushed_steps_although_all_are_kept(
    tmp_path: Path, cache: Path, away: Path
) -> None:
    with running(tmp_path, to(cache, away, quota_bytes=5 * MIB)) as daemon:
        trainer = Trainer(daemon)
        for step in range(1, 7):
            save(daemon, trainer, step, os.urandom(2 * MIB))
            trainer.hear("flushed", step=step)
        assert steps(away) == [1, 2, 3, 4, 5, 6]
        assert steps(cache) == [5, 6]


def test_without_a_destination_a_full_quota_costs_nothing_that_is_nowhere_else(
    tmp_path: Path, cache: Path
) -> None:
    with running(tmp_path, a_spec(cache, quota_bytes=5 * MIB)) as daemon:
        trainer = Trainer(daemon)
        for step in (1, 2):
            save(daemon, trainer, step, os.urandom(2 * MIB))
        number = trainer.save(3, os.urandom(2 * MIB))
        assert "keep fewer steps" in trainer.hear("failed", save=number)["error"]
        assert steps(cache) == [1, 2]


@pytest.mark.parametrize(("nodes", "left"), [((), [4]), (("n1",), [4]), (("n1", "n2"), [3, 4])])
def test_without_a_destination_the_rules_hold_and_several_nodes_keep_one_more(
    tmp_path: Path, cache: Path, nodes: tuple[str, ...], left: list[int]
) -> None:
    with running(tmp_path, a_spec(cache, keep_last=1, nodes=nodes)) as daemon:
        trainer = Trainer(daemon)
        for step in (1, 2, 3, 4):
            save(daemon, trainer, step, b"x" * 5000)
        daemon.send({"op": "ended"})
        trainer.close()
        daemon.hear("state", done=True)
    assert steps(cache) == left


def test_a_full_disk_makes_room_once(tmp_path: Path, cache: Path) -> None:
    class Full(OutFile):
        full = True

        def _allocate(self) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")

    out, asked = Full("rank-00000.safetensors", 5000), []

    def drop(over: int) -> None:
        asked.append(over)
        out.full = False

    folder = Folder(str(cache))
    room = Room(folder, 0)
    room.drop_more = drop
    room.admit(out, "step-000000001")
    assert (asked, out.fd >= 0) == ([5000], True)
    out.close()
    still = Full("rank-00001.safetensors", 5000)
    room.drop_more = lambda over: None
    with pytest.raises(OSError, match="No space"):
        room.admit(still, "step-000000001")
    still.close()


def test_a_worker_is_busy_while_it_stages_and_the_end_of_the_job_breaks_that_off(
    tmp_path: Path, cache: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in "abc":
        (data / name).write_bytes(os.urandom(8 * MIB))
    (tmp_path / "sets").mkdir()
    more = {"stage": (str(data),), "dataset_folder": str(tmp_path / "sets")}
    with running(tmp_path, a_spec(cache, rate_bytes_s=MIB // 16, **more)) as daemon:
        trainer = Trainer(daemon)
        save(daemon, trainer, 1, b"x")
        assert not daemon.hear("state")["idle"]
        trainer.send("stage", path=str(data))
        answer = trainer.hear("staged")
        assert answer["local"] is None and "still being copied" in answer["error"]
        assert state(daemon, staged_misses=1)["counters"]["staged_hits"] == 0
        trainer.close()
        daemon.send({"op": "ended"})
        daemon.hear("state", done=True)
    with running(tmp_path, a_spec(cache, **more)) as daemon:
        trainer = Trainer(daemon)
        while not daemon.hear("state")["idle"]:
            pass
        trainer.send("stage", path=str(data))
        local = trainer.hear("staged")["local"]
        assert Path(local, "a").read_bytes() == (data / "a").read_bytes()
        state(daemon, staged_hits=1)


def test_a_stager_that_is_stopped_or_never_began_keeps_nobody(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    job = spec(tmp_path, stage=(str(tmp_path / "x"),), dataset_folder=str(tmp_path / "sets"))
    one = Stager(job, lambda item: None, lambda level, text: None)
    assert one.idle
    one.stop(0)
    one.start()
    assert one.idle


def test_the_parts_of_other_nodes_are_not_this_one_s_to_flush(tmp_path: Path, cache: Path) -> None:
    make_step(cache, 10, {0: 5}, node="n2", run="4711.0")
    with running(tmp_path, to(cache, tmp_path / "away")) as daemon:
        found = daemon.hear("state")
        assert [s["flushed"] for s in found["steps"]] == [True]
        assert found["counters"]["unflushed"] == 0


def test_ranks_that_wrote_a_step_themselves_are_flushed_all(
    tmp_path: Path, cache: Path, away: Path
) -> None:
    for rank in (1, 0, 2):
        make_step(cache, 10, {rank: 500 + rank}, world=3, run="4711.0", job_id="4711")
    for _ in range(2):  # also a second worker, which finds them flushed
        with running(tmp_path, to(cache, away)) as daemon:
            daemon.send({"op": "ended"})
            assert daemon.hear("state", done=True)["counters"]["unflushed"] == 0
        assert files(away / "step-000000010") == files(cache / "step-000000010")
    assert layout.covers(layout.read_parts(str(away / "step-000000010")))


def test_ranks_that_ask_at_once_are_brought_one_after_the_other(
    cache: Path, tmp_path: Path
) -> None:
    make_step(tmp_path / "away", 10, {0: 9 * MIB, 1: MIB, 2: 3}, run="7.0")
    onward = Onward(
        spec(cache, str(tmp_path / "away"), node="n9", run="7.1"),
        lambda: None, lambda level, text: None, TokenBucket(),
    )  # fmt: skip
    sources = [onward.fetch("step", 10, "7.0", [rank])[1] for rank in (0, 1, 1, 2)]
    assert sources == ["remote", "remote", "cache", "remote"]
    assert files(cache / "step-000000010") == files(tmp_path / "away/step-000000010")
    assert onward.counters()["restored_bytes"] == 10 * MIB + 3
    assert onward.flushed("step", 10, "7.0")


def test_to_s3_and_back(s3: Server, tmp_path: Path, cache: Path) -> None:
    bucket = s3.bucket()
    remote = Remote(
        url=f"s3://{bucket}/ada/7",
        options={"endpoint": s3.endpoint, "region": "us-east-1", "addressing": "path"},
        credentials={"access_key_id": KEY, "secret_access_key": SECRET},
    )
    data = os.urandom(20 * MIB)
    with running(tmp_path, a_spec(cache, remote=remote)) as daemon:
        trainer = Trainer(daemon, lane_bytes=32 * MIB)
        save(daemon, trainer, 3, data)
        trainer.hear("flushed", step=3)
        assert s3.body(bucket, "ada/7/step-000000003/rank-00000.safetensors") == data
        shutil.rmtree(cache / "step-000000003")
        trainer.send("restore", name="step", step=None, run=None, ranks=None)
        assert trainer.hear("restored")["source"] == "remote"
        assert content(cache, 3) == data


@pytest.mark.parametrize("nodes", [(), ("n1",), ("n1", "n2")])
def test_what_one_rank_alone_wrote_costs_no_step_that_is_whole(
    tmp_path: Path, nodes: tuple[str, ...]
) -> None:
    """A trainer without a worker was killed before the other ranks of its node had written."""
    cache, world = tmp_path / "cache", 4 if len(nodes) > 1 else 2
    job = spec(cache, nodes=nodes, keep_last=2)
    for step in range(1, 5):
        make_step(cache, step, {0: 10, 1: 10}, world=world, run="7.0.1")
    for step, rank in ((4, 0), (5, 0), (6, 1)):  # in a later start, step 4 again
        folder, _ = make_step(tmp_path / "alone", step, {rank: 10}, world=world, run="7.0.2")
        os.rename(folder, cache / f"{layout.step_name(step)}.7.0.2")
    onward = Onward(job, lambda: None, lambda *_: None)
    found = onward.removable(Folder(str(cache)).scan(), 0)
    extra = () if len(nodes) <= 1 else (2,)  # several nodes keep one more
    assert sorted(step.step for step in found) == sorted({1, 2} - set(extra))
    for step in (7, 8, 9):  # now they are needless
        make_step(cache, step, {0: 10, 1: 10}, world=world, run="7.0.2")
    found = onward.removable(Folder(str(cache)).scan(), 0)
    assert {(step.step, step.run) for step in found} >= {(5, "7.0.2"), (6, "7.0.2"), (4, "7.0.2")}
