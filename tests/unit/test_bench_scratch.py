"""The private folder of a drive's benchmark, what a killed run left, and the lock."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from crater_slurm.errors import CraterError
from crater_slurm.probe.bench import lock, scratch


def test_the_private_folder_is_gone_whatever_happens(tmp_path: Path) -> None:
    with scratch.scratch(tmp_path, 4096) as inside:
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "data").stat().st_size == 4096
        assert os.fstat(inside).st_ino == folder.stat().st_ino
    with pytest.raises(KeyboardInterrupt), scratch.scratch(tmp_path, 4096):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_sigterm_ends_the_run_through_the_removal(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), scratch.scratch(tmp_path, 4096):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_space_is_an_error_and_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(CraterError, match="can't write in"), scratch.scratch(tmp_path, 2**60):
        pass
    assert list(tmp_path.iterdir()) == []


def leftover(folder: Path, name: str = ".crater-bench-0123456789abcdef", mode: int = 0o700) -> Path:
    path = folder / name
    path.mkdir(mode=mode)
    path.chmod(mode)
    (path / "data").write_text("x")
    return path


def test_what_a_killed_run_left_is_removed_and_told(tmp_path: Path) -> None:
    path = leftover(tmp_path)
    (path / "iops_iops.3.log").write_text("")
    assert scratch.clean_leftovers(tmp_path) == [f"removed {path}, left by a run that was killed"]
    assert list(tmp_path.iterdir()) == []


def test_what_only_looks_like_a_leftover_stays(tmp_path: Path) -> None:
    strange = leftover(tmp_path)
    (strange / "thesis.tex").write_text("")
    opened = leftover(tmp_path, ".crater-bench-1123456789abcdef", 0o755)
    other = leftover(tmp_path, ".crater-bench-old")
    valued = tmp_path / "valued"
    valued.mkdir()
    (valued / "data").write_text("")
    link = tmp_path / ".crater-bench-2123456789abcdef"
    link.symlink_to(valued)
    told = scratch.clean_leftovers(tmp_path)
    assert [line.rpartition(": ")[2] for line in told] == [
        "it holds 'thesis.tex'",
        "it belongs to another user, or others may enter it",
        "it is no folder",
    ]
    assert all(
        p.exists() for p in (strange / "data", opened / "data", other, valued / "data", link)
    )


def test_a_link_inside_a_leftover_goes_and_what_it_points_to_stays(tmp_path: Path) -> None:
    valued = tmp_path / "valued"
    valued.write_text("x")
    path = leftover(tmp_path)
    (path / "data").unlink()
    (path / "data").symlink_to(valued)
    scratch.clean_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [valued]


def test_a_link_is_no_place_for_the_private_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with (
        pytest.raises(CraterError, match="can't open the folder"),
        scratch.scratch(tmp_path / "link", 1),
    ):
        pass


def test_one_benchmark_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "run" / "bench.lock"
    busy = pytest.raises(CraterError, match="another crater-probe bench runs")
    with lock.lock(file), busy, lock.lock(file):
        pass
    with lock.lock(file):
        pass
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(CraterError, match="can't open the lock"), lock.lock(tmp_path / "link"):
        pass
