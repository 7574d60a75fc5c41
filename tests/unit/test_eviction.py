"""Room in the cache: what is safe of ended jobs goes, oldest first, and nothing else ever."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from node_fakes import USER, FakeTree

from crater_slurm.config.cache import Cache as CacheSettings
from crater_slurm.node import cache as cache_module
from crater_slurm.node.cache import KINDS, Cache
from crater_slurm.node.eviction import Evictor
from crater_slurm.node.jobs import ENDED, PREPARED, JobRecord, JobStore

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners, so it needs root")
MIB = 2**20
FLUSHED = {"used": True, "done": True, "destination": "/project", "unflushed": 0}


class Site:
    """A cache of 1000 blocks of 1 MiB, whose drive says what a test wants it to say."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings) -> None:
        self.base = folder / "cache"
        self.base.mkdir(mode=0o755)
        values = {"mount_point": self.base, "require_mount": False, "min_free_percent": 0}
        self.settings = CacheSettings.model_validate({**values, **settings})
        self.cache = Cache(self.settings)
        self.store = JobStore(folder / "jobs")
        self.tree = FakeTree(folder / "cgroup")
        self.now = 0.0
        self.evictor = Evictor(
            self.settings, self.store, self.cache, self.tree, clock=lambda: self.now
        )
        self.free = 1000
        real = os.statvfs

        def statvfs(path):
            found = real(path)
            return SimpleNamespace(
                f_frsize=MIB, f_blocks=1000, f_bavail=self.free, f_bfree=self.free,
                f_files=found.f_files,
            )  # fmt: skip

        monkeypatch.setattr(os, "statvfs", statvfs)

    def job(
        self, job_id: str, mib: int = 1, *, phase: str = ENDED, ended: float = 1.0,
        kinds: tuple[str, ...] = ("checkpoint",), count: bool = True, **record,
    ) -> JobRecord:  # fmt: skip
        paths = self.cache.prepare("c1", job_id, USER, USER).paths
        for kind in kinds:
            (self.base / kind / "c1" / job_id / "file").write_bytes(b"x" * mib * MIB)
            if count:
                self.count(job_id, kind)
        made = JobRecord(
            job_id=job_id, uid=USER, gid=USER, cluster="c1", phase=phase,
            ended=ended if phase == ENDED else None,
            folders={kind: paths[kind] for kind in kinds},
            **{"checkpoints": dict(FLUSHED), **record},
        )  # fmt: skip
        self.store.save(made)
        return made

    def count(self, job_id: str, kind: str) -> int:
        from crater_slurm.node.space import Budget

        return self.cache.holdings.count("c1", job_id, kind, Budget()).bytes

    def left(self, kind: str = "checkpoint") -> list[str]:
        return sorted(p.name for p in (self.base / kind / "c1").iterdir())

    def trash(self) -> list[str]:
        return sorted(p.name for p in (self.base / cache_module.TRASH).iterdir())


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Site]:
    return lambda **settings: Site(tmp_path, monkeypatch, **settings)


def test_above_the_floor_nothing_is_removed(make) -> None:
    site = make(evict_below_percent=10)
    site.job("1")
    site.free = 100
    assert site.evictor.keep_floor() is False
    assert site.left() == ["1"]


def test_below_the_floor_the_oldest_go_until_it_holds(make, caplog) -> None:
    caplog.set_level(logging.INFO)
    site = make(evict_below_percent=10)
    for job_id, ended in (("1", 30.0), ("2", 10.0), ("3", 20.0)):
        site.job(job_id, 2, ended=ended)
    site.free = 97  # three blocks are missing: two folders of two blocks bring them
    assert site.evictor.keep_floor() is True
    assert site.left() == ["1"], "the one that ended last"
    assert site.store.get("2").folders == {}
    assert site.evictor.evicted["checkpoint"] == 2
    assert site.evictor.evicted_bytes >= 4 * MIB
    assert (
        "evicted checkpoint of job 2, 0.0021 GB: 9.7 % are free, the floor is 10 %" in caplog.text
    )
    assert len(site.trash()) == 2, "renamed, to be deleted by the sweep"
    assert site.evictor.keep_floor() is False, "what the trash will give back counts as free"
    site.cache.sweep()
    assert (site.trash(), site.cache.holdings.trash_bytes) == ([], 0)


@pytest.mark.parametrize(
    "record",
    [
        {"phase": PREPARED},
        {"checkpoints": {**FLUSHED, "unflushed": 1}},
        {"checkpoints": {**FLUSHED, "done": False}},
        {"checkpoints": {"used": True, "done": True, "saved": True, "requeue": True}},
    ],
    ids=["running", "unflushed", "worker at work", "waits for its restart with the only copy"],
)
def test_what_is_not_safe_stays_however_full_it_is(make, record) -> None:
    site = make(evict_below_percent=50)
    site.job("1", **record)
    site.free = 0
    assert site.evictor.candidates() == []
    assert site.evictor.keep_floor() is False
    assert site.left() == ["1"]


def test_what_no_record_knows_stays(make) -> None:
    site = make(evict_below_percent=50)
    site.job("1")
    site.store.forget("1")
    site.free = 0
    assert site.evictor.keep_floor() is False
    assert site.left() == ["1"]


def test_a_job_that_runs_though_its_record_says_ended_keeps_its_folders(make) -> None:
    site = make(evict_below_percent=50)
    site.job("1")
    site.tree.run_job("job_1", 100, "0-3")
    site.free = 0
    assert site.evictor.keep_floor() is False
    assert site.left() == ["1"]


def test_copies_of_what_is_at_its_destination_go_before_data_and_only_copies_last(make) -> None:
    site = make()
    site.job("1", ended=1.0, checkpoints={"used": True, "done": True, "saved": True})
    site.job("2", ended=2.0, kinds=("dataset", "temp"))
    site.job("3", ended=3.0)
    order = [(c.record.job_id, c.kind) for c in site.evictor.candidates()]
    assert order == [("3", "checkpoint"), ("2", "dataset"), ("2", "temp"), ("1", "checkpoint")]


def test_a_prolog_gets_what_its_plan_says(make) -> None:
    site = make()
    for job_id in ("1", "2"):
        site.job(job_id, 3, ended=float(job_id))
    site.free = 10
    new = JobRecord(job_id="9", uid=USER, gid=USER, cluster="c1")
    assert site.evictor.make_room(new, 9 * MIB) is False, "it is free"
    assert site.evictor.make_room(new, 12 * MIB) is True
    assert site.left() == ["2"]


def test_what_running_jobs_were_promised_is_not_free(make) -> None:
    site = make()
    site.job("1", 3)
    site.job("2", 1, phase=PREPARED, plan={"id": "p", "cache_gb": 1})
    site.free = 955
    new = JobRecord(job_id="9", uid=USER, gid=USER, cluster="c1")
    assert site.evictor.make_room(new, 5 * MIB) is True, "1 GB less 1 MiB is promised"
    assert site.left() == ["2"]


def test_a_restart_does_not_evict_what_it_restores_from(make) -> None:
    site = make()
    before = site.job("7", 3)
    site.free = 0
    again = JobRecord(job_id="7", uid=USER, gid=USER, cluster="c1", restarts=1)
    assert site.evictor.make_room(again, 100 * MIB) is False
    assert before.folders
    assert site.left() == ["7"]


def test_two_prologs_that_evict_each_other_do_not_wait_for_ever(make) -> None:
    site = make(evict_below_percent=50)
    site.job("1")
    site.free = 0
    entered: list[bool] = []

    with site.store.exclusive("1"):
        thread = threading.Thread(target=lambda: entered.append(site.evictor.keep_floor()))
        thread.start()
        thread.join(10)
    assert entered == [False], "another works on that job: it is left for the next round"
    assert site.left() == ["1"]


def test_a_folder_that_was_never_counted_is_counted_before_it_goes(make) -> None:
    site = make(evict_below_percent=10)
    for job_id in ("1", "2", "3"):
        site.job(job_id, 4, ended=float(job_id), count=False)
    site.free = 97
    site.evictor.keep_floor()
    assert site.left() == ["2", "3"], "one was enough"


def test_a_drive_that_hangs_costs_a_prolog_no_more_than_its_share(make, monkeypatch) -> None:
    site = make()
    for number in range(1, 6):
        site.job(str(number), ended=float(number))
    site.free = 0

    def slow(*_args) -> bool:
        site.now += 0.3
        return False

    monkeypatch.setattr(site.cache, "release", slow)
    new = JobRecord(job_id="9", uid=USER, gid=USER, cluster="c1")
    site.evictor.make_room(new, 100 * MIB)
    assert site.now == pytest.approx(0.6), "two tries: the budget is 0.4 s"


def test_a_link_in_place_of_a_folder_is_set_aside_as_a_link(make, tmp_path: Path) -> None:
    site = make(evict_below_percent=50)
    site.job("1")
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").write_text("x")
    folder = site.base / "checkpoint/c1/1"
    (folder / "file").unlink()
    folder.rmdir()
    folder.symlink_to(target)
    site.free = 0
    site.evictor.keep_floor()
    site.cache.sweep()
    assert (target / "file").read_text() == "x"


def test_a_full_drive_takes_a_new_job_once_what_was_evicted_is_in_the_trash(make) -> None:
    site = make(min_free_percent=2)
    site.job("1", 30)
    site.free = 0
    assert "the cache is full" in site.cache.prepare("c1", "9", USER, USER).problem
    new = JobRecord(job_id="9", uid=USER, gid=USER, cluster="c1")
    assert site.evictor.make_room(new, 0) is True
    assert site.cache.prepare("c1", "9", USER, USER).problem == ""
    assert set(KINDS) == {"checkpoint", "dataset", "temp"}
