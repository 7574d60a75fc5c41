"""Disks and destinations that fail under a training: it goes on, is told, and saves again after."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import s3_server
from checkpoint_worker import PATIENCE_S
from disk_faults import block_disk, tmpfs
from job_ring import Gate
from job_session import alone
from node_fakes import wait_for

from crater_slurm.checkpoint.spec import Remote
from crater_slurm.job import checkpoint, layout, saving, session

__all__ = ["alone"]

MIB = 1 << 20
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


@pytest.fixture
def no_folder(alone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user has given no folder, and ./checkpoints can't be made."""
    monkeypatch.delenv("CRATER_CHECKPOINT_DIR")
    monkeypatch.chdir("/proc")


def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, **spec: Any) -> Gate:
    gate = Gate(tmp_path, cache, **spec)
    monkeypatch.setenv("CRATER_RING", gate.path)
    monkeypatch.setenv("CRATER_CHECKPOINT_PATH", str(cache))
    monkeypatch.setattr(session, "_current", None)
    return gate


def state(step: int, size: int = 4 * MIB) -> dict[str, Any]:
    return {"step": step, "data": bytes([step]) * size}


def save(step: int, size: int = 4 * MIB) -> checkpoint.Saving:
    """As a training does that doesn't want to end over a checkpoint; waits until it is decided."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = checkpoint.save(state(step, size), step, strict=False)
    found.wait(PATIENCE_S)
    assert found.done()
    return found


def newest() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = checkpoint.load()
    assert found is not None
    assert found.state == state(found.step, len(found.state["data"]))
    return found.step


@root
def test_a_full_cache(
    no_folder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    with tmpfs(tmp_path / "disk", "10m") as disk:
        gate = begin(monkeypatch, tmp_path, disk.path)
        assert save(1).error is None
        assert save(2).error is None
        for step in (3, 4):
            error = save(step).error
            assert error is not None
            assert f"there is no room left on {disk.path}" in error
            assert "With CRATER_CHECKPOINT_DIR set" in error
            assert newest() == 2
        assert "step 3 of rank 0 is not saved: there is no room left" in capfd.readouterr().err
        disk.remount("size=40m")
        assert save(5).error is None
        assert newest() == 5
        final = {name for name in os.listdir(disk.path) if not layout.is_partial(name)}
        assert final == {layout.step_name(step) for step in (1, 2, 5)}
        gate.stop()


@root
def test_what_a_full_cache_refuses_goes_from_the_lane_to_the_user_s_folder(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    with tmpfs(tmp_path / "disk", "10m") as disk:
        gate = begin(monkeypatch, tmp_path, disk.path)
        found = [save(step) for step in range(1, 5)]
        assert [s.error for s in found] == [None] * 4
        assert [s.how for s in found] == ["ring", "ring", "direct", "direct"]
        assert sorted(os.listdir(alone)) == ["step-000000003", "step-000000004"]
        assert newest() == 4
        assert f"step 3 goes to {alone}: the node's cache didn't take it" in capfd.readouterr().err
        gate.limit = MIB
        session.reset()  # now with a lane that is smaller than the state
        assert save(5).error is None
        assert newest() == 5
        gate.stop()


@root
def test_a_disk_that_can_t_write_blocks(
    no_folder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with block_disk(tmp_path / "disk") as disk:
        cache = disk.path / "job"
        gate = begin(monkeypatch, tmp_path, cache)
        assert save(1).error is None
        disk.break_for_good()
        for step in (2, 3):
            error = save(step).error
            assert error is not None
            assert f"the disk of {cache} reports an error (Input/output error)" in error
            assert newest() == 1
        disk.replace()
        cache.mkdir()
        assert save(4).error is None
        assert newest() == 4
        gate.stop()


@root
def test_a_cache_that_is_read_only_for_a_while(
    no_folder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tmpfs(tmp_path / "disk", "64m") as disk:
        gate = begin(monkeypatch, tmp_path, disk.path)
        assert save(1).error is None
        disk.remount("ro")
        error = save(2).error
        assert error is not None
        assert f"{disk.path} can only be read" in error
        assert newest() == 1
        disk.remount("rw")
        assert save(3).error is None
        assert newest() == 3
        gate.stop()


@root
def test_a_cache_whose_mount_vanishes_and_comes_back(
    no_folder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tmpfs(tmp_path / "disk", "64m") as disk:
        cache = disk.path / "job"
        gate = begin(monkeypatch, tmp_path, cache)
        assert save(1).error is None
        disk.vanish()
        error = save(2).error
        assert error is not None
        assert f"{cache} is gone" in error
        cache.mkdir()
        assert save(3).error is None
        assert newest() == 3
        gate.stop()


def test_a_store_that_fails_for_a_while_gets_everything_in_the_end(
    no_folder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: s3_server.Server
) -> None:
    """Refused, 500, 503, slow, cut off and corrupted, all while steps are saved."""
    bucket = s3.bucket()
    faults: list[s3_server.Fault] = [
        ("status", 403), ("status", 500), ("status", 503), ("pause", 1), ("cut", 1000),
        ("corrupt", 77), ("status", 500), ("lose_answer", 0), ("status", 503),
    ]  # fmt: skip
    with s3_server.proxied(s3, s3_server.once_each(faults, lambda r: r.method == "PUT")) as way:
        remote = Remote(
            url=f"s3://{bucket}/ckpt",
            options={"endpoint": way.endpoint, "addressing": "path"},
            credentials=s3_server.CREDENTIALS,
        )
        gate = begin(monkeypatch, tmp_path, tmp_path / "cache", remote=remote)
        for step in (1, 2, 3):
            assert save(step, 300_000).error is None
        names = [f"ckpt/{layout.step_name(step)}/manifest-00000.json" for step in (1, 2, 3)]

        def there() -> bool:
            gate.daemon.send({"op": "flush", "id": "f"})  # what rests is tried again at once
            gate.daemon.hear("answer", id="f")  # a daemon that reads nothing is dropped
            return set(names) <= s3.keys(bucket).keys()

        assert wait_for(there, 60)
        for step in (1, 2, 3):
            folder = tmp_path / "cache" / layout.step_name(step)
            key = f"ckpt/{layout.step_name(step)}/rank-00000.safetensors"
            assert s3.body(bucket, key) == (folder / "rank-00000.safetensors").read_bytes()
        gate.stop()


def test_a_copy_in_the_cache_that_is_damaged_comes_anew_from_the_destination(
    no_folder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, away = tmp_path / "cache", tmp_path / "away"
    gate = begin(monkeypatch, tmp_path, cache, remote=Remote(url=str(away)))
    assert save(1).error is None
    assert save(2).error is None
    done = away / layout.step_name(2) / "manifest-00000.json"
    assert wait_for(done.exists, 30)
    with (cache / layout.step_name(2) / "rank-00000.safetensors").open("r+b") as file:
        file.seek(3 * MIB)
        file.write(b"damage")
    assert newest() == 2
    found = layout.read_parts(str(cache / layout.step_name(2)))[0]
    path = cache / layout.step_name(2) / "rank-00000.safetensors"
    assert layout.check_file(str(path), found.files[0]) == ""
    assert not [line for line in saving._told if "Traceback" in line]
    gate.stop()
