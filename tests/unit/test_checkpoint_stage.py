"""Staging: whole copies or none, told either way, and nothing copied twice."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import s3_server
from checkpoint_samples import MIB, Flushes, spec
from s3_server import Server

from crater_slurm.checkpoint import stage_copy
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.checkpoint.stage import Stager, local_name


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A tree with many small files, a large one, links, and what is no file."""
    root = tmp_path / "data"
    (root / "train" / "deep").mkdir(parents=True)
    for number in range(200):
        (root / "train" / f"{number}.bin").write_bytes(bytes([number]) * number)
    (root / "train" / "deep" / "large").write_bytes(os.urandom(9 * MIB + 1))
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("run.sh")
    (root / "folder-link").symlink_to("train/deep")
    (root / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    return root


def job(tmp_path: Path, *stage: str | Path, **more: object) -> Spec:
    folder = tmp_path / "dataset"
    folder.mkdir(exist_ok=True)
    names = tuple(str(s) for s in stage)
    return spec(tmp_path, more.pop("url", ""), stage=names, dataset_folder=str(folder), **more)  # type: ignore[arg-type]


def stager(job: Spec, around: Flushes | None = None, **more: int) -> Stager:
    told = around or Flushes()
    return Stager(job, lambda item: None, told.log, floor_bytes=more.pop("floor_bytes", 0), **more)


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(Path(where, name).relative_to(root)): Path(where, name).read_bytes()
        for where, _, names in os.walk(root)
        for name in names
        if Path(where, name).is_file()
    }


def test_a_folder_is_copied_whole_with_times_and_links(tmp_path: Path, data: Path) -> None:
    one = stager(job(tmp_path, data))
    one.run()
    local = Path(one.lookup(str(data)).local)
    assert local.parent == tmp_path / "dataset"
    (data / "pipe").unlink()
    assert tree(local) == tree(data)
    large = "train/deep/large"
    assert (local / large).stat().st_mtime_ns == (data / large).stat().st_mtime_ns
    assert os.access(local / "run.sh", os.X_OK)
    assert (local / "folder-link").readlink() == data / "train" / "deep"
    assert not (local / "pipe").exists()
    assert one.idle
    (state,) = one.state()
    assert state["state"] == "ready"
    assert state["done"] == state["bytes"] >= 9 * MIB


def test_a_path_below_a_staged_folder_is_answered_with_the_copy(tmp_path: Path, data: Path) -> None:
    one = stager(job(tmp_path, f"{data}/", data / "run.sh"))
    before = one.lookup(str(data / "train"))
    assert (before.local, before.error) == ("", "It is still being copied: 0 of 0 bytes.")
    one.run()
    found = one.lookup(str(data / "train" / "deep" / "large"))
    assert Path(found.local).read_bytes() == (data / "train/deep/large").read_bytes()
    for other in (f"{data}2/x", "/etc/passwd", str(data.parent), f"{data}/../../etc/passwd"):
        assert one.lookup(other).local == ""
    assert "not among the data" in one.lookup("/etc/passwd").error
    assert one.counters == {"cache_hits": 1, "cache_misses": 6}


def test_a_copy_that_is_there_is_not_made_again_and_what_changed_is(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    copy = stage_copy._copy

    def counted(source: str, *rest: object) -> None:
        copied.append(source)
        copy(source, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(stage_copy, "_copy", counted)
    stager(job(tmp_path, data)).run()
    assert len(copied) == 203
    copied.clear()
    stager(job(tmp_path, data)).run()
    assert copied == []
    (data / "train" / "7.bin").write_bytes(b"changed")
    (data / "train" / "8.bin").unlink()
    one = stager(job(tmp_path, data))
    one.run()
    assert copied == [str(data / "train" / "7.bin")]
    (data / "pipe").unlink()
    assert tree(Path(one.lookup(str(data)).local)) == tree(data)


def test_nothing_half_has_a_final_name_and_stopping_keeps_what_was_copied(
    tmp_path: Path, data: Path
) -> None:
    class Slow:
        def __init__(self) -> None:
            self.stager: Stager | None = None
            self.count = 0

        def take(self, count: int) -> None:
            self.count += 1
            if self.count == 50 and self.stager is not None:
                self.stager.stop(0)

    limiter = Slow()
    one = Stager(
        job(tmp_path, data),
        lambda i: None,
        lambda level, text: None,
        limiter=limiter,
        floor_bytes=0,
    )
    limiter.stager = one
    one.run()
    (left,) = (tmp_path / "dataset").iterdir()
    assert left.name == f".{local_name(str(data))}.partial"
    assert one.lookup(str(data)).local == ""
    two = stager(job(tmp_path, data))
    two.run()
    (data / "pipe").unlink()
    assert tree(Path(two.lookup(str(data)).local)) == tree(data)


def test_what_does_not_fit_is_read_where_it_is(tmp_path: Path, data: Path) -> None:
    around = Flushes()
    one = stager(job(tmp_path, data), around, limit_bytes=MIB)
    one.run()
    answer = one.lookup(str(data))
    assert answer.local == ""
    assert "is not staged, so it is read in its place" in answer.error
    assert f"of the limit {MIB} 0 are taken" in answer.error
    assert list((tmp_path / "dataset").iterdir()) == []
    two = stager(job(tmp_path, data), floor_bytes=1 << 60)
    two.run()
    assert "stay so" in two.lookup(str(data)).error


@pytest.mark.parametrize("path", ["/nowhere/at/all", "relative", "gs://bucket/x", "/dev/null", ""])
def test_what_can_t_be_staged_is_told(tmp_path: Path, path: str) -> None:
    one = stager(job(tmp_path, path))
    one.run()
    assert one.state()[0]["state"] == "failed"
    assert "is not staged" in one.lookup(path).error


def test_a_file_that_changes_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "file"
    source.write_bytes(b"x" * 1000)
    send = os.sendfile

    def growing(*args: int) -> int:
        done = send(*args)
        with source.open("ab") as file:
            file.write(b"y" if done else b"")
        return done

    monkeypatch.setattr(os, "sendfile", growing)
    one = stager(job(tmp_path, source))
    monkeypatch.setattr(stage_copy, "_PIECE_BYTES", 500)
    done: list[int] = []

    class Enough:
        def take(self, count: int) -> None:
            done.append(count)
            if len(done) > 5:
                monkeypatch.setattr(os, "sendfile", send)

    one._limiter = Enough()
    one.run()
    assert "changed while it was copied" in one.lookup(str(source)).error


def test_it_runs_in_the_background(tmp_path: Path, data: Path) -> None:
    ready = threading.Event()
    one = Stager(
        job(tmp_path, data),
        lambda item: ready.set() if item.state == "ready" else None,
        lambda level, text: None,
        floor_bytes=0,
    )
    one.start()
    assert ready.wait(30)
    one.stop(10)
    assert one.lookup(str(data)).local


def test_an_object_and_a_prefix_are_staged_from_s3(s3: Server, tmp_path: Path) -> None:
    bucket = s3.bucket()
    big = os.urandom(9 * MIB)
    bodies = {"ada/set/a": b"1", "ada/set/b/c": big, "ada/set2/x": b"no", "ada/one": b"one"}
    for key, body in bodies.items():
        s3.client.put_object(Bucket=bucket, Key=key, Body=body)
    one = stager(
        job(
            tmp_path,
            *(f"s3://{bucket}/ada/set", f"s3://{bucket}/ada/one", f"s3://{bucket}/eve/x"),
            f"s3://{bucket}/ada/nothing",
            url=f"s3://{bucket}/ada/7",
            options={"endpoint": s3.endpoint, "addressing": "path", "root": f"s3://{bucket}/ada"},
            credentials=s3_server.CREDENTIALS,
        )
    )
    one.run()
    local = Path(one.lookup(f"s3://{bucket}/ada/set").local)
    assert tree(local) == {"a": b"1", "b/c": big}
    assert Path(one.lookup(f"s3://{bucket}/ada/set/b/c").local).read_bytes() == big
    assert Path(one.lookup(f"s3://{bucket}/ada/one").local).read_bytes() == b"one"
    assert "reach only" in one.lookup(f"s3://{bucket}/eve/x").error
    assert "nothing is there" in one.lookup(f"s3://{bucket}/ada/nothing").error
