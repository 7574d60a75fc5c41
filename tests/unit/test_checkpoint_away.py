"""Loading past a cache that is dead: the worker reads the object store, the trainer has the memory."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import s3_server
from checkpoint_samples import make_step, spec
from checkpoint_worker import MIB, Trainer, a_spec, running
from disk_faults import tmpfs
from job_ring import Gate
from job_session import alone, as_rank

from crater_slurm.checkpoint import away, restore
from crater_slurm.checkpoint.spec import Remote
from crater_slurm.job import checkpoint, layout, session
from crater_slurm.job.layout import CHUNK_BYTES
from crater_slurm.job.stream import SLOTS

__all__ = ["alone"]

ROOT = Path(__file__).resolve().parents[2]
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


def store(s3: s3_server.Server, bucket: str) -> Remote:
    return Remote(
        url=f"s3://{bucket}/ckpt",
        options={"endpoint": s3.endpoint, "addressing": "path"},
        credentials=s3_server.CREDENTIALS,
    )


def state(step: int, rank: int = 0, size: int = 19 * MIB + 5) -> dict[str, Any]:
    return {"step": step, "rank": rank, "data": bytes([step + rank]) * size, "more": [b"y" * 4096]}


def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, remote: Remote) -> Gate:
    monkeypatch.delenv("CRATER_CHECKPOINT_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    made = Gate(tmp_path, cache, remote=remote)
    monkeypatch.setenv("CRATER_RING", made.path)
    monkeypatch.setenv("CRATER_CHECKPOINT_PATH", str(cache))
    monkeypatch.setattr(session, "_current", None)
    return made


def save_all(
    monkeypatch: pytest.MonkeyPatch, made: Gate, steps: tuple[int, ...], ranks: int = 1
) -> None:
    """Steps saved by all ranks and flushed."""
    for step in steps:
        savings = []
        for rank in range(ranks):
            if ranks > 1:
                as_rank(monkeypatch, rank, ranks)
            savings.append((session.current(), checkpoint.save(state(step, rank), step)))
        assert all(saving.wait(60) for _, saving in savings)
    flushed(made, len(steps))


def flushed(made: Gate, count: int) -> None:
    while made.daemon.hear("state")["counters"].get("flushed", 0) < count:
        pass


def load(**wish: Any) -> checkpoint.Loaded | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoint.load(**wish)


def vanish(cache: Path) -> None:
    subprocess.run(["umount", "-l", str(cache.parent)], check=True)


def read_only(cache: Path) -> None:
    full(cache)
    subprocess.run(["mount", "-o", "remount,ro", str(cache.parent)], check=True)


def full(cache: Path) -> None:
    vanish(cache)
    where = str(cache.parent)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", where], check=True)
    cache.mkdir()


@root
@pytest.mark.parametrize("fault", [vanish, read_only, full])
def test_a_state_is_loaded_from_s3_though_the_cache_is_dead(
    fault: Callable[[Path], None],
    alone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    s3: s3_server.Server,
) -> None:
    bucket = s3.bucket()
    with tmpfs(tmp_path / "disk", "200m") as disk:
        made = gate(monkeypatch, tmp_path, disk.path / "job", store(s3, bucket))
        save_all(monkeypatch, made, (1, 2))
        fault(disk.path / "job")
        monkeypatch.setattr(session, "_current", None)
        found = load()
        assert found is not None and found.state == state(2)
        assert (found.step, found.source, found.world_size) == (2, "remote", 1)
        assert found.folder == f"s3://{bucket}/ckpt/step-000000002"
        older = load(step=1, mmap=True)
        assert older is not None and older.state == state(1)
        made.stop()


@root
def test_every_rank_gets_its_own_and_all_where_they_are_asked_for(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: s3_server.Server
) -> None:
    with tmpfs(tmp_path / "disk", "200m") as disk:
        made = gate(monkeypatch, tmp_path, disk.path / "job", store(s3, s3.bucket()))
        save_all(monkeypatch, made, (1,), ranks=2)
        vanish(disk.path / "job")
        for rank in (0, 1):
            as_rank(monkeypatch, rank, 2)
            found = load()
            assert found is not None and found.state == state(1, rank)
        both = load(ranks="all")
        assert both is not None and both.state == {rank: state(1, rank) for rank in (0, 1)}
        made.stop()


@root
def test_what_is_damaged_there_is_left_out_and_the_older_taken(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: s3_server.Server
) -> None:
    bucket = s3.bucket()
    with tmpfs(tmp_path / "disk", "200m") as disk:
        made = gate(monkeypatch, tmp_path, disk.path / "job", store(s3, bucket))
        save_all(monkeypatch, made, (1, 2))
        vanish(disk.path / "job")
        key = f"ckpt/{layout.step_name(2)}/{layout.file_name(0)}"
        data = bytearray(s3.body(bucket, key))
        data[11 * MIB] ^= 1
        s3.client.put_object(Bucket=bucket, Key=key, Body=bytes(data))
        monkeypatch.setattr(session, "_current", None)
        with pytest.warns(RuntimeWarning, match="is damaged between byte 8388608 and 16777216"):
            found = checkpoint.load()
        assert found is not None and found.state == state(1)
        made.stop()


def test_the_buffer_is_all_that_a_state_takes_beside_itself(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: s3_server.Server
) -> None:
    """With a copy of the file in between it would be twice the state."""
    size = 400 * MIB
    made = gate(monkeypatch, tmp_path, tmp_path / "cache", store(s3, s3.bucket()))
    checkpoint.save({"data": bytearray(size), "step": 1}, 1).wait(120)
    flushed(made, 1)
    session.reset()
    (tmp_path / "cache").rename(tmp_path / "gone")
    code = (
        "from crater_slurm.job import checkpoint; found = checkpoint.load();"
        f"assert found.source == 'remote' and len(found.state['data']) == {size};"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) * 1024 < 1.5 * size
    made.stop()


def a_buffer(
    size: int = SLOTS * CHUNK_BYTES, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_a_hostile_reader_gets_words_and_the_others_are_served(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    make_step(tmp_path / "away", 1, {0: 9 * MIB}, run="4711.0", job_id="4711")
    job = a_spec(tmp_path / "cache", remote=Remote(url=str(tmp_path / "away")))
    wish = {"op": "stream", "name": "step", "step": 1, "run": "4711.0", "rank": 0}
    with running(tmp_path, job) as daemon:
        bad = Trainer(daemon, lane_bytes=0)
        for fds in (
            [], [a_buffer(seals=0)], [a_buffer(size=4096)], [a_buffer(size=72 * MIB)],
            [os.open("/dev/zero", os.O_RDWR)], [a_buffer(seals=15)],
        ):  # fmt: skip
            bad.channel.send(wish, fds)
            assert "could not" in bad.hear("error")["error"]
        bad.channel.send({"op": "piece", "slot": 0, "at": 0})
        assert "not open" in bad.hear("error")["error"]
        for wrong in ({"rank": 1}, {"step": 2}, {"run": "4711.1"}, {"name": "other"}):
            bad.channel.send({**wish, **wrong}, [a_buffer()])
            assert "can't be read at the destination" in bad.hear("streaming")["error"]

        good, fd = Trainer(daemon, lane_bytes=0), a_buffer()
        good.channel.send(wish, [fd])
        told = good.hear("streaming")
        entry = layout.Manifest.from_json(os.pread(fd, told["bytes"], 0)).files[0]
        for wrong in ({"at": 1}, {"at": 16 * MIB}, {"slot": SLOTS}, {"slot": -1}, {"at": "0"}):
            good.channel.send({"op": "piece", "slot": 0, "at": 0, **wrong})
            assert "could not" in good.hear("error")["error"]
        good.channel.send({"op": "piece", "slot": 3, "at": 8 * MIB})
        assert good.hear("piece", slot=3)["bytes"] == MIB
        expected = (tmp_path / "away" / layout.step_name(1) / entry.name).read_bytes()[8 * MIB :]
        assert os.pread(fd, MIB, 3 * CHUNK_BYTES) == expected


def test_a_file_that_is_not_there_is_told_and_one_that_is_has_its_sums(tmp_path: Path) -> None:
    make_step(tmp_path / "away", 1, {0: 9 * MIB, 1: 5}, seed=1)
    job = spec(tmp_path / "cache", str(tmp_path / "away"))
    found = away.open_file(job, "step", 1, "7.0", 1)
    data = bytearray(5)
    found.read(0, memoryview(data))
    assert [entry.rank for entry in found.manifest.files] == [1]
    assert found.manifest.files[0].sums == layout.chunk_sums(memoryview(data))
    with pytest.raises(restore.NotThereError, match="has no rank 2"):
        away.open_file(job, "step", 1, "7.0", 2)
