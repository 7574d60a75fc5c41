"""Any word may be asked about: whether it is a file is never an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from crater_slurm import files
from crater_slurm.cli import submit
from crater_slurm.cli.main import crater

LONG = "x" * 300


@pytest.mark.parametrize("asked", [files.exists, files.is_file, files.is_dir])
@pytest.mark.parametrize("word", [LONG, f"{LONG}/y", "nul\0", "no such thing", "echo a; echo b"])
def test_words_that_are_no_files(asked: Callable[[str], bool], word: str) -> None:
    assert not asked(word)


def test_files_and_folders_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert [files.exists(p) for p in (tmp_path, tmp_path / "file")] == [True, True]
    assert [files.is_file(p) for p in (tmp_path, tmp_path / "file")] == [False, True]
    assert [files.is_dir(p) for p in (tmp_path, tmp_path / "file")] == [True, False]


def test_a_long_word_is_sbatchs_own() -> None:
    assert submit.task_place([LONG]) is None
    assert submit.task_place(["--wrap", f"echo {LONG}"]) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check"], "there is no script"),
        (["eta"], "is neither a job id nor a script that is there"),
        (["checkpoints", "list"], LONG),
        (["lab", "up", "--inventory"], "no inventory is named"),
        (["simulate", "--policy", "fgd", "trace.csv", "--nodes"], "no inventory is named"),
    ],
)
def test_commands_say_what_is_wrong_with_a_long_word(words: list[str], said: str) -> None:
    result = CliRunner().invoke(crater, [*words, LONG], standalone_mode=False)
    assert not isinstance(result.exception, OSError)
    assert said in f"{result.exception} {result.output}"
