"""Several starts of one training: their files never make one checkpoint, on however many nodes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_samples import content as files
from checkpoint_samples import make_step, spec
from checkpoint_worker import MIB, Daemon, Trainer, a_spec, running

from crater_slurm.checkpoint import restore
from crater_slurm.checkpoint.flush import Flusher
from crater_slurm.checkpoint.folder import Folder
from crater_slurm.checkpoint.remote import catalogue
from crater_slurm.checkpoint.spec import Remote, Spec
from crater_slurm.job import direct, environment, layout, starts
from crater_slurm.job.copying import Image, Segment, pointer_of
from crater_slurm.job.find import common, look, scan

NODES = ("n1", "n2")


@pytest.fixture
def away(tmp_path: Path) -> Path:
    return tmp_path / "away"


@pytest.fixture
def nodes(tmp_path: Path, away: Path) -> Iterator[list[Daemon]]:
    """Two workers with a cache each and one destination."""
    with contextlib.ExitStack() as stack:
        made = []
        for node in NODES:
            (tmp_path / node / "cache").mkdir(parents=True)
            one = a_spec(
                tmp_path / node / "cache", node=node, nodes=NODES, remote=Remote(url=str(away))
            )
            made.append(stack.enter_context(running(tmp_path / node, one)))
        yield made


def save(trainer: Trainer, step: int, start: int) -> None:
    """One rank of two, each alone on its node; its part is at the destination at the end."""
    data = f"rank {trainer.rank} of start {start} at {step}".encode()
    trainer.saved(trainer.save(step, data, local=1, start=str(start)))
    trainer.hear("flushed", step=step)


def started(nodes: list[Daemon]) -> list[Trainer]:
    return [Trainer(node, rank, 2, MIB) for rank, node in enumerate(nodes)]


def loadable(nodes: list[Daemon]) -> tuple[int, str] | None:
    """What the ranks agree on, each by what its own cache holds."""
    words = []
    for rank, node in enumerate(nodes):
        found = [f for f in scan(node.spec.folder, "step") if rank in f.ranks]
        words.append([(f.step, f.run, f.time) for f in found])
    return common(words)


def there(job: Spec) -> list[tuple[int, str]]:
    return [(step, run) for step, run, _ in restore.available(job, "step")]


def test_a_step_that_one_node_saved_before_a_restart_is_never_mixed_with_another_s(
    nodes: list[Daemon], tmp_path: Path, away: Path
) -> None:
    job = nodes[0].spec
    first = started(nodes)
    for trainer in first:
        save(trainer, 5, 1)
    save(first[0], 10, 1)  # the other is killed before
    for trainer in first:
        trainer.close()
    second = started(nodes)
    save(second[1], 10, 2)
    assert there(job) == [(5, "4711.0.1")] and loadable(nodes) == (5, "4711.0.1")
    for daemon in nodes:  # nor are they taken for one after a restart of the workers
        daemon.kill()
        daemon.start()
    third = started(nodes)
    assert there(job) == [(5, "4711.0.1")] and loadable(nodes) == (5, "4711.0.1")
    save(third[0], 10, 2)
    assert there(job)[0] == (10, "4711.0.2") and loadable(nodes) == (10, "4711.0.2")
    elsewhere = a_spec(tmp_path / "elsewhere", remote=job.remote)
    (tmp_path / "elsewhere").mkdir()
    folder = restore.fetch(elsewhere, "step", 10, "4711.0.2")
    assert set(files(folder).values()) == {b"rank %d of start 2 at 10" % rank for rank in (0, 1)}
    plain = catalogue.Catalogue(restore.remote.open_store(job.remote, "")).steps("step")
    until = time.monotonic() + 30
    while len(plain) != 2 and time.monotonic() < until:  # the first start's half goes
        time.sleep(0.05)
        plain = catalogue.Catalogue(restore.remote.open_store(job.remote, "")).steps("step")
    assert [(s.step, s.complete) for s in plain] == [(10, True), (5, True)]


def test_a_worker_takes_nothing_of_an_earlier_start_into_a_step(tmp_path: Path) -> None:
    """Rank 0 saved in the first start; in the second, rank 1 comes first."""
    (tmp_path / "cache").mkdir()
    with running(tmp_path, a_spec(tmp_path / "cache")) as daemon:
        old = [Trainer(daemon, rank, 2, MIB) for rank in (0, 1)]
        number = old[0].save(10, b"old 0", start="1")
        time.sleep(0.3)
        for trainer in old:
            trainer.close()
        new = [Trainer(daemon, rank, 2, MIB) for rank in (0, 1)]
        second = new[1].save(10, b"new 1", start="2")
        first = new[0].save(10, b"new 0", start="2")
        new[1].saved(second)
        new[0].saved(first)
        (found,) = Folder(daemon.spec.folder).scan()
        assert found.run == "4711.0.2" and found.whole
        assert files(found.folder) == {layout.file_name(rank): b"new %d" % rank for rank in (0, 1)}
        assert number == 1


def test_a_killed_worker_goes_on_from_the_latest_start_only(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    folder = tmp_path / "cache"
    with running(tmp_path, a_spec(folder)) as daemon:
        for rank, start in ((0, "1"), (1, "2")):
            trainer = Trainer(daemon, rank, 2, MIB)
            trainer.save(10, b"rank %d of start %s" % (rank, start.encode()), start=start)
            until = time.monotonic() + 30
            while not any(folder.glob(f".step-*/.rank-0000{rank}.of-2.json")):
                assert time.monotonic() < until
                time.sleep(0.01)
            trainer.close()
        daemon.kill()
        daemon.start()
        again = Trainer(daemon, 0, 2, MIB)
        again.saved(again.save(10, b"rank 0 of start 2", start="2"))
        (found,) = Folder(str(folder)).scan()
        assert found.run == "4711.0.2" and found.whole
        assert files(found.folder)[layout.file_name(0)] == b"rank 0 of start 2"


@pytest.mark.parametrize("start", ["x", "-1", "1.2", "../3", "9" * 21])
def test_a_start_that_is_no_number_is_refused(tmp_path: Path, start: str) -> None:
    (tmp_path / "cache").mkdir()
    with running(tmp_path, a_spec(tmp_path / "cache")) as daemon:
        trainer = Trainer(daemon)
        trainer.begin(1, 4, start=start)
        assert "start of a training is a number" in trainer.hear("error")["error"]


def test_a_flush_of_an_earlier_start_s_part_gives_way_quietly(tmp_path: Path, away: Path) -> None:
    lines: list[str] = []
    job = spec(tmp_path / "cache", str(away))
    flusher = Flusher(job, lambda _: None, lambda level, text: lines.append(text))
    for start in (1, 2):
        flusher.add(*make_step(tmp_path / "cache", 10, {0: 1000}, run=f"7.0.{start}", seed=start))
    assert [(s["run"], s["state"]) for s in flusher.state()] == [("7.0.2", "pending")]
    assert flusher.turn() and flusher.idle and lines == []
    assert there(job) == [(10, "7.0.2")]


def test_trainers_without_a_worker_keep_the_starts_apart(tmp_path: Path) -> None:
    """Two nodes write into one folder by themselves."""

    def write(rank: int, start: str) -> None:
        word = f"rank {rank}, start {start}".encode()
        image = Image([Segment(0, len(word), pointer_of(word), word)])
        run = layout.run_name("4711.0", start)
        direct.write(str(tmp_path), direct.Part("step", 10, rank, 2, run, node=NODES[rank]), image)

    write(0, "1")
    write(1, "2")
    assert not any(layout.covers(found.parts) for found in scan(str(tmp_path), "step"))
    write(0, "2")
    whole = [found for found in scan(str(tmp_path), "step") if layout.covers(found.parts)]
    assert [(found.run, found.ranks) for found in whole] == [("4711.0.2", {0, 1})]
    assert set(files(whole[0].folder).values()) == {b"rank 0, start 2", b"rank 1, start 2"}


def test_runs_are_ordered_by_job_restart_and_start() -> None:
    assert catalogue.earlier("7.0.1", "7.0.2") and catalogue.earlier("7.0.9", "7.0.10")
    assert catalogue.earlier("7.0.99", "7.1.1") and catalogue.earlier("7.0", "7.1.1")
    assert not catalogue.earlier("7.0.2", "7.0.2") and not catalogue.earlier("7.1.1", "7.0.2")
    assert not catalogue.earlier("7.0.1", "8.0.2") and not catalogue.earlier(
        "local.1-2", "local.3-4"
    )


def test_the_names_of_starts_stay_within_what_a_manifest_takes() -> None:
    assert layout.run_name("4711.0", "") == "4711.0"
    name = layout.run_name("r" * 64, "1" * 20)
    step = layout.Manifest(1, 1, [layout.FileEntry("rank-00000.safetensors", 0, 0, [])], run=name)
    assert layout.Manifest.from_json(step.to_json()).run == name and len(name) == 64
    assert layout.is_of_run("4711.0.17", "4711.0") and layout.is_of_run("4711.0", "4711.0")
    assert not layout.is_of_run("4711.01", "4711.0") and not layout.is_of_run("4711.0.x", "4711.0")
    assert layout.parse_step_name(layout.step_name(1, "step", name)) == ("step", 1, name)


STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("more", "start"),
    [
        ({"SLURM_PROCID": "1"}, "3"),  # srun alone: a task is a rank
        ({"RANK": "5", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "3"),  # torchrun on each task
        ({"RANK": "5", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"}, ""),  # one step of several
        ({"SLURM_STEP_ID": "4294967291"}, ""),  # the batch script
        ({"SLURM_STEP_ID": "x"}, ""),
    ],
)
def test_the_step_s_number_names_the_start_where_it_holds_all_ranks(
    more: dict[str, str], start: str
) -> None:
    assert environment.read({**STEP, **more}).start == start


def test_outside_of_a_job_no_step_is_believed() -> None:
    assert environment.read({k: v for k, v in STEP.items() if k != "SLURM_JOB_ID"}).start == ""


def test_ranks_agree_by_the_store_of_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("torch.distributed")
    ranks = [starts.Starts(), starts.Starts()]
    assert [rank.name("3") for rank in ranks] == ["3", "3"]  # not running
    seen = []
    for _ in range(2):  # the process stays, its group is made anew
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            seen.append([rank.name("3") for rank in ranks])
            assert seen[-1] == [rank.name("3") for rank in ranks]
        finally:
            distributed.destroy_process_group()
        time.sleep(0.002)
    assert len({name for names in seen for name in names}) == 2
    assert seen[0][0] == seen[0][1] and int(seen[0][0]) < int(seen[1][0])

    class Broken:
        def compare_set(self, *_: str) -> bytes:
            raise RuntimeError("the store is gone")

    monkeypatch.setattr(starts, "_store", lambda: broken)
    broken = Broken()
    assert ranks[0].name("3") == "3" and ranks[0].name("3") == "3"


def test_a_folder_of_before_is_read_as_it_was(tmp_path: Path) -> None:
    made, manifest = make_step(tmp_path, 3, {0: 10, 1: 20}, run="4711.0")
    (found,) = look(made, 3, "step")
    assert found.run == "4711.0" and layout.covers(found.parts) and found.parts == [manifest]
