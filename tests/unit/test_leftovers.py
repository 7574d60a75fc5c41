"""What dead jobs left: removed only when Slurm certainly knows no such job, checkpoints never."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from node_fakes import USER, FakeTree

from crater_slurm.config.cache import Cache as CacheSettings
from crater_slurm.errors import SlurmError
from crater_slurm.node.cache import KINDS, TRASH, Cache
from crater_slurm.node.jobs import ENDED, JobRecord, JobStore
from crater_slurm.node.leftovers import Leftovers, remove_dead_sockets
from crater_slurm.slurm import live
from crater_slurm.slurm.client import Client
from crater_slurm.slurm.live import Live

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners, so it needs root")
HOUR = 3600.0


class Site:
    """A cache with folders of jobs that no record knows, seen from two days later."""

    def __init__(self, folder: Path) -> None:
        self.base = folder / "cache"
        self.base.mkdir(mode=0o755)
        values = {"mount_point": self.base, "require_mount": False, "min_free_percent": 0}
        self.settings = CacheSettings.model_validate(values)
        self.cache = Cache(self.settings)
        self.store = JobStore(folder / "jobs")
        self.tree = FakeTree(folder / "cgroup")
        self.answer: Live | SlurmError = Live("c1", frozenset({"100"}), 0.0)
        self.asked = 0
        self.later = 48 * HOUR
        self.subject = Leftovers(
            self.settings, self.store, self.cache, self.tree, self.ask, self.clock
        )

    def ask(self) -> Live:
        self.asked += 1
        if isinstance(self.answer, SlurmError):
            raise self.answer
        return self.answer

    def clock(self) -> float:
        return time.time() + self.later

    def folders(self, job_id: str, cluster: str = "c1") -> None:
        assert not self.cache.prepare(cluster, job_id, USER, USER).problem

    def left(self) -> list[str]:
        found = self.base.glob("*/*/*")
        return sorted(
            f"{p.parts[-3]}/{p.parts[-2]}/{p.parts[-1]}" for p in found if TRASH not in p.parts
        )

    def record(self, job_id: str, **values) -> None:
        self.store.save(JobRecord(job_id=job_id, uid=USER, gid=USER, cluster="c1", **values))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


ALL_OF_7 = [f"{kind}/c1/7" for kind in KINDS]


def test_folders_of_a_job_that_slurm_does_not_know_go(site: Site, caplog) -> None:
    caplog.set_level("INFO")
    site.folders("7")
    assert site.subject.sweep() is True
    assert site.left() == []
    assert site.subject.removed == 3
    assert "removed temp of job 7, unchanged for 48 h: Slurm knows no such job" in caplog.text


def test_young_ones_stay_and_slurm_is_not_even_asked(site: Site) -> None:
    site.folders("7")
    site.later = 23 * HOUR
    assert site.subject.sweep() is False
    assert (site.left(), site.asked) == (ALL_OF_7, 0)


def test_a_job_that_slurm_knows_in_any_state_keeps_them(site: Site) -> None:
    site.folders("7")
    site.answer = Live("c1", frozenset({"7"}), 0.0)
    assert site.subject.sweep() is False
    assert site.left() == ALL_OF_7


@pytest.mark.parametrize("phase", ["prepared", ENDED])
def test_what_a_record_knows_is_the_records_matter(site: Site, phase: str) -> None:
    site.folders("7")
    site.record("7", phase=phase)
    site.answer = Live("c1", frozenset({"7", "100"}), 0.0)
    assert site.subject.find() == []


def test_a_job_with_a_cgroup_keeps_them(site: Site) -> None:
    site.folders("7")
    site.tree.run_job("job_7", 100, "0-3")
    site.subject.sweep()
    assert site.left() == ALL_OF_7


def test_a_slurm_that_does_not_answer_means_nothing_is_removed(site: Site, caplog) -> None:
    site.folders("7")
    site.answer = SlurmError("squeue did not answer within 15 s")
    assert site.subject.sweep() is False
    assert site.left() == ALL_OF_7
    assert "nothing is removed: can't know which jobs live: squeue did not" in caplog.text


def test_an_answer_that_lacks_a_job_which_runs_here_is_not_believed(site: Site, caplog) -> None:
    site.folders("7")
    site.record("8")
    assert site.subject.sweep() is False
    assert site.left() == ALL_OF_7
    assert "slurmctld does not know job 8, which runs here" in caplog.text


def test_an_empty_queue_counts_only_of_a_controller_that_is_up_for_long(site: Site, caplog) -> None:
    site.folders("7")
    site.answer = Live("c1", frozenset(), site.clock() - HOUR)
    assert site.subject.sweep() is False
    assert site.left() == ALL_OF_7
    assert "the queue is empty, and slurmctld has started only lately" in caplog.text
    site.answer = Live("c1", frozenset(), site.clock() - 30 * HOUR)
    assert site.subject.sweep() is True
    assert site.left() == []


def test_another_clusters_folders_stay(site: Site, caplog) -> None:
    site.folders("7", "c2")
    assert site.subject.sweep() is False
    assert site.left() == [f"{kind}/c2/7" for kind in KINDS]
    assert "it is of cluster c2, Slurm here of c1" in caplog.text


def test_checkpoints_stay_and_are_reported_once_a_day(site: Site, caplog) -> None:
    site.folders("7")
    step = site.base / "checkpoint/c1/7/step-000000005"
    step.mkdir()
    (step / "manifest-00000.json").write_text("{}")
    assert site.subject.sweep() is True
    assert site.left() == ["checkpoint/c1/7"]
    site.subject.sweep()
    assert [one.job_id for one in site.subject.kept] == ["7"]
    assert caplog.text.count("checkpoint/c1/7 of no record is kept: it holds checkpoints") == 1
    site.later += 25 * HOUR
    site.subject.sweep()
    assert caplog.text.count("of no record is kept") == 2
    shutil.rmtree(site.base / "checkpoint/c1/7")
    site.subject.sweep()
    assert site.subject.kept == ()


def test_a_half_written_step_is_no_checkpoint_but_a_part_of_one_is(site: Site) -> None:
    site.folders("7")
    site.folders("8")
    half = site.base / "checkpoint/c1/7/.step-000000005.partial"
    half.mkdir()
    (half / "rank-00000.safetensors").write_text("x")
    whole = site.base / "checkpoint/c1/8/.step-000000005.partial"
    whole.mkdir()
    (whole / "manifest-00000.json").write_text("{}")
    site.subject.sweep()
    assert site.left() == ["checkpoint/c1/8"], "complete but for its rename"


def test_what_is_no_folder_of_a_job_is_never_touched(site: Site, tmp_path: Path) -> None:
    site.folders("7")
    parent = site.base / "temp/c1"
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").write_text("x")
    (parent / "99").symlink_to(target)
    (parent / "98").write_text("a file")
    (parent / "notes").mkdir()
    (site.base / "mine").mkdir()
    site.subject.sweep()
    site.cache.sweep()
    assert (target / "file").read_text() == "x"
    assert sorted(p.name for p in parent.iterdir()) == ["98", "99", "notes"]


def test_a_mount_in_a_folders_place_stays(site: Site) -> None:
    site.folders("7")
    place = site.base / "temp/c1/7"
    if subprocess.run(["mount", "-t", "tmpfs", "none", place], check=False).returncode:
        pytest.skip("this machine allows no mounts")
    try:
        (place / "file").write_text("x")
        site.subject.sweep()
        assert (place / "file").read_text() == "x"
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_folder_can_not_be_made_young_for_ever(site: Site) -> None:
    site.folders("7")
    future = site.clock() + 1000 * HOUR
    os.utime(site.base / "temp/c1/7", (future, future))
    site.subject.sweep()
    assert site.left() == []


# Asking Slurm


def commands(folder: Path, squeue: str, config: str = "") -> Client:
    boot = "BOOT_TIME               = 2026-11-30T01:00:00\n"
    text = config or f"{boot}ClusterName             = c1\n"
    for name, body in {"squeue": squeue, "scontrol": f"cat <<'END'\n{text}END"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return Client(bin_dir=folder, timeout_seconds=5)


def test_slurm_is_asked_for_jobs_in_every_state(tmp_path: Path) -> None:
    found = live.ask(commands(tmp_path, 'echo "$@" >&2; echo 12; echo 7; echo 7'))
    assert (found.cluster, found.job_ids) == ("c1", frozenset({"7", "12"}))
    assert found.started > 1.7e9


@pytest.mark.parametrize(
    ("squeue", "config", "said"),
    [
        ("exit 1", "", "squeue failed"),
        ("echo 'slurm_load_jobs error: Unable to contact'", "", "where a job id belongs"),
        ("echo 12_[1-5]", "", "where a job id belongs"),
        ("echo 7", "ClusterName = c1\n", "BOOT_TIME"),
        ("echo 7", "BOOT_TIME = 2026-11-30T01:00:00\n", "ClusterName"),
    ],
)
def test_every_doubt_about_the_answer_is_an_error(tmp_path, squeue, config, said) -> None:
    with pytest.raises(SlurmError, match=said):
        live.ask(commands(tmp_path, squeue, config))


# Sockets


def test_only_sockets_of_dead_workers_of_unknown_jobs_go(tmp_path: Path) -> None:
    folder, store = tmp_path / "workers", JobStore(tmp_path / "jobs")
    folder.mkdir()
    alive = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    alive.bind(str(folder / "1.sock"))
    alive.listen()
    for name in ("2.sock", "3.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(folder / name))
    (folder / "4.sock").write_text("no socket")
    store.save(JobRecord(job_id="3", uid=USER, gid=USER, cluster="c1", phase=ENDED))
    assert remove_dead_sockets(folder, store) == ["2.sock"]
    assert sorted(p.name for p in folder.iterdir()) == ["1.sock", "3.sock", "4.sock"]
    alive.close()
    assert remove_dead_sockets(tmp_path / "none", store) == []
