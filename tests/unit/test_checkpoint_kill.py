"""A worker killed at any moment: nothing half gets a final name, nothing announced is lost."""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import pytest
from checkpoint_worker import MIB, Trainer, a_spec, content, running

from crater_slurm.checkpoint.folder import Folder
from crater_slurm.job import layout

ROUNDS = 25


def some_bytes(random_: random.Random, size: int) -> bytes:
    return random_.randbytes(size)


def no_half_step(folder: Path, truth: dict[tuple[int, int], bytes], ranks: int) -> set[int]:
    """The final steps, each of which is whole and holds exactly what was saved."""
    found = set()
    for name in os.listdir(folder):
        parsed = layout.parse_step_name(name)
        if parsed is None:
            assert layout.is_partial(name), name
            continue
        for rank in range(ranks):
            assert content(folder, parsed[1], rank) == truth[parsed[1], rank]
        found.add(parsed[1])
    return found


def test_kill_at_random_points_with_trainers_that_offer_their_lanes(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    folder = tmp_path / "ckpt"
    folder.mkdir()
    with running(tmp_path, a_spec(folder)) as daemon:
        ranks = [Trainer(daemon, rank, 2, 4 * MIB) for rank in range(2)]
        truth: dict[tuple[int, int], bytes] = {}
        for step in range(1, ROUNDS + 1):
            for trainer in ranks:
                data = some_bytes(chance, chance.randrange(1, MIB + MIB // 2))
                truth[step, trainer.rank] = data
                trainer.save(step, data, 4 * MIB)
            time.sleep(chance.random() * 0.06)
            daemon.kill()
            before = no_half_step(folder, truth, 2)
            daemon.start()
            for trainer in ranks:
                trainer.again()
            for trainer in ranks:
                for number in list(trainer.unsaved):
                    trainer.saved(number)
                trainer.freed = trainer.head
            assert no_half_step(folder, truth, 2) >= before | {step}


def test_a_rank_that_has_streamed_is_taken_over_by_the_next_worker(tmp_path: Path) -> None:
    """Its lane holds only the end of it, but its file is whole and was noted on disk."""
    folder = tmp_path / "ckpt"
    folder.mkdir()
    with running(tmp_path, a_spec(folder)) as daemon:
        first, second = (Trainer(daemon, rank, 2, MIB) for rank in range(2))
        mine, other = os.urandom(5 * MIB + 17), os.urandom(300_000)
        number = first.save(7, mine)
        while first.freed < first.head:  # the last piece goes when the file is whole
            first.hear("freed")
        daemon.kill()
        daemon.start()
        first.unsaved = {number: [m for m in first.unsaved[number] if m["op"] == "begin"]}
        first.unsaved[number].append({"op": "direct", "save": number})
        first.again()
        second.again()
        later = second.save(7, other)
        first.saved(number)
        second.saved(later)
    assert content(folder, 7, 0) == mine
    assert content(folder, 7, 1) == other


def test_a_worker_killed_in_the_midst_of_a_stream_leaves_the_step_before(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon, lane_bytes=MIB)
        old = os.urandom(MIB // 8)
        trainer.saved(trainer.save(1, old))
        number = trainer.begin(2, 64 * MIB)
        for at in range(0, 12 * MIB // 8, MIB // 8):
            part = os.urandom(MIB // 8)
            position = trainer.put(part)
            trainer.send("data", save=number, at=at, position=position, bytes=len(part))
        daemon.kill()
        assert no_half_step(folder, {(1, 0): old}, 1) == {1}
        daemon.start()
        del trainer.unsaved[number]
        trainer.again()
        new = os.urandom(200_000)
        trainer.freed = trainer.head
        trainer.saved(trainer.save(2, new))
        assert content(folder, 2) == new
        assert content(folder, 1) == old


@pytest.mark.parametrize("lost", ["the worker", "the worker and all ranks"])
def test_what_all_ranks_have_finished_gets_its_name_at_the_next_start(
    tmp_path: Path, lost: str
) -> None:
    """Killed between the last rank's file and the rename: the notes on disk are enough."""
    folder = tmp_path / "ckpt"
    folder.mkdir()
    made = Folder(str(folder))
    with running(tmp_path, a_spec(folder)) as daemon:
        ranks = [Trainer(daemon, rank, 3, MIB) for rank in range(3)]
        data = [os.urandom(50_000 + rank) for rank in range(3)]
        for trainer in ranks[:2]:
            trainer.save(5, data[trainer.rank])
        partial = folder / ".step-000000005.partial"
        until = time.monotonic() + 30
        while len(list(partial.glob(".rank-*.json"))) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        daemon.kill()
        # The third rank's file, as the killed worker would have left it.
        source = next(partial.glob(".rank-00000.*.json"))
        text = (
            source.read_text().replace("rank-00000", "rank-00002").replace('"rank": 0', '"rank": 2')
        )
        (partial / "rank-00002.safetensors").write_bytes(data[0])
        (partial / ".rank-00002.of-3.json").write_text(text)
        assert made.scan() == []
        daemon.start()
        if lost == "the worker":
            ranks[0].again()
            ranks[0].saved(1)
        daemon.send({"op": "ended"})
        for trainer in ranks:
            with contextlib.suppress(OSError):
                trainer.close()
        assert daemon.hear("state", done=True)["steps"][0]["step"] == 5
    assert [content(folder, 5, rank) for rank in range(3)] == [data[0], data[1], data[0]]
    assert os.listdir(folder) == ["step-000000005"]


def test_a_daemon_that_is_started_anew_finds_the_worker_and_its_state(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon)
        trainer.saved(trainer.save(1, b"before"))
        assert daemon.channel is not None
        daemon.channel.close()
        trainer.saved(trainer.save(2, b"without a daemon"))
        daemon.connect()
        steps = daemon.hear("state")["steps"]
        assert {step["step"] for step in steps} == {1, 2}
        other = Trainer(daemon, 0)
        other.saved(other.save(3, b"after"))
        assert daemon.process is not None and daemon.process.poll() is None
    assert content(folder, 2) == b"without a daemon"


def test_a_lost_connection_alone_costs_nothing(tmp_path: Path) -> None:
    """The worker lives: what it has already is not written twice, and each save is answered."""
    folder = tmp_path / "ckpt"
    folder.mkdir()
    with running(tmp_path, a_spec(folder)) as daemon:
        first, second = (Trainer(daemon, rank, 2, MIB) for rank in range(2))
        number = first.save(1, b"a" * 70_000)
        first.again()
        first.again()
        later = second.save(1, b"b" * 70_000)
        assert first.saved(number)["step"] == 1
        second.saved(later)
        first.freed = first.head
        first.saved(first.save(1, b"other bytes of the same step and run"))
    assert content(folder, 1, 0) == b"a" * 70_000
