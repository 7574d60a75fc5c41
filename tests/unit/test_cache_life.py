"""The cache's life in the daemon: hooks make room and set limits, rounds count, tell and evict."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoint_worker import MIB, Trainer, a_spec, content, running
from node_fakes import ask, settings, signed, wait_for
from worker_fakes import Node as WorkerNode

from crater_slurm.errors import SlurmError
from crater_slurm.node import upkeep, worker_spec
from crater_slurm.node.cache_life import CacheLife
from crater_slurm.node.jobs import ENDED
from crater_slurm.node.notices import Notices
from crater_slurm.node.server import dispatch
from crater_slurm.node.services import Roots, Services
from crater_slurm.node.totals import NAMES
from crater_slurm.slurm.live import Live

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners, so it needs root")
GB = 10**9


class Node:
    """The daemon's parts behind its hooks; what jobs and workers are told is kept in lists."""

    def __init__(self, folder: Path, **cache) -> None:
        self.folder = folder
        self.services = Services(settings(folder, cache=cache), Roots(proc=folder / "proc"))
        upkeep.recover(self.services)
        self.reports: list[dict] = []
        self.services.spool = SimpleNamespace(send=self.reports.append)
        self.life: CacheLife = self.services.life
        self.life.leftovers._ask = lambda: Live("c1", frozenset({"7"}), 0.0)
        self.now = 0.0
        self.life._clock = lambda: self.now
        self.told: list[tuple[str, str]] = []
        self.life.notices._send = lambda job_id, text: self.told.append((job_id, text))
        self.allowed: list[tuple[str, int]] = []
        self.life.on_allowance = lambda job_id, amount: self.allowed.append((job_id, amount))
        self.woken = 0
        self.life.wake = self.wake

    def wake(self) -> None:
        self.woken += 1

    def prolog(self, job_id: str = "7", **env) -> None:
        comment = signed(id=f"p{job_id}", cache_gb=1)
        answer = dispatch(
            self.services, ask("prolog", SLURM_JOB_ID=job_id, SLURM_JOB_COMMENT=comment, **env)
        )
        assert answer.status == "ok"
        for work in answer.afterwards:
            work()

    def epilog(self, job_id: str = "7") -> None:
        dispatch(self.services, ask("epilog", SLURM_JOB_ID=job_id))

    def record(self, job_id: str = "7"):
        return self.services.store.get(job_id)

    def round(self) -> None:
        self.now += 100
        self.life.round()

    def grant(self) -> dict:
        return self.reports[-1]["grant"]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_prolog_sets_the_plans_limit_and_explain_knows_it(node: Node) -> None:
    node.prolog()
    assert node.record().quota["limit_bytes"] == GB
    assert node.grant()["cache_limit"] == "1 GB, by accounting"


def test_a_job_beyond_its_limit_is_told_in_its_output_its_worker_and_explain(node: Node) -> None:
    node.prolog()
    node.record().quota["limit_bytes"] = 5 * MIB
    node.round()
    assert node.allowed[-1][0] == "7"
    (node.folder / "cache/temp/c1/7/file").write_bytes(bytes(6 * MIB))
    node.round()
    text = "it holds 0.00629 GB in the local cache, its limit is 0.00524 GB"
    whole = f"crater: {text}; no more checkpoints are taken until it holds less"
    assert wait_for(lambda: node.told == [("7", whole)])
    assert node.grant()["cache_exceeded"] == text
    assert node.allowed[-1] == ("7", 4096), "nothing more than a little"
    node.round()
    assert len(node.told) == 1, "once"
    (node.folder / "cache/temp/c1/7/file").unlink()
    node.round()
    assert node.allowed[-1][1] > 4 * MIB
    assert "cache_exceeded" not in node.grant()


def test_the_limit_survives_a_second_prolog_and_a_restart_of_the_daemon(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.prolog()
    again = Services(node.services.settings, Roots(proc=tmp_path / "proc"))
    assert again.store.get("7").quota["limit_bytes"] == GB
    node.prolog()
    assert node.record().quota["limit_bytes"] == GB


def test_a_prolog_evicts_what_it_needs_room_for_and_wakes_the_sweep(
    node: Node, monkeypatch
) -> None:
    node.prolog("5")
    record = node.record("5")
    (node.folder / "cache/checkpoint/c1/5/file").write_bytes(bytes(MIB))
    record.phase, record.ended = ENDED, 1.0
    record.checkpoints = {"used": True, "done": True, "destination": "/p", "unflushed": 0}
    real = os.statvfs

    def full(path):
        found = real(path)
        return SimpleNamespace(
            f_frsize=found.f_frsize, f_blocks=found.f_blocks, f_bavail=1000, f_bfree=1000
        )

    monkeypatch.setattr(os, "statvfs", full)
    node.prolog("7")
    assert not (node.folder / "cache/checkpoint/c1/5").exists()
    assert (node.folder / "cache/checkpoint/c1/7").is_dir()
    assert node.woken == 1
    assert node.record("5").folders.keys() == {"dataset", "temp"}, "empty: nothing to win"


def test_the_rounds_keep_their_times(node: Node, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(node.life.quotas, "count", lambda: calls.append("count") or [])
    monkeypatch.setattr(node.life.leftovers, "sweep", lambda: bool(calls.append("sweep")))
    for seconds in (0, 30, 61, 3601, 3602):
        node.now = float(seconds)
        node.life.round()
    assert calls == ["count", "sweep", "count", "count", "sweep"]
    node.now = -100_000.0
    node.life.round()
    assert calls[-2:] == ["count", "sweep"], "a clock that was set back stops nothing"


def test_folders_of_running_jobs_outlive_every_round(node: Node, monkeypatch) -> None:
    node.prolog()
    (node.folder / "cache/checkpoint/c1/7/file").write_text("x")
    real = os.statvfs

    def full(path):
        found = real(path)
        return SimpleNamespace(
            f_frsize=found.f_frsize, f_blocks=found.f_blocks, f_bavail=0, f_bfree=0
        )

    monkeypatch.setattr(os, "statvfs", full)
    node.life.leftovers._ask = lambda: Live("c1", frozenset(), -1e9)
    for _ in range(5):
        node.now += 10_000
        node.life.round()
        upkeep.tidy(node.services)
    assert (node.folder / "cache/checkpoint/c1/7/file").read_text() == "x"


def test_a_message_that_can_not_be_sent_is_logged(caplog) -> None:
    def refuse(job_id: str, text: str) -> None:
        raise SlurmError("scontrol failed: Invalid job id specified")

    Notices(refuse).tell("7", "a\nb\x1b[2J")
    assert wait_for(lambda: "couldn't tell job 7" in caplog.text)
    assert "crater: a?b?[2J" in caplog.text


def test_workers_hear_what_their_jobs_may_still_save(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    with running(tmp_path, a_spec(folder)) as daemon:
        trainer = Trainer(daemon)
        data = os.urandom(2 * MIB)
        trainer.saved(trainer.save(1, data))
        daemon.send({"op": "limits", "quota_bytes": 4096})
        number = trainer.save(2, data)
        failed = trainer.hear("failed", save=number)
        assert "that a job may keep on a node" in failed["error"]
        daemon.send({"op": "limits", "quota_bytes": 0})
        trainer.saved(trainer.save(3, data))
        assert content(folder, 3) == data
        told = daemon.hear("state", idle=True)
        while told["counters"].get("saved") != 2:
            told = daemon.hear("state")
        assert 0 < told["counters"]["drain_seconds"] < 60
        assert set(told["counters"]) & set(NAMES) >= {"saved", "failed", "drained_bytes"}


def test_a_new_worker_begins_with_what_its_job_may_hold(tmp_path: Path) -> None:
    node = WorkerNode(tmp_path)
    try:
        record = node.job(checkpoint="on", cache_gb=3)
        node.services.life.begin(record, None)
        place = worker_spec.destination(node.services, record)
        assert worker_spec.build(node.services, record, place).quota_bytes == 3 * GB
        node.workers.wake()
        assert wait_for(lambda: node.workers.count() == 1)
        node.workers.allow("7", 5)
        node.workers.allow("8", 5)
    finally:
        node.close()
