"""The folder that jobs import crater_slurm.job from: complete, alone, and in nobody's way."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from node_fakes import settings

from crater_slurm import paths
from crater_slurm.cli.install import install
from crater_slurm.node import job_path
from crater_slurm.node.environment import python_path
from crater_slurm.node.services import Services


def prepared(folder: Path, **checkpoints: object) -> str:
    services = Services(settings(folder, checkpoints=checkpoints))
    job_path.prepare(services)
    return services.job_path


def run(path: str, code: str, *more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd="/",
        env={"PYTHONPATH": os.pathsep.join([path, *more]), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_holds_the_module_for_jobs_alone_and_all_may_read_it(tmp_path: Path) -> None:
    folder = Path(prepared(tmp_path))
    assert folder.parent == tmp_path / "run/job"
    assert sorted(p.name for p in folder.iterdir()) == ["crater_slurm"]
    inside = {p.name for p in (folder / "crater_slurm").iterdir()}
    assert inside - {"__pycache__"} == {"__init__.py", "job"}
    source = {p.name for p in (paths.PACKAGE / "job").glob("*.py")}
    assert source == {p.name for p in (folder / "crater_slurm/job").glob("*.py")}
    for path in folder.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o444 == 0o444, path
        assert not mode & 0o022, path


def test_a_job_imports_it_with_the_standard_library_alone(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    code = (
        "import crater_slurm.job as job; from crater_slurm.job import checkpoint;"
        "print(job.__file__, job.init)"
    )
    assert run(folder, code).startswith(f"{folder}/crater_slurm/job/__init__.py")


def test_a_whole_installation_behind_it_keeps_its_other_modules(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    code = "import crater_slurm.job, crater_slurm.errors; print(crater_slurm.errors.__file__)"
    assert run(folder, code, str(paths.PACKAGE.parent)) == str(paths.PACKAGE / "errors.py")


def test_a_second_start_takes_what_is_there_and_a_new_version_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(tmp_path)
    before = os.stat(first).st_ino
    assert prepared(tmp_path) == first
    assert os.stat(first).st_ino == before
    contents = job_path.contents
    monkeypatch.setattr(
        job_path, "contents", lambda: {**contents(), "crater_slurm/new.py": (b"", 0o644)}
    )
    second = prepared(tmp_path)
    assert second != first
    assert Path(first).is_dir(), "jobs that run go on with theirs"


def test_the_site_s_own_folder_is_left_as_it_is(tmp_path: Path) -> None:
    assert prepared(tmp_path, job_path=str(tmp_path / "site")) == str(tmp_path / "site")
    assert not (tmp_path / "site").exists()
    assert not (tmp_path / "run/job").exists()


def test_a_folder_that_can_t_be_made_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/job").write_text("in the way")
    assert prepared(tmp_path) == ""


@pytest.mark.parametrize(
    ("known", "after"),
    [
        (None, "/j"),
        ("", "/j"),
        ("/a", "/a:/j"),
        ("/a:", "/a::/j"),  # the empty entry stays: it means the working folder
        ("/a:/j:/b", None),
        ("/jj", "/jj:/j"),
        ("/a\n/b", None),
        ("/a\x1b", None),
        ("/ü", "/ü:/j"),
        ("/\udcff", None),
    ],
)
def test_the_end_of_pythonpath(known: str | None, after: str | None) -> None:
    assert python_path(known, "/j") == after


def test_a_folder_that_pythonpath_can_t_hold_is_left_out() -> None:
    assert python_path("/a", "/x:y") is None
    assert python_path("/a", "") is None


def test_install_puts_it_where_a_shared_folder_is_wanted(tmp_path: Path) -> None:
    done = CliRunner().invoke(install, ["--to", str(tmp_path)])
    assert done.exit_code == 0, done.output
    path = str(tmp_path / "job")
    assert run(path, "import crater_slurm.job as j; print(j.__file__)").startswith(path)
    assert os.access(tmp_path / "prolog/prolog.sh", os.X_OK)
