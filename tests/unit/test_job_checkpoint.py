"""Saving and loading without a daemon: the trainer writes into the documented layout itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from job_session import alone, as_rank

from crater_slurm.job import checkpoint, direct, export, find, layout, session, stop
from crater_slurm.job.checkpoint import CheckpointError

__all__ = ["alone"]

STATE = {"weights": b"w" * 9000, "n": 1}


def names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_what_was_saved_is_loaded(alone: Path) -> None:
    assert checkpoint.load() is None
    saving = checkpoint.save(STATE, 120)
    assert saving.done() and saving.error is None and saving.how == "direct" and saving.wait(0)
    loaded = checkpoint.load()
    assert loaded is not None and loaded.state == STATE
    assert (loaded.step, loaded.source, loaded.run) == (120, "folder", "4711.0")
    assert loaded.folder == str(alone / "step-000000120")
    assert names(alone) == [
        "step-000000120", "step-000000120/manifest-00000.json",
        "step-000000120/rank-00000.safetensors",
    ]  # fmt: skip


def test_the_newest_is_the_highest_step_and_others_can_be_asked_for(alone: Path) -> None:
    for step in (30, 10, 20):
        checkpoint.save({"at": step}, step)
    checkpoint.save({"at": "best"}, 99, name="best")
    assert checkpoint.steps() == [30, 20, 10] and checkpoint.steps("best") == [99]
    assert checkpoint.load().state == {"at": 30}  # type: ignore[union-attr]
    assert checkpoint.load(10).state == {"at": 10}  # type: ignore[union-attr]
    assert checkpoint.load(name="best").state == {"at": "best"}  # type: ignore[union-attr]
    assert checkpoint.load(11) is None


def test_a_damaged_one_is_left_out_with_a_warning(alone: Path) -> None:
    checkpoint.save(STATE, 1)
    checkpoint.save(STATE, 2)
    file = alone / "step-000000002" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[4000] ^= 1
    file.write_bytes(data)
    with pytest.warns(RuntimeWarning, match=r"step 2 is left out: .*damaged between byte 0"):
        loaded = checkpoint.load()
    assert loaded is not None and loaded.step == 1
    assert checkpoint.load(verify=False).step == 2  # type: ignore[union-attr]


def test_saving_a_step_again_takes_its_place_and_never_leaves_it_broken(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save({"v": 1}, 5)

    def full(*_: object) -> list[str]:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(direct, "write_file", full)
        with pytest.raises(CheckpointError, match=r"step 5 of rank 0 .*No space left.*Free some"):
            checkpoint.save({"v": 2}, 5)
        assert checkpoint.load().state == {"v": 1}  # type: ignore[union-attr]
    checkpoint.save({"v": 3}, 5)
    assert checkpoint.load().state == {"v": 3}  # type: ignore[union-attr]
    assert len(names(alone)) == 3, "the first file is still there"


def test_two_runs_that_save_one_step_don_t_mix(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save({"run": 0}, 7)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(session, "_current", None)
    checkpoint.save({"run": 1}, 7)
    assert {n for n in names(alone) if "/" not in n} == {"step-000000007", "step-000000007.4711.1"}
    assert checkpoint.load().state == {"run": 1}  # type: ignore[union-attr]


def test_several_ranks_write_side_by_side_and_load_their_own(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (1, 0):
        as_rank(monkeypatch, rank, 2)
        if rank == 0:
            with pytest.warns(
                RuntimeWarning, match=r"not complete: it has rank 1 of 2.*only_rank=0"
            ):
                assert checkpoint.load() is None
        checkpoint.save({"rank": rank}, 3)
    assert checkpoint.load().state == {"rank": 0}  # type: ignore[union-attr]
    assert checkpoint.load(ranks=1).state == {1: {"rank": 1}}  # type: ignore[union-attr]
    both = {0: {"rank": 0}, 1: {"rank": 1}}
    assert checkpoint.load(ranks="all").state == both  # type: ignore[union-attr]
    as_rank(monkeypatch, 1, 2)
    assert checkpoint.load().state == {"rank": 1}  # type: ignore[union-attr]
    as_rank(monkeypatch, 0, 3)
    with pytest.raises(
        CheckpointError, match=r"saved by 2 ranks, and there are 3 now.*ranks='all'"
    ):
        checkpoint.load()


def test_what_one_rank_saves_for_all_is_whole_and_everybody_s(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        as_rank(monkeypatch, rank, 2)
        saving = checkpoint.save({"rank": rank}, 3, only_rank=1)
        assert saving.wait(0) and saving.how == ("direct" if rank else "none")
    for rank in (0, 1):
        as_rank(monkeypatch, rank, 2)
        loaded = checkpoint.load()
        assert loaded is not None and loaded.state == {"rank": 1} and loaded.world_size == 1


def test_one_rank_s_second_save_leaves_a_worker_s_other_ranks_alone(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's manifest is named after its lowest rank, as that rank's own is."""
    for rank in (0, 1):
        as_rank(monkeypatch, rank, 2)
        checkpoint.save({"rank": rank}, 3)
    folder = alone / "step-000000003"
    parts = layout.read_parts(str(folder))
    whole = layout.Manifest(3, 2, [p.files[0] for p in parts], "step", "4711.0")
    (folder / "manifest-00001.json").unlink()
    (folder / "manifest-00000.json").write_text(whole.to_json())
    as_rank(monkeypatch, 0, 2)
    checkpoint.save({"rank": "again"}, 3)
    state = checkpoint.load(ranks="all").state  # type: ignore[union-attr]
    assert state == {0: {"rank": "again"}, 1: {"rank": 1}}


def test_a_hopeless_state_is_named_and_nothing_is_written(alone: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\[hook\] \(function"):
        checkpoint.save({"hook": lambda: 0}, 1, strict=False)
    assert not alone.exists()


@pytest.mark.parametrize(
    ("step", "name"), [(-1, "step"), (1, "../up"), (1, ""), ("1", "step"), (10**15, "step")]
)
def test_a_step_or_name_that_is_none_is_refused(step: int, name: str, alone: Path) -> None:
    with pytest.raises(CheckpointError, match="A step is a whole number|A checkpoint can't be"):
        checkpoint.save(STATE, step, name=name)


def test_where_nothing_can_be_written_it_says_so_once_or_raises(
    alone: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone.write_text("a file in the way")
    with pytest.raises(CheckpointError, match=r"can't be written anywhere \(.*checkpoints-here"):
        checkpoint.save(STATE, 1)
    saving = checkpoint.save(STATE, 1, strict=False)
    assert saving.error and "can't be written" in saving.error and not saving.wait(0)
    assert capfd.readouterr().err.count("crater: step 1 of rank 0") == 1


def test_a_full_cache_is_gone_around(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    cache.write_text("no folder")
    monkeypatch.setenv("CRATER_CHECKPOINT_PATH", str(cache))
    checkpoint.save(STATE, 4)
    assert f"step 4 went to {alone}, since {cache}" in capfd.readouterr().err
    assert checkpoint.load().step == 4  # type: ignore[union-attr]


def test_without_any_word_it_is_the_working_folder_and_said(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CRATER_CHECKPOINT_DIR")
    monkeypatch.chdir(tmp_path)
    checkpoint.save(STATE, 1)
    assert (tmp_path / "checkpoints" / "step-000000001").is_dir()
    assert f"checkpoints go to {tmp_path}/checkpoints; set CRATER_CHECKPOINT_DIR" in (
        capfd.readouterr().err
    )


# Which step all ranks take


def test_ranks_take_the_newest_that_all_of_them_see() -> None:
    one = [(30, "7.0", 9.0), (20, "7.0", 5.0), (10, "7.0", 1.0)]
    two = [(20, "7.0", 5.0), (10, "7.0", 1.0), (30, "7.1", 8.0)]
    assert find.common([one, two]) == (20, "7.0")
    assert find.common([one, []]) is None and find.common([]) is None


def test_of_one_step_the_later_time_then_the_later_run_counts() -> None:
    assert find.common([[(1, "7.0", 9.0), (1, "7.1", 8.0)]]) == (1, "7.0")
    assert find.common([[(1, "7.9", 0.0), (1, "7.10", 0.0)]]) == (1, "7.10")


# When to save


def test_it_is_due_at_every_nth_step_once(alone: Path) -> None:
    assert [s for s in range(7) if checkpoint.due(s, every=3)] == [3, 6]
    checkpoint.save(STATE, 6)
    assert not checkpoint.due(6, every=3)
    assert not checkpoint.due(7)


def test_it_is_due_after_some_time(alone: Path) -> None:
    session.current().last_saved -= 100.0
    assert checkpoint.due(1, seconds=99.0) and not checkpoint.due(1, seconds=10000.0)
    checkpoint.save(STATE, 1)
    assert not checkpoint.due(2, seconds=99.0)


def test_a_signal_makes_it_due_until_it_is_saved(alone: Path) -> None:
    import signal

    before = signal.getsignal(signal.SIGUSR2)
    heard: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        assert stop.install(signal.SIGUSR2) and stop.install(signal.SIGUSR2)
        assert not checkpoint.due(1) and not checkpoint.should_stop()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard == [signal.SIGUSR2], "the handler that was there before"
        assert checkpoint.should_stop() and checkpoint.due(1) and checkpoint.due(2)
        checkpoint.save(STATE, 2)
        assert not checkpoint.due(3) and checkpoint.should_stop()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_requeue_without_a_worker_says_why_not(
    alone: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert checkpoint.requeue("time is up") is False
    assert "not requeued: there is no checkpoint worker" in capfd.readouterr().err


# The command line


def test_list_and_verify_tell_good_from_bad(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(STATE, 1)
    checkpoint.save(STATE, 2)
    assert export.main(["list", str(alone)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["step-000000002", "1/1"], ["step-000000001", "1/1"],
    ]  # fmt: skip
    assert export.main(["verify", str(alone / "step-000000001")]) == 0
    (alone / "step-000000002" / "rank-00000.safetensors").write_bytes(b"short")
    assert export.main(["verify", str(alone)]) == 1
    assert "rank-00000.safetensors has 5 bytes" in capsys.readouterr().out
    assert export.main(["list", str(alone / "none")]) == 1


def test_export_makes_a_file_for_torch(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    for rank in (0, 1):
        as_rank(monkeypatch, rank, 2)
        checkpoint.save({"t": torch.full((3,), rank)}, 1)
    out = tmp_path / "out.pt"
    assert export.main(["export", str(alone), str(out)]) == 0
    both = torch.load(out)
    assert both.keys() == {0, 1} and torch.equal(both[1]["t"], torch.ones(3).long())
    assert export.main(["export", "--rank", "1", str(alone), str(out)]) == 0
    assert torch.equal(torch.load(out)["t"], torch.ones(3).long())


# What anybody may have put there


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "\udcff",
        '{"format": 1}',
        "9" * 100000,
        '{"format": 1, "chunk_bytes": 8388608, "files": [{}]}',
    ],
)
def test_rubbish_for_a_manifest_is_left_out(text: str, alone: Path) -> None:
    checkpoint.save(STATE, 1)
    bad = alone / "step-000000002"
    bad.mkdir()
    (bad / "manifest-00000.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    (alone / ".step-000000009.partial").mkdir()
    (alone / "step-12").write_text("no step")
    assert checkpoint.load().step == 1  # type: ignore[union-attr]


def test_a_manifest_of_another_step_does_not_count(alone: Path) -> None:
    checkpoint.save(STATE, 1)
    os.rename(alone / "step-000000001", alone / "step-000000999")
    assert checkpoint.load() is None
    assert json.loads((alone / "step-000000999" / "manifest-00000.json").read_text())["step"] == 1


def test_nothing_of_torch_is_loaded_for_plain_states() -> None:
    import subprocess

    code = (
        "import sys, os, tempfile; os.environ['CRATER_CHECKPOINT_DIR'] = tempfile.mkdtemp()\n"
        "from crater_slurm.job import checkpoint\n"
        "checkpoint.save({'b': b'x' * 10000}, 1); assert checkpoint.load().step == 1\n"
        "print(*sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
