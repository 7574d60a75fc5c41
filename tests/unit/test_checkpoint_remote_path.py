"""A folder as a destination: full, read-only, gone, and with things of others in the way."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_samples import MIB, content, make_step

from crater_slurm.checkpoint.remote.path import PathStore
from crater_slurm.checkpoint.remote.retry import Patience
from crater_slurm.checkpoint.remote.store import (
    RemoteError,
    Source,
    StoppedError,
    Transfer,
    Unlimited,
)
from crater_slurm.job import layout

NAME = "rank-00000.safetensors"
KEY = f"step-000000120/{NAME}"
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount and change owners")


def store(root: Path, attempts: int = 1, **options: str) -> PathStore:
    return PathStore(str(root), options, Patience(attempts, sleep=lambda event, seconds: None))


@pytest.fixture
def step(tmp_path: Path) -> tuple[str, layout.Manifest]:
    return make_step(tmp_path / "cache", 120, {0: 20 * MIB + 7})


def put(to: PathStore, step: tuple[str, layout.Manifest], stop_after: int | None = None) -> int:
    """Put the step's file; how many bytes were moved. Stops once so many were."""
    folder, manifest = step
    stop = threading.Event()
    moved = 0

    def progress(count: int) -> None:
        nonlocal moved
        moved += count
        if stop_after is not None and moved >= stop_after:
            stop.set()

    (entry,) = manifest.files
    with Source(folder, entry) as source:
        transfer = Transfer({}, lambda: None, progress, stop, Unlimited())
        to.put_file(source, KEY, entry, transfer)
    return moved


def whole(root: Path, step: tuple[str, layout.Manifest]) -> bool:
    return content(root / "step-000000120") == content(step[0])


@contextlib.contextmanager
def mounted(where: Path, options: str) -> Iterator[None]:
    where.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", where], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", where], check=False)


def test_a_file_has_a_hidden_name_until_it_is_whole_and_is_gone_on_with(
    tmp_path: Path, step: tuple[str, layout.Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    away = tmp_path / "away"
    with pytest.raises(StoppedError):
        put(store(away), step, stop_after=8 * MIB)
    folder = away / "step-000000120"
    assert [p.name for p in folder.iterdir()] == [f".{NAME}.partial"]
    assert store(away).list_files("step-000000120") == []
    written = 0
    pwrite = os.pwrite

    def counted(fd: int, data: bytes, at: int) -> int:
        nonlocal written
        done = pwrite(fd, data, at)
        written += done
        return done

    monkeypatch.setattr(os, "pwrite", counted)
    assert put(store(away), step) == step[1].size
    assert written == step[1].size - 8 * MIB
    assert whole(away, step)


def test_a_partial_file_that_differs_is_written_from_there(
    tmp_path: Path, step: tuple[str, layout.Manifest]
) -> None:
    away = tmp_path / "away"
    with pytest.raises(StoppedError):
        put(store(away), step, stop_after=16 * MIB)
    partial = away / "step-000000120" / f".{NAME}.partial"
    data = bytearray(partial.read_bytes())
    data[9 * MIB] ^= 1
    partial.write_bytes(bytes(data) + b"and more" * MIB)
    put(store(away), step)
    assert whole(away, step)


def test_reading_back_is_a_choice_and_finds_nothing_wrong_with_what_is_right(
    tmp_path: Path, step: tuple[str, layout.Manifest]
) -> None:
    put(store(tmp_path / "away", verify="read_back"), step)
    assert whole(tmp_path / "away", step)


def test_a_stale_handle_or_an_error_of_the_disk_is_tried_again(
    tmp_path: Path, step: tuple[str, layout.Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [errno.ESTALE, errno.EIO, errno.ETIMEDOUT]
    fsync = os.fsync

    def failing(fd: int) -> None:
        if errors:
            number = errors.pop(0)
            raise OSError(number, os.strerror(number))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    put(store(tmp_path / "away", attempts=5), step)
    assert errors == []
    assert whole(tmp_path / "away", step)


def test_a_file_whose_fsync_failed_is_not_trusted_afterwards(
    tmp_path: Path, step: tuple[str, layout.Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync
    seen = []

    def failing(fd: int) -> None:
        if os.path.isfile(f"/proc/self/fd/{fd}"):
            seen.append(fd)
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(RemoteError, match="Input/output error"):
        put(store(tmp_path / "away"), step)
    assert len(seen) == 1
    assert list((tmp_path / "away" / "step-000000120").iterdir()) == []


@root_only
def test_a_full_file_system_is_told_and_the_file_goes_on_once_there_is_room(
    tmp_path: Path, step: tuple[str, layout.Manifest]
) -> None:
    away = tmp_path / "away"
    with mounted(away, "size=12m"):
        with pytest.raises(RemoteError, match="it is full") as caught:
            put(store(away), step)
        assert not caught.value.lasting
        assert not whole(away, step)
        subprocess.run(["mount", "-o", "remount,size=64m", away], check=True)
        put(store(away), step)
        assert whole(away, step)


@root_only
def test_a_read_only_file_system_is_for_an_admin_to_mend(
    tmp_path: Path, step: tuple[str, layout.Manifest]
) -> None:
    away = tmp_path / "away"
    with mounted(away, "size=64m,ro"):
        with pytest.raises(RemoteError, match="it is read-only") as caught:
            put(store(away), step)
        assert caught.value.lasting


@root_only
def test_nothing_is_written_below_a_mount_that_is_missing(
    tmp_path: Path, step: tuple[str, layout.Manifest]
) -> None:
    mount = tmp_path / "scratch"
    used = store(mount / "ada", mount=str(mount))
    with mounted(mount, "size=64m"):
        put(used, step)
    for one in (used, store(mount / "ada", mount=str(mount))):
        with pytest.raises(RemoteError, match="is not mounted") as caught:
            put(one, step)
        assert not caught.value.lasting
    assert list(mount.iterdir()) == []


@root_only
def test_a_mount_that_vanishes_meanwhile_is_noticed_without_being_named(
    tmp_path: Path, step: tuple[str, layout.Manifest]
) -> None:
    away = tmp_path / "away"
    used = store(away)
    with mounted(away, "size=64m"):
        put(used, step)
    with pytest.raises(RemoteError, match="its mount is missing"):
        put(used, step)
    assert list(away.iterdir()) == []


def test_a_folder_that_vanishes_meanwhile_is_an_error_that_passes(
    tmp_path: Path, step: tuple[str, layout.Manifest]
) -> None:
    away = tmp_path / "away"
    used = store(away)
    put(used, step)
    away.rename(tmp_path / "moved")
    with pytest.raises(RemoteError, match="the folder is gone") as caught:
        put(used, step)
    assert not caught.value.lasting
    assert used.list_steps() == []
    (tmp_path / "moved").rename(away)
    put(used, step)
    assert whole(away, step)


@pytest.mark.parametrize("what", ["step-000000120", f"step-000000120/.{NAME}.partial"])
def test_a_link_in_the_way_is_not_followed(
    tmp_path: Path, step: tuple[str, layout.Manifest], what: str
) -> None:
    away, other = tmp_path / "away", tmp_path / "other"
    (away / what).parent.mkdir(parents=True)
    other.mkdir()
    (other / "file").write_text("untouched")
    target = other if what == "step-000000120" else other / "file"
    (away / what).symlink_to(target)
    with pytest.raises(RemoteError, match=r"link is in the way|no folder is in the way") as caught:
        put(store(away), step)
    assert caught.value.lasting
    assert [p.name for p in other.iterdir()] == ["file"]
    assert (other / "file").read_text() == "untouched"


def test_a_link_under_the_final_name_is_replaced_not_followed(
    tmp_path: Path, step: tuple[str, layout.Manifest]
) -> None:
    away, other = tmp_path / "away", tmp_path / "other"
    (away / "step-000000120").mkdir(parents=True)
    other.write_text("untouched")
    (away / KEY).symlink_to(other)
    put(store(away), step)
    assert whole(away, step)
    assert not (away / KEY).is_symlink()
    assert other.read_text() == "untouched"


def test_a_second_name_of_somebody_s_file_is_not_written_into(
    tmp_path: Path, step: tuple[str, layout.Manifest]
) -> None:
    away, other = tmp_path / "away", tmp_path / "other"
    (away / "step-000000120").mkdir(parents=True)
    other.write_text("untouched")
    os.link(other, away / "step-000000120" / f".{NAME}.partial")
    with pytest.raises(RemoteError, match="2 names.*remove it"):
        put(store(away), step)
    assert other.read_text() == "untouched"


@root_only
def test_another_user_s_file_in_the_way_is_named(
    tmp_path: Path, step: tuple[str, layout.Manifest]
) -> None:
    away = tmp_path / "away"
    (away / "step-000000120").mkdir(parents=True)
    partial = away / "step-000000120" / f".{NAME}.partial"
    partial.write_text("theirs")
    os.chown(partial, 12345, 12345)
    with pytest.raises(RemoteError, match="uid 12345") as caught:
        put(store(away), step)
    assert caught.value.lasting
    assert partial.read_text() == "theirs"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_a_pipe_in_the_way_hangs_nothing(
    tmp_path: Path, step: tuple[str, layout.Manifest], make: object
) -> None:
    away = tmp_path / "away"
    (away / "step-000000120").mkdir(parents=True)
    make(str(away / "step-000000120" / f".{NAME}.partial"))  # type: ignore[operator]
    with pytest.raises(RemoteError):
        put(store(away), step)


def test_texts_are_put_whole_and_claims_are_the_first_comer_s(tmp_path: Path) -> None:
    used = store(tmp_path / "away")
    assert used.get_text("step-000000001/run") is None
    assert used.claim("step-000000001/run", "7.0") == "7.0"
    assert used.claim("step-000000001/run", "7.1") == "7.0"
    used.put_text("step-000000001/manifest-00000.json", "{}")
    used.put_text("step-000000001/manifest-00000.json", "[]")
    assert used.get_text("step-000000001/manifest-00000.json") == "[]"
    names = [f.name for f in used.list_files("step-000000001")]
    assert names == ["manifest-00000.json", "run"]


def test_what_a_killed_claimer_left_goes_with_the_next_claim_or_the_step(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    folder, host = tmp_path / "step-000000001", os.uname().nodename
    folder.mkdir()
    mine = folder / f".run.{host}.{dead.pid}.partial"
    lives = folder / f".run.{host}.1.partial"
    other = folder / f".run.another.{dead.pid}.partial"
    for left in (mine, lives, other):
        left.write_text("7.0")
    # Killed after the link: the same process number again finds its file with two names.
    again = folder / f".run.{host}.{os.getpid()}.partial"
    again.write_text("7.0")
    os.link(again, folder / "run")
    used = store(tmp_path)
    assert used.claim("step-000000001/run", "7.1") == "7.0"
    assert {p.name for p in folder.iterdir()} == {"run", lives.name, other.name}
    used.delete("step-000000001", ["run"])
    assert not folder.exists()


def test_deleting_leaves_what_is_not_crater_s_and_then_the_folder(tmp_path: Path) -> None:
    used = store(tmp_path)
    used.put_text("step-000000001/manifest-00000.json", "{}")
    (tmp_path / "step-000000001" / "mine.txt").write_text("x")
    (tmp_path / "step-000000001" / f".{NAME}.partial").write_text("x")
    used.delete("step-000000001", ["manifest-00000.json", "mine.txt", NAME, "../../etc/passwd"])
    assert [p.name for p in (tmp_path / "step-000000001").iterdir()] == ["mine.txt"]
    (tmp_path / "step-000000001" / "mine.txt").unlink()
    used.put_text("step-000000001/run", "7.0")
    used.delete("step-000000001", ["run"])
    assert not (tmp_path / "step-000000001").exists()
    used.delete("step-000000009", ["run"])


def test_a_range_beyond_the_end_is_an_error(
    tmp_path: Path, step: tuple[str, layout.Manifest]
) -> None:
    used = store(tmp_path / "away")
    put(used, step)
    buffer = memoryview(bytearray(10))
    used.get_range(KEY, 20 * MIB - 3, buffer)
    assert bytes(buffer) == content(step[0])[NAME][20 * MIB - 3 :]
    with pytest.raises(RemoteError, match="ends early"):
        used.get_range(KEY, 20 * MIB, buffer)
