"""Bringing steps back: checked as they arrive, some ranks or all, and resumed."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
from checkpoint_samples import MIB, content, make_step, spec

from crater_slurm.checkpoint import restore
from crater_slurm.checkpoint.flush import Flusher
from crater_slurm.checkpoint.remote.path import PathStore
from crater_slurm.checkpoint.remote.store import RemoteError, StoppedError
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.job import layout


class Counting(PathStore):
    """A folder that counts what is read from it, and damages or stops what it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), {})
        self.ranges: list[tuple[str, int, int]] = []
        self.damage: list[int] = []
        self.stop_after: tuple[int, threading.Event] | None = None

    def get_range(self, key: str, start: int, into: memoryview) -> None:
        super().get_range(key, start, into)
        self.ranges.append((key, start, len(into)))
        if start in self.damage:
            self.damage.remove(start)
            into[0] ^= 1
        if self.stop_after is not None and len(self.ranges) >= self.stop_after[0]:
            self.stop_after[1].set()


@pytest.fixture
def job(tmp_path: Path) -> Spec:
    (tmp_path / "cache").mkdir()
    return spec(tmp_path / "cache", str(tmp_path / "away"), node="n9", run="7.1")


@pytest.fixture
def away(tmp_path: Path) -> Path:
    """Step 10 whole from two nodes, step 20 of one node of two, step 30 whole from one."""
    where = tmp_path / "away"
    make_step(where, 10, {0: 17 * MIB, 1: 3}, world=4)
    make_step(where, 10, {2: 9 * MIB, 3: 0}, world=4, node="n2")
    make_step(where, 20, {0: 5}, world=2)
    make_step(where, 30, {0: 40 * MIB})
    return where


def test_only_complete_steps_are_there_to_be_restored(job: Spec, away: Path) -> None:
    found = restore.available(job, "step")
    assert [(a.step, a.run) for a in found] == [(30, "7.0"), (10, "7.0")]
    assert restore.available(job, "best") == []
    assert restore.available(spec(Path(job.folder)), "step") == []


def test_a_manifest_that_lies_makes_no_checkpoint(job: Spec, away: Path) -> None:
    (away / "step-000000030" / "rank-00000.safetensors").write_bytes(b"short")
    (away / "step-000000010" / "manifest-00002.json").write_text("{}")
    make_step(away, 40, {0: 5})
    (away / "step-000000040").rename(away / "step-000000050")
    (away / "step-000000060").mkdir()
    (away / "step-000000060" / "manifest-00000.json").write_text("[" * 100_000)
    assert restore.available(job, "step") == []


def test_a_step_comes_back_whole_with_its_manifest(job: Spec, away: Path) -> None:
    folder = restore.fetch(job, "step", 10, "7.0")
    assert folder == f"{job.folder}/step-000000010"
    assert content(folder) == content(away / "step-000000010")
    (part,) = layout.read_parts(folder)
    assert layout.covers([part])
    assert (part.run, part.node) == ("7.0", "n9")
    assert [p.name for p in Path(job.folder).iterdir()] == ["step-000000010"]


def test_a_node_takes_only_its_ranks_and_does_not_flush_them_again(job: Spec, away: Path) -> None:
    folder = restore.fetch(job, "step", 10, "7.0", [1, 2])
    (part,) = layout.read_parts(folder)
    assert part.ranks == [1, 2]
    assert part.world_size == 4
    assert set(content(folder)) == {layout.file_name(1), layout.file_name(2)}
    one = Flusher(job, lambda step: None, lambda level, text: None)
    one.scan()
    assert [(s["step"], s["state"]) for s in one.state()] == [(10, "flushed")]


@pytest.mark.parametrize(("step", "run"), [(20, "7.0"), (30, "7.1"), (99, "7.0")])
def test_what_is_not_complete_is_refused(job: Spec, away: Path, step: int, run: str) -> None:
    with pytest.raises(restore.NotThereError, match="is not complete at"):
        restore.fetch(job, "step", step, run)


def test_a_rank_that_is_not_there_is_named(job: Spec, away: Path) -> None:
    with pytest.raises(restore.NotThereError, match="has 4 ranks; rank 7 is none"):
        restore.fetch(job, "step", 10, "7.0", [3, 7])


def test_a_chunk_damaged_on_the_way_is_fetched_again(job: Spec, away: Path) -> None:
    store = Counting(away)
    store.damage = [16 * MIB]
    folder = restore.fetch(job, "step", 30, "7.0", store=store)
    assert content(folder) == content(away / "step-000000030")
    assert sorted(s for _, s, _ in store.ranges) == [n * MIB for n in (0, 8, 16, 16, 24, 32)]


def test_a_file_damaged_at_the_destination_never_gets_a_final_name(job: Spec, away: Path) -> None:
    path = away / "step-000000030" / "rank-00000.safetensors"
    with path.open("r+b") as file:
        file.seek(33 * MIB)
        file.write(b"xx")
    with pytest.raises(RemoteError, match="damaged between byte 33554432 and 41943040") as caught:
        restore.fetch(job, "step", 30, "7.0")
    assert caught.value.lasting
    assert [p.name for p in Path(job.folder).iterdir()] == [".restoring-step-000000030.7.0"]


def test_what_an_earlier_try_fetched_is_not_fetched_again(
    job: Spec, away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "_AT_ONCE", 1)
    store = Counting(away)
    stop = threading.Event()
    store.stop_after = (2, stop)
    with pytest.raises(StoppedError):
        restore.fetch(job, "step", 30, "7.0", store=store, stop=stop)
    first = set(store.ranges)
    assert len(first) == 2
    again = Counting(away)
    folder = restore.fetch(job, "step", 30, "7.0", store=again)
    assert content(folder) == content(away / "step-000000030")
    assert set(again.ranges) & first == set()
    assert len(again.ranges) + len(first) == 5


def test_what_lies_in_the_partial_folder_of_something_else_does_not_come_along(
    job: Spec, away: Path
) -> None:
    partial = Path(job.folder) / ".restoring-step-000000010.7.0"
    partial.mkdir()
    (partial / "rank-00009.safetensors").write_bytes(b"old")
    (partial / "rank-00001.safetensors").write_bytes(b"old and longer")
    (partial / "manifest-00009.json").write_text("{}")
    folder = restore.fetch(job, "step", 10, "7.0", [1])
    names = {p.name for p in Path(folder).iterdir()}
    assert names == {"manifest-00001.json", "rank-00001.safetensors", "flush.json"}
    assert (
        content(folder)["rank-00001.safetensors"]
        == (away / "step-000000010" / "rank-00001.safetensors").read_bytes()
    )


def test_a_step_of_another_run_that_is_there_already_stays(job: Spec, away: Path) -> None:
    mine, _ = make_step(Path(job.folder), 30, {0: 3}, run="7.1")
    before = content(mine)
    folder = restore.fetch(job, "step", 30, "7.0")
    assert folder == f"{job.folder}/step-000000030.7.0"
    assert content(folder) == content(away / "step-000000030")
    assert content(mine) == before


def test_what_a_save_of_the_same_step_is_writing_is_left_alone(job: Spec, away: Path) -> None:
    saving = Path(job.folder) / ".step-000000030.partial"
    saving.mkdir()
    (saving / ".rank-00000.safetensors.1-1.writing").write_bytes(b"half")
    folder = restore.fetch(job, "step", 30, "7.0")
    assert content(folder) == content(away / "step-000000030")
    assert [p.name for p in saving.iterdir()] == [".rank-00000.safetensors.1-1.writing"]


def test_ranks_that_come_later_join_those_that_are_there(job: Spec, away: Path) -> None:
    first = restore.fetch(job, "step", 10, "7.0", [0])
    store = Counting(away)
    second = restore.fetch(job, "step", 10, "7.0", [0, 2], store=store)
    assert first == second
    assert {key for key, _, _ in store.ranges} == {"step-000000010/rank-00002.safetensors"}
    parts = layout.read_parts(second)
    assert {rank for part in parts for rank in part.ranks} == {0, 2}
    again = Counting(away)
    assert restore.fetch(job, "step", 10, "7.0", [2], store=again) == second
    assert again.ranges == []


def test_what_joins_a_part_that_is_still_to_flush_does_not_make_it_flushed(
    job: Spec, away: Path
) -> None:
    make_step(Path(job.folder), 10, {0: 17 * MIB, 1: 3}, world=4, node="n9")
    folder = restore.fetch(job, "step", 10, "7.0", [2, 3])
    assert len(content(folder)) == 4
    one = Flusher(job, lambda step: None, lambda level, text: None)
    one.scan()
    assert [(s["bytes"], s["state"]) for s in one.state()] == [(17 * MIB + 3, "pending")]


def test_a_restore_that_is_done_takes_what_others_left_with_it(job: Spec, away: Path) -> None:
    (Path(job.folder) / ".restoring-step-000000001.7.0").mkdir()
    restore.fetch(job, "step", 30, "7.0")
    assert [p.name for p in Path(job.folder).iterdir()] == ["step-000000030"]


def test_of_two_runs_the_one_asked_for_comes(job: Spec, away: Path, tmp_path: Path) -> None:
    make_step(tmp_path / "other", 30, {0: 9}, run="7.1", time=1_790_009_999.0)
    (tmp_path / "other" / "step-000000030").rename(away / "step-000000030.7.1")
    assert [(a.step, a.run) for a in restore.available(job, "step")][:2] == [
        (30, "7.1"),
        (30, "7.0"),
    ]
    folder = restore.fetch(job, "step", 30, "7.1")
    assert content(folder) == content(away / "step-000000030.7.1")
    other = dataclasses.replace(job, folder=str(tmp_path / "c2"))
    (tmp_path / "c2").mkdir()
    assert content(restore.fetch(other, "step", 30, "7.0")) == content(away / "step-000000030")
