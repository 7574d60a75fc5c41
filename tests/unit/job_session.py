"""A trainer in the test's own process, with nothing of crater's or Slurm's around it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from crater_slurm.job import link, saving, session, stop


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for checkpoints, named by CRATER_CHECKPOINT_DIR; no ring."""
    for name in list(os.environ):
        if name.startswith(("CRATER_", "SLURM", "TORCHELASTIC")) or name in (
            "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT",
        ):  # fmt: skip
            monkeypatch.delenv(name)
    folder = tmp_path / "checkpoints-here"
    monkeypatch.setenv("CRATER_CHECKPOINT_DIR", str(folder))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setattr(session, "_current", None)
    monkeypatch.setattr(saving, "_told", set())
    monkeypatch.setattr(link, "OPEN_SECONDS", 20.0)
    stop.clear()
    yield folder
    monkeypatch.setenv("CRATER_EXIT_SECONDS", "0")
    session.reset()
    stop.clear()


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    """From now on this process is that rank; what it was before is forgotten."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world))
    monkeypatch.setattr(session, "_current", None)
