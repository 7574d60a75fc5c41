"""Files are replaced whole, and wait for the disk unless told otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crater_slurm.files import write_atomically


@pytest.mark.parametrize(("durable", "synced"), [(True, 1), (False, 0)])
def test_a_file_is_replaced_and_synced_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool, synced: int
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    file = tmp_path / "f"
    file.write_text("old")
    write_atomically(file, "new", durable=durable)
    assert file.read_text() == "new"
    assert len(calls) == synced
    assert os.listdir(tmp_path) == ["f"]
