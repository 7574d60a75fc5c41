"""A destination that is a folder: read without a worker, written to when the cache can't be."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
from checkpoint_samples import Flushes, make_step, spec
from disk_faults import block_disk
from job_ring import Gate
from job_session import alone, as_rank

from crater_slurm.checkpoint.flush import Flusher
from crater_slurm.checkpoint.spec import Remote
from crater_slurm.job import checkpoint, find, layout, link, loading, session

__all__ = ["alone"]

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
WAIT = 60


@pytest.fixture
def away(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job's destination; the user has named no folder of his own."""
    place = tmp_path / "shared/ada"
    place.mkdir(parents=True)
    monkeypatch.delenv("CRATER_CHECKPOINT_DIR")
    monkeypatch.setenv("CRATER_CHECKPOINT_DESTINATION", str(place))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "_current", None)
    return place


def state(step: int) -> dict[str, object]:
    return {"step": step, "data": bytes([step]) * 300_000}


def load(**wish: object) -> checkpoint.Loaded | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoint.load(**wish)  # type: ignore[arg-type]


def with_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, away: Path) -> Gate:
    made = Gate(tmp_path, cache, remote=Remote(url=str(away)))
    monkeypatch.setenv("CRATER_RING", made.path)
    monkeypatch.setenv("CRATER_CHECKPOINT_PATH", str(cache))
    monkeypatch.setattr(session, "_current", None)
    return made


def save_and_flush(made: Gate, *steps: int) -> None:
    for step in steps:
        assert checkpoint.save(state(step), step).wait(WAIT)
    while made.daemon.hear("state")["counters"].get("flushed", 0) < len(steps):
        pass


def damage(folder: Path, step: int) -> None:
    with (folder / layout.step_name(step) / layout.file_name(0)).open("r+b") as file:
        file.seek(100_000)
        file.write(b"damage")


def test_without_a_worker_a_trainer_reads_what_the_worker_brought_there(
    away: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    made = with_worker(monkeypatch, tmp_path, cache, away)
    save_and_flush(made, 1, 2, 3)
    made.stop()
    cache.rename(tmp_path / "gone")
    monkeypatch.setattr(session, "_current", None)
    before = sorted(str(p) for p in away.rglob("*"))
    found = load()
    assert found is not None and found.state == state(3)
    assert (found.source, found.folder) == ("remote", str(away / layout.step_name(3)))
    damage(away, 3)
    with pytest.warns(RuntimeWarning, match="step 3 is left out: .*damaged between byte 0"):
        found = checkpoint.load()
    assert found is not None and found.state == state(2)
    assert checkpoint.steps() == [3, 2, 1]
    assert sorted(str(p) for p in away.rglob("*")) == before  # read only


def test_a_copy_that_is_damaged_in_the_cache_is_read_there(
    away: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    made = with_worker(monkeypatch, tmp_path, cache, away)
    save_and_flush(made, 1, 2)
    made.stop()
    monkeypatch.delenv("CRATER_RING")
    monkeypatch.setattr(session, "_current", None)
    found = load()
    assert found is not None and (found.step, found.source) == (2, "cache")
    damage(cache, 2)
    found = load()
    assert found is not None and found.state == state(2) and found.source == "remote"


def test_a_step_that_is_not_whole_there_is_not_taken(
    away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkpoint.save(state(1), 1).wait(WAIT)
    as_rank(monkeypatch, 0, 2)
    checkpoint.save(state(2), 2).wait(WAIT)
    (away / ".step-000000003.partial").mkdir()
    monkeypatch.setattr(session, "_current", None)
    monkeypatch.delenv("WORLD_SIZE")
    found = load()
    assert found is not None and found.state == state(1)


def test_a_worker_that_knows_is_not_doubted(
    away: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank of a thousand then reads all manifests there by itself."""
    looked: list[str] = []
    real = loading.scan
    monkeypatch.setattr(loading, "scan", lambda *a: (looked.append(a[0]), real(*a))[1])
    made = with_worker(monkeypatch, tmp_path, tmp_path / "cache", away)
    save_and_flush(made, 1)
    found = load()
    assert found is not None and found.source == "cache" and str(away) not in looked
    made.stop()


@root
def test_what_a_faulty_cache_refuses_goes_from_the_lane_to_the_destination(
    away: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with block_disk(tmp_path / "disk") as disk:
        made = with_worker(monkeypatch, tmp_path, disk.path / "job", away)
        save_and_flush(made, 1)
        disk.break_for_good()
        saving = checkpoint.save(state(2), 2)
        assert saving.wait(WAIT) and saving.how == "direct"
        assert f"step 2 goes to {away}: the node's cache didn't take it" in capfd.readouterr().err
        assert (away / layout.step_name(2) / "run").read_text() == "4711.0"
        found = load()
        assert found is not None and found.state == state(2)
        made.stop()
        monkeypatch.setattr(link, "GRACE_SECONDS", 0.2)
        monkeypatch.setattr(session, "_current", None)
        found = load()
        assert found is not None and found.state == state(2)
        assert checkpoint.save(state(3), 3).wait(WAIT)  # and with no worker at all
        found = load()
        assert found is not None and found.state == state(3)
        assert not (tmp_path / "checkpoints").exists()


def test_a_node_without_a_cache_saves_there(away: Path) -> None:
    saving = checkpoint.save(state(1), 1)
    assert saving.wait(WAIT)
    found = load()
    assert found is not None and found.folder == str(away / layout.step_name(1))


def test_the_user_s_own_folder_comes_first(
    away: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRATER_CHECKPOINT_DIR", str(tmp_path / "mine"))
    monkeypatch.setattr(session, "_current", None)
    assert checkpoint.save(state(1), 1).wait(WAIT)
    assert os.listdir(tmp_path / "mine") == [layout.step_name(1)] and os.listdir(away) == []


def test_nothing_is_made_where_the_mount_is_missing(
    away: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away.rmdir()
    away.parent.rmdir()
    assert checkpoint.save(state(1), 1).wait(WAIT)
    assert not away.parent.exists() and (tmp_path / "checkpoints").is_dir()


def test_another_run_s_place_is_left_to_it(away: Path) -> None:
    (away / layout.step_name(1)).mkdir()
    (away / layout.step_name(1) / "run").write_text("4700.0")
    assert checkpoint.save(state(1), 1).wait(WAIT)
    assert sorted(os.listdir(away)) == ["step-000000001", "step-000000001.4711.0"]
    assert os.listdir(away / "step-000000001") == ["run"]
    found = load()
    assert found is not None and found.state == state(1)


def test_one_node_s_worker_and_another_s_trainer_make_a_step_whole(
    away: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flushed_first in (True, False):
        step = 1 + flushed_first
        job = spec(tmp_path / "cache", str(away), job_id="4711", run="4711.0", node="n1")
        around = Flushes()
        flusher = Flusher(job, around.changed, around.log, clock=around.clock)
        made = make_step(
            tmp_path / "cache", step, {0: 1000}, world=2, run="4711.0", job_id="4711", node="n1"
        )
        as_rank(monkeypatch, 1, 2)
        for turn in (flushed_first, not flushed_first):
            if turn:
                flusher.add(*made)
                assert flusher.turn() and flusher.idle, around.lines
            else:
                assert checkpoint.save(state(step), step).wait(WAIT)
        (found,) = find.look(str(away / layout.step_name(step)), step, "step")
        assert found.ranks == {0, 1} and layout.covers(found.parts)
        for part in found.parts:
            for entry in part.files:
                assert layout.check_file(f"{found.folder}/{entry.name}", entry) == ""


def test_a_destination_that_is_no_folder_is_left_alone(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url in ("s3://bucket/x", "relative", ""):
        monkeypatch.setenv("CRATER_CHECKPOINT_DESTINATION", url)
        monkeypatch.setattr(session, "_current", None)
        assert session.current().env.destination is None
