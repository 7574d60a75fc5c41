"""Trainer and checkpoint worker, both real, with no daemon but a socket between them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_ring import Gate
from job_session import alone, as_rank

from crater_slurm.job import checkpoint, link, session

__all__ = ["alone"]

ROOT = Path(__file__).resolve().parents[2]
WAIT = 60


@pytest.fixture
def gate(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(tmp_path, tmp_path / "cache")
    monkeypatch.setenv("CRATER_RING", made.path)
    monkeypatch.setenv("CRATER_CHECKPOINT_PATH", str(tmp_path / "cache"))
    yield made
    made.stop()


def state(fill: int, size: int = 3 << 20) -> dict[str, object]:
    return {"b": bytes([fill]) * size, "fill": fill}


def loaded(step: int | None = None) -> checkpoint.Loaded:
    found = checkpoint.load(step)
    assert found is not None
    return found


def test_saved_by_the_ring_and_loaded_from_the_cache(gate: Gate) -> None:
    checkpoint.prepare(state(0), wait=True)
    for step in (1, 2, 3):
        saving = checkpoint.save(state(step), step)
        assert saving.how == "ring" and saving.wait(WAIT)
    assert loaded().state == state(3) and loaded().source == "cache"
    assert checkpoint.steps() == [3, 2, 1]


def test_a_worker_killed_with_a_save_in_hand_loses_nothing(gate: Gate) -> None:
    for step in range(1, 6):
        saving = checkpoint.save(state(step), step)
        gate.daemon.kill()
        gate.restart()
        assert saving.wait(WAIT), saving
        assert loaded().state == state(step)


def test_a_lane_too_small_is_streamed_through(gate: Gate) -> None:
    gate.limit = 1 << 20
    saving = checkpoint.save(state(4, 9 << 20), 4)
    assert saving.how == "ring" and saving.wait(WAIT) and loaded().state == state(4, 9 << 20)


def test_no_room_for_a_lane_still_goes_by_the_worker(gate: Gate) -> None:
    gate.limit = 1
    saving = checkpoint.save(state(4), 4)
    assert saving.how == "direct" and saving.wait(WAIT) and loaded().state == state(4)


def test_a_step_saved_again_is_the_second(gate: Gate) -> None:
    assert checkpoint.save(state(1), 1).wait(WAIT)
    assert checkpoint.save(state(2), 1).wait(WAIT)
    assert loaded(1).state == state(2)


def test_a_worker_that_never_comes_back_is_done_without(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "GRACE_SECONDS", 0.2)
    checkpoint.save(state(1), 1).wait(WAIT)
    gate.daemon.kill()
    saving = checkpoint.save(state(2), 2)
    assert saving.wait(WAIT) and loaded().state == state(2)


def test_a_rank_that_wrote_by_itself_and_one_by_the_worker_make_a_whole(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(monkeypatch, 0, 2)
    session.current().env = session.dataclasses.replace(session.current().env, ring=None)
    checkpoint.save(state(10), 5)
    as_rank(monkeypatch, 1, 2)
    saving = checkpoint.save(state(11), 5)
    assert saving.how == "ring" and saving.wait(WAIT)
    both = checkpoint.load(ranks="all")
    assert both is not None and both.state == {0: state(10), 1: state(11)}


_TRAINER = """
import os, sys
from crater_slurm.job import checkpoint
found = checkpoint.load()
step = found.step if found else 0
assert found is None or found.state == {"b": bytes([step % 251]) * 600_000, "step": step}, step
print(step, flush=True)
for step in range(step + 1, step + 10_000):
    checkpoint.save({"b": bytes([step % 251]) * 600_000, "step": step}, step)
    print(step, flush=True)
"""


def test_a_trainer_killed_at_any_moment_goes_on_from_a_whole_step(
    gate: Gate, tmp_path: Path
) -> None:
    """What it is killed in the midst of may be lost; what it loads is always whole, never older."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    last = 0
    for turn in range(6):
        trainer = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _TRAINER],
            env=env, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert trainer.stdout is not None
        began = int(trainer.stdout.readline())
        assert began >= last
        for line in trainer.stdout:
            if int(line) >= began + 3 + turn:
                break
        if turn % 2:
            gate.daemon.kill()
            gate.restart()
        trainer.kill()
        trainer.stdout.close()
        trainer.wait()
        found = checkpoint.load()
        last = found.step if found else 0
    assert last > 0


def test_the_trainer_s_end_waits_for_what_is_unsaved(gate: Gate, tmp_path: Path) -> None:
    code = "from crater_slurm.job import checkpoint; checkpoint.save({'b': b'x' * (30 << 20)}, 1)"
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
    )
    assert loaded().step == 1
    assert time.monotonic() - began < 120
