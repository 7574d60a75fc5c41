"""The plan key's file: made once, read strictly, followed when it is rotated."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from crater_slurm.cli.main import crater
from crater_slurm.errors import ConfigError
from crater_slurm.scheduler.keys import KeyFile, create_key, read_keys

OLD, NEW = b"o" * 32, b"n" * 32


def write(file: Path, *keys: bytes, mode: int = 0o400) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text("".join(key.hex() + "\n" for key in keys))
    fresh.chmod(mode)
    fresh.rename(file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "plan.key"


def test_a_new_key_is_random_and_for_root_alone(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for one in files:
        create_key(one)
        assert one.stat().st_mode & 0o777 == 0o400
    (first,), (second,) = map(read_keys, files)
    assert len(first) == 32
    assert first != second


def test_a_key_is_never_replaced(file: Path) -> None:
    create_key(file)
    before = file.read_text()
    with pytest.raises(ConfigError, match="exists; to rotate, put a new first line above"):
        create_key(file)
    assert file.read_text() == before


def test_a_key_without_a_folder_for_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't write .*: No such file or directory"):
        create_key(tmp_path / "none" / "plan.key")


def test_keys_are_read_newest_first_with_remarks_left_out(file: Path) -> None:
    file.write_text(f"# of spring\n\n  {NEW.hex()}\n{OLD.hex().upper()}\n")
    file.chmod(0o440)
    assert read_keys(file) == [NEW, OLD]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no key"),
        (b"# only this\n", "holds no key"),
        (b"not hexadecimal\n", "must hold hexadecimal keys"),
        (b"abc\n", "must hold hexadecimal keys"),
        (b"00" * 15, "shorter than 16 bytes"),
        (bytes(range(200, 232)), "hexadecimal|no key|shorter"),
    ],
)
def test_a_file_that_holds_no_good_key_is_refused_in_words(
    file: Path, content: bytes, says: str
) -> None:
    file.write_bytes(content)
    file.chmod(0o400)
    with pytest.raises(ConfigError, match=says):
        read_keys(file)


def test_a_missing_file_says_how_to_make_one(file: Path) -> None:
    with pytest.raises(ConfigError, match="crater key create"):
        read_keys(file)


@pytest.mark.parametrize("mode", [0o404, 0o444, 0o666, 0o402, 0o401])
def test_a_key_that_everyone_can_reach_is_refused(file: Path, mode: int) -> None:
    write(file, NEW, mode=mode)
    with pytest.raises(ConfigError, match="readable by everyone; run chmod 0400"):
        read_keys(file)


def test_the_first_key_signs_and_a_rotation_is_followed(file: Path) -> None:
    write(file, OLD)
    keys = KeyFile(file)
    assert keys.signing_key() == OLD
    write(file, NEW, OLD)
    assert keys.signing_key() == NEW
    assert keys.problem == ""


def test_all_keys_verify_while_they_are_rotated(file: Path) -> None:
    keys = KeyFile(file)
    assert keys.verifying_keys() == []
    write(file, NEW, OLD)
    assert keys.verifying_keys() == [NEW, OLD]
    write(file, NEW)
    assert keys.verifying_keys() == [NEW]


def test_an_unchanged_file_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, OLD)
    keys = KeyFile(file)
    keys.signing_key()
    monkeypatch.setattr("crater_slurm.scheduler.keys.read_keys", lambda file: pytest.fail("read"))
    assert keys.signing_key() == OLD


def test_a_file_that_breaks_leaves_the_last_good_key_and_a_problem(file: Path) -> None:
    write(file, OLD)
    keys = KeyFile(file)
    keys.signing_key()
    file.unlink()
    assert keys.signing_key() == OLD
    assert "No such file" in keys.problem
    file.write_bytes(b"\xff\xfe" * 32)
    file.chmod(0o400)
    assert keys.signing_key() == OLD
    assert "hexadecimal" in keys.problem
    write(file, NEW)
    assert keys.signing_key() == NEW
    assert keys.problem == ""


def test_without_any_key_nothing_is_signed(file: Path) -> None:
    keys = KeyFile(file)
    assert keys.signing_key() is None
    assert keys.problem


def test_crater_key_create_writes_where_the_settings_say(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRATER_PLAN__KEY_FILE", str(file))
    settings = tmp_path / "crater.yaml"
    settings.write_text("")
    run = CliRunner()
    done = run.invoke(crater, ["--config", str(settings), "key", "create"])
    assert done.exit_code == 0, done.output
    assert done.output == f"wrote {file}; copy it to every node, readable by root only\n"
    assert len(read_keys(file)) == 1
    again = run.invoke(crater, ["--config", str(settings), "key", "create"])
    assert again.exit_code == 2
    assert "exists" in again.output
