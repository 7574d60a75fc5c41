"""A training started anew within one run: what its earlier start left of a step gives way."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from checkpoint_samples import make_step, spec
from checkpoint_worker import MIB, Daemon, Trainer, a_spec, content

from crater_slurm.checkpoint.flush import Flusher
from crater_slurm.job import direct, layout
from crater_slurm.job.copying import Image, Segment, pointer_of


class Started(Trainer):
    """A rank whose process was started just now."""

    def __init__(self, daemon: Daemon, rank: int) -> None:
        self.began = int(time.time() * 1000) + 1
        daemon.lane_extra = {"began": self.began}  # type: ignore[attr-defined]
        super().__init__(daemon, rank, 2, MIB)


class Node(Daemon):
    """Says of each trainer's process when it was started."""

    lane_extra: dict[str, int] = {}  # noqa: RUF012

    def lane(self, opening, lane=None, limit=1 << 40):  # type: ignore[no-untyped-def]
        opening.setdefault("began", self.lane_extra["began"])
        return super().lane(opening, lane, limit)


@pytest.fixture
def node(tmp_path: Path):  # type: ignore[no-untyped-def]
    (tmp_path / "ckpt").mkdir()
    made = Node(tmp_path, a_spec(tmp_path / "ckpt"))
    made.start()
    yield made
    made.stop()


def ranks(node: Node) -> list[Started]:
    return [Started(node, rank) for rank in range(2)]


def notes(node: Node) -> list[Path]:
    return list(Path(node.spec.folder).glob(".step-000000005.partial/.rank-*.json"))


def half(node: Node) -> None:
    """Rank 1 has saved step 5, rank 0 has not, and both are gone."""
    old = ranks(node)
    old[1].save(5, b"old 1")
    until = time.monotonic() + 30
    while not notes(node) and time.monotonic() < until:
        time.sleep(0.01)
    for trainer in old:
        trainer.close()


@pytest.mark.parametrize("killed", [False, True])
def test_half_of_a_step_that_an_earlier_start_left_is_not_used(node: Node, killed: bool) -> None:
    half(node)
    if killed:
        node.kill()
        node.start()
    new = ranks(node)
    first = new[0].save(5, b"new 0")
    new[0].save(6, b"six 0")
    new[1].save(6, b"six 1")  # so both have been written; five is still one rank's
    new[0].hear("failed", save=first)
    assert not (Path(node.spec.folder) / layout.step_name(5)).exists()
    saves = [trainer.save(5, b"new %d" % trainer.rank) for trainer in new]
    for trainer, number in zip(new, saves, strict=True):
        trainer.saved(number)
    assert [content(Path(node.spec.folder), 5, rank) for rank in (0, 1)] == [b"new 0", b"new 1"]


def test_a_step_saved_again_after_a_restart_is_the_newer(node: Node) -> None:
    folder = Path(node.spec.folder)
    for word in (b"old", b"new"):
        both = ranks(node)
        saves = [trainer.save(5, word + b" %d" % trainer.rank) for trainer in both]
        for trainer, number in zip(both, saves, strict=True):
            trainer.saved(number)
        assert [content(folder, 5, rank) for rank in (0, 1)] == [word + b" 0", word + b" 1"]
        both[0].unsaved = {
            7: [
                {
                    "op": "begin",
                    "save": 7,
                    "name": "step",
                    "step": 5,
                    "file": layout.file_name(0),
                    "size": 5,
                    "ranks": 2,
                    "local": 2,
                }
            ]
        }
        both[0].again()  # the connection alone was lost: it is known to be saved
        both[0].saved(7)
        for trainer in both:
            trainer.close()


def test_what_was_saved_again_is_flushed_again(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    job = spec(tmp_path / "ckpt", str(tmp_path / "away"))
    flusher = Flusher(job, lambda _: None, lambda *_: None)
    for number, size in enumerate((1000, 2000)):
        made, newer = make_step(tmp_path / "ckpt", 5, {0: size}, time=100.0 + number, seed=number)
        (Path(made) / "flush.json").unlink(missing_ok=True)  # the folder is another one then
        flusher.add(made, newer)
        assert flusher.turn()
        there = tmp_path / "away" / layout.step_name(5)
        (found,) = layout.read_parts(str(there))
        assert found == newer
        assert layout.check_file(str(there / found.files[0].name), found.files[0]) == ""


def test_ranks_that_write_by_themselves_leave_an_earlier_start_s_files_out(tmp_path: Path) -> None:
    def write(rank: int, word: bytes, began: float) -> None:
        image = Image([Segment(0, len(word), pointer_of(word), word)])
        part = direct.Part("step", 5, rank, 2, "1.0", "1", "c", "n1", began)
        direct.write(str(tmp_path), part, image)

    write(1, b"old", 0.0)
    now = time.time() + 0.001
    time.sleep(0.002)
    write(0, b"new", now)
    parts = layout.read_parts(str(tmp_path / layout.step_name(5)))
    assert [part.ranks for part in parts] == [[0]]
    write(1, b"new", now)
    assert layout.covers(layout.read_parts(str(tmp_path / layout.step_name(5))))
    assert {content(tmp_path, 5, rank) for rank in (0, 1)} == {b"new"}
