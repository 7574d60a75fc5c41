"""Steps in a folder: what is finished, kept, left alone and given up, with a clock of the test's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_worker import MIB, Trainer, a_spec, running

from crater_slurm.checkpoint import entries
from crater_slurm.checkpoint.folder import Folder
from crater_slurm.checkpoint.save import Place, Save, State
from crater_slurm.checkpoint.steps import GRACE_S, HOLD_S, LEFTOVER_S, PATIENCE_S, Steps
from crater_slurm.checkpoint.tools import Room, Tools
from crater_slurm.job import layout
from crater_slurm.job.layout import FileEntry, Manifest


def a_file(folder: Path, rank: int, data: bytes) -> FileEntry:
    (folder / layout.file_name(rank)).write_bytes(data)
    return FileEntry(layout.file_name(rank), rank, len(data), layout.chunk_sums(memoryview(data)))


def noted(folder: Path, step: int, rank: int, of: int, data: bytes, **changed: Any) -> None:
    """A rank's finished file in a partial folder, with the note that says so."""
    partial = folder / layout.partial_name(layout.step_name(step))
    partial.mkdir(exist_ok=True)
    known = {"run": "4711.0", "time": 5.0, **changed}
    manifest = Manifest(step, of, [a_file(partial, rank, data)], **known)
    (partial / f".rank-{rank:05d}.of-{of}.json").write_text(manifest.to_json())


def final(folder: Path, step: int, data: bytes, **changed: Any) -> None:
    place = folder / layout.step_name(step)
    place.mkdir()
    known = {"run": "4711.0", "time": 5.0, **changed}
    manifest = Manifest(step, 1, [a_file(place, 0, data)], **known)
    (place / "manifest-00000.json").write_text(manifest.to_json())


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_partial_folder_with_all_ranks_is_finished(tmp_path: Path) -> None:
    for rank in range(2):
        noted(tmp_path, 3, rank, 2, b"rank %d" % rank)
    (tmp_path / ".step-000000003.partial" / ".half.writing").write_bytes(b"half")
    assert Folder(str(tmp_path)).recover("4711.1") == []
    assert names(tmp_path / "step-000000003") == [
        "manifest-00000.json", "rank-00000.safetensors", "rank-00001.safetensors",
    ]  # fmt: skip
    (step,) = Folder(str(tmp_path)).scan()
    assert (step.run, step.ranks, step.whole) == ("4711.0", {0, 1}, True)


@pytest.mark.parametrize(
    ("there", "partial", "winner"),
    [
        ({"run": "4711.0", "time": 5.0}, {"run": "4711.1", "time": 9.0}, b"partial"),
        ({"run": "4711.0", "time": 9.0}, {"run": "4711.1", "time": 5.0}, b"partial"),
        ({"run": "4711.1", "time": 5.0}, {"run": "4711.0", "time": 9.0}, b"final"),
        ({"run": "4710.7", "time": 5.0}, {"run": "4710.8", "time": 9.0}, b"partial"),
        ({"run": "4710.8", "time": 9.0}, {"run": "4710.7", "time": 5.0}, b"final"),
        ({"run": "4711.1", "time": 5.0}, {"run": "4711.1", "time": 9.0}, b"final"),
    ],
)
def test_the_present_run_s_step_stays_then_the_newer(
    tmp_path: Path, there: dict[str, Any], partial: dict[str, Any], winner: bytes
) -> None:
    """After an exchange that was cut off, the older one lies in the partial folder."""
    final(tmp_path, 3, b"final", **there)
    noted(tmp_path, 3, 0, 1, b"partial", **partial)
    left = Folder(str(tmp_path)).recover("4711.1")
    assert (tmp_path / "step-000000003" / "rank-00000.safetensors").read_bytes() == winner
    assert len(left) == (winner == b"final")
    assert all(not leftover.kept for leftover in left)


@pytest.mark.parametrize("spoil", ["size", "note", "of", "link", "missing"])
def test_a_note_that_does_not_fit_its_file_counts_for_nothing(tmp_path: Path, spoil: str) -> None:
    noted(tmp_path, 3, 0, 1, b"x" * 100)
    partial = tmp_path / ".step-000000003.partial"
    file, note = partial / layout.file_name(0), partial / ".rank-00000.of-1.json"
    if spoil == "size":
        file.write_bytes(b"x" * 99)
    elif spoil == "note":
        note.write_text(note.read_text()[:-40])
    elif spoil == "of":
        note.rename(partial / ".rank-00000.of-2.json")
    elif spoil == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.unlink()
    (left,) = Folder(str(tmp_path)).recover("4711.0")
    assert (left.kept == {}) == (spoil != "of")
    assert Folder(str(tmp_path)).scan() == []


def test_ranks_that_were_written_apart_are_one_step_in_the_end(tmp_path: Path) -> None:
    """Killed between the links and the manifest, the partial folder still has it all."""
    final(tmp_path, 3, b"rank 0", run="4711.0")
    place = tmp_path / "step-000000003"
    manifest = Manifest.from_json((place / "manifest-00000.json").read_text())
    text = Manifest(3, 2, manifest.files, run="4711.0", time=5.0).to_json()
    (place / "manifest-00000.json").write_text(text)
    noted(tmp_path, 3, 1, 2, b"rank 1", time=2.0)
    note = tmp_path / ".step-000000003.partial" / ".rank-00001.of-2.json"
    note.rename(note.with_name(".rank-00001.of-1.json"))
    os.link(note.parent / layout.file_name(1), place / layout.file_name(1))
    assert Folder(str(tmp_path)).recover("4711.0") == []
    assert layout.covers(layout.read_parts(str(place)))
    assert names(tmp_path) == ["step-000000003"]


def test_a_step_is_removed_by_its_name_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final(tmp_path, 3, b"x")
    seen: list[list[str]] = []
    real = os.unlink
    monkeypatch.setattr(
        os, "unlink", lambda *a, **k: (seen.append(names(tmp_path)), real(*a, **k))[1]
    )
    Folder(str(tmp_path)).remove("step-000000003")
    assert seen and all(layout.is_partial(name) for listed in seen for name in listed)
    assert names(tmp_path) == []
    Folder(str(tmp_path)).remove("step-000000003")


def test_an_exchange_that_the_file_system_can_t_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("crater_slurm.checkpoint.finishing.syscalls.exchange", refuse)
    final(tmp_path, 3, b"old", run="4711.0")
    noted(tmp_path, 3, 0, 1, b"new", run="4711.1")
    folder = Folder(str(tmp_path))
    folder.recover("4711.1")
    assert (tmp_path / "step-000000003" / "rank-00000.safetensors").read_bytes() == b"new"
    folder.drop_all()
    assert names(tmp_path) == ["step-000000003"]


def test_used_bytes_count_everything_and_no_links(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100_000))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b").write_bytes(bytes(200_000))
    (tmp_path / "out").symlink_to("/usr")
    used = Folder(str(tmp_path)).used_bytes()
    assert 300_000 <= used <= 350_000


class AtOnce:
    """A pool that does what it is asked at once."""

    busy = 0

    def ask(self, work: Callable[[], Any], then: Callable[[Any, Exception | None], None]) -> None:
        try:
            result = work()
        except Exception as error:
            then(None, error)
        else:
            then(result, None)


class Rank:
    """A lane, as the steps see it."""

    def __init__(self) -> None:
        self.told: list[dict[str, object]] = []

    def moved(self) -> None:
        return None

    def tell(self, message: dict[str, object]) -> None:
        self.told.append(message)


class Case:
    """Steps over a real folder, with a clock that stands still and pools without threads."""

    def __init__(self, tmp: Path) -> None:
        self.now = 1000.0
        self.path = tmp
        folder, pool = Folder(str(tmp)), AtOnce()
        self.tools = Tools(
            spec=a_spec(tmp), folder=folder, room=Room(folder, 0), drain=None, clerk=pool,  # type: ignore[arg-type]
            files=pool, hashers=pool, log=lambda *_: None, clock=lambda: self.now,  # type: ignore[arg-type]
            now=lambda: time.time() + self.now - 1000.0,
        )  # fmt: skip
        self.live: set[int] = set()
        self.steps = Steps(self.tools, lambda: self.live)
        self.number = 0

    def begin(
        self,
        rank: int,
        step: int,
        local: int = 2,
        run: str = "4711.0",
        since: float = 0.0,
        *,
        in_lane: bool = False,
    ) -> tuple[Save, Rank]:
        self.number += 1
        owner = Rank()
        place = Place("step", step, layout.file_name(rank), rank, local, local, run)
        save = Save(owner, self.number, place, 4, self.tools, self.steps, since)
        save.in_lane = in_lane
        self.steps.begin(save)
        return save, owner

    def keep(self, save: Save) -> None:
        """As if its file had been written."""
        fd = self.tools.folder.partial(save.place.folder)
        os.close(fd)
        partial = self.path / layout.partial_name(save.place.folder)
        save.entry = a_file(partial, save.place.rank, b"data")
        save.state = State.KEPT
        self.steps.kept(save)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_what_a_rank_has_copied_is_left_alone_until_the_last_one_has(case: Case) -> None:
    """Else checksums and the disk would take cores and bandwidth from those that still copy."""
    first, _ = case.begin(0, 10, in_lane=True)
    first.state = State.FINISHING
    case.steps.committed(first)
    assert first.held
    second, _ = case.begin(1, 10, in_lane=True)
    second.state = State.FINISHING
    case.steps.committed(second)
    assert not first.held and not second.held
    assert case.steps.held_until is None


def test_nobody_is_held_for_a_rank_that_does_not_come(case: Case) -> None:
    first, _ = case.begin(0, 10, in_lane=True)
    case.now += HOLD_S / 2
    case.steps.release_due()
    assert first.held and case.steps.held_until == case.now + HOLD_S / 2
    case.now += HOLD_S / 2
    case.steps.release_due()
    assert not first.held


def test_one_rank_alone_and_a_stream_are_never_held(case: Case) -> None:
    assert not case.begin(0, 10, 1, in_lane=True)[0].held
    assert not case.begin(0, 20, 2)[0].held


def test_a_step_waits_for_a_rank_that_may_come_back_and_no_longer(case: Case) -> None:
    case.live = {0, 1}
    save, owner = case.begin(0, 1)
    case.keep(save)
    case.live = {0}
    case.steps.sweep()
    case.now += GRACE_S - 1
    case.steps.sweep()
    assert not save.settled
    case.live = {0, 1}  # started anew
    case.steps.sweep()
    case.now += GRACE_S
    case.steps.sweep()
    assert not save.settled
    case.live = {0}
    case.steps.sweep()
    case.now += GRACE_S
    case.steps.sweep()
    assert owner.told[-1]["op"] == "failed"
    assert "1 of 2 ranks of this node never saved it" in str(owner.told[-1]["error"])
    assert not (case.path / ".step-000000001.partial" / layout.file_name(0)).exists()


def test_patience_with_a_rank_that_is_there_ends_too(case: Case) -> None:
    case.live = {0, 1}
    save, owner = case.begin(0, 1)
    case.keep(save)
    case.now += PATIENCE_S - 1
    case.steps.sweep()
    assert not save.settled
    case.now += 1
    case.steps.sweep()
    assert "rank 1 of this node never saved it" in str(owner.told[-1]["error"])


def test_only_so_many_steps_wait_at_once(case: Case) -> None:
    case.live = {0, 1}
    owners = []
    for step in range(1, 7):
        save, owner = case.begin(0, step)
        case.keep(save)
        owners.append(owner)
    assert [bool(owner.told) for owner in owners] == [True, True, False, False, False, False]


def test_a_rank_that_disagrees_with_the_others_is_told(case: Case) -> None:
    first, owner = case.begin(0, 1, local=2)
    second, other = case.begin(1, 1, local=3)
    assert second.settled
    assert "3 of 3 ranks save it, another says 2 of 2" in str(other.told[0]["error"])
    assert not first.settled and owner.told == []


def test_ranks_of_a_killed_worker_are_taken_over_and_others_removed(
    case: Case, tmp_path: Path
) -> None:
    noted(tmp_path, 1, 0, 2, b"data")
    noted(tmp_path, 2, 0, 2, b"data", run="4711.9")
    (tmp_path / ".step-000000003.partial").mkdir()
    case.steps.recovered(case.tools.folder.recover("4711.0"))
    assert list(case.steps.waiting) == [("step", 1)]
    case.now += LEFTOVER_S / 2
    case.steps.sweep()
    assert len(names(tmp_path)) == 3
    case.now += LEFTOVER_S
    (tmp_path / ".step-000000003.partial" / "growing").write_text("a trainer writes itself")
    os.utime(tmp_path / ".step-000000003.partial", (0, time.time() + 2 * LEFTOVER_S))
    save, owner = case.begin(1, 1)
    case.keep(save)
    assert owner.told[-1]["op"] == "saved"
    case.steps.sweep()
    assert names(tmp_path) == [".step-000000003.partial", "step-000000001"]


def test_a_rank_announced_again_follows_what_is_under_way(case: Case) -> None:
    case.live = {0, 1}
    first, _ = case.begin(0, 1)
    case.keep(first)
    again, owner = case.begin(0, 1)
    assert not again.writes
    other, _ = case.begin(1, 1)
    case.keep(other)
    assert owner.told == [{"op": "saved", "save": 2, "name": "step", "step": 1}]


def test_hooks_are_called_with_the_final_folder(case: Case) -> None:
    called: list[tuple[str, list[int]]] = []
    case.steps.on_saved.append(lambda folder, manifest: called.append((folder, manifest.ranks)))
    for rank in range(2):
        case.keep(case.begin(rank, 1)[0])
    assert called == [(str(case.path / "step-000000001"), [0, 1])]


def test_a_quota_is_kept_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    with running(tmp_path, a_spec(folder, quota_bytes=5 * MIB)) as daemon:
        trainer = Trainer(daemon)
        trainer.saved(trainer.save(1, bytes(3 * MIB)))
        number = trainer.save(2, bytes(3 * MIB))
        error = trainer.hear("failed", save=number)["error"]
        assert "it needs 3.0 MiB, and of the 5.0 MiB that a job may keep on a node 3.0 MiB" in error
        trainer.saved(trainer.save(3, bytes(MIB)))


def test_room_is_made_by_the_rules_before_a_save_fails(tmp_path: Path) -> None:
    final(tmp_path, 1, bytes(100_000))
    folder = Folder(str(tmp_path))
    room = Room(folder, 150_000)
    asked: list[int] = []

    def drop(over: int) -> None:
        asked.append(over)
        folder.remove("step-000000001")

    room.drop_more = drop
    room.check(100_000)
    assert len(asked) == 1 and asked[0] >= 50_000
    assert names(tmp_path) == []


def test_notes_are_read_as_the_hostile_text_they_are(tmp_path: Path) -> None:
    (tmp_path / ".rank-00000.of-1.json").write_text("[" * 100_000)
    (tmp_path / ".rank-00001.of-1.json").mkdir()
    (tmp_path / ".rank-00002.of-1.json").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / ".rank-00003.of-1.json")
    fd = os.open(tmp_path, os.O_RDONLY)
    assert entries.read(fd) == []
    os.close(fd)
