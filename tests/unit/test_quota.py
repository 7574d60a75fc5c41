"""Space in the cache: counted without trust, held by the kernel where it can, told to the user."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
from pathlib import Path

import pytest
from node_fakes import USER

from crater_slurm.config.cache import Cache as CacheSettings
from crater_slurm.errors import CraterError
from crater_slurm.node import prjquota, quota, safefs, space
from crater_slurm.node.cache import Cache
from crater_slurm.node.jobs import ENDED, JobRecord, JobStore
from crater_slurm.node.mounts import Mount
from crater_slurm.node.quota import Quotas

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners, so it needs root")
MB = 10**6


class Kernel:
    """Project quota as a dictionary: project -> [used, limit]; or an error for every call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.projects: dict[int, list[int]] = {}
        self.tags: list[int] = []
        self.error: OSError | None = None
        monkeypatch.setattr(prjquota, "held", self.held)
        monkeypatch.setattr(prjquota, "limit", self.limit)
        monkeypatch.setattr(prjquota, "tag", self.tag)
        monkeypatch.setattr(prjquota, "is_enforced", lambda mount: True)
        monkeypatch.setattr(prjquota, "device_of", lambda mount, number: "/dev/cache")

    def held(self, device: str, project: int) -> prjquota.Held:
        used, limit = self.projects.get(project, (0, 0))
        return prjquota.Held(used, int(used > 0), limit)

    def limit(self, device: str, project: int, limit_bytes: int) -> None:
        self.projects.setdefault(project, [0, 0])[1] = limit_bytes

    def tag(self, fd: int, project: int) -> None:
        if self.error:
            raise self.error
        self.tags.append(project)


class Site:
    def __init__(self, folder: Path, *, mounted: bool = False, **settings) -> None:
        self.base = folder / "cache"
        self.base.mkdir(mode=0o755)
        values = {"mount_point": self.base, "require_mount": False, "min_free_percent": 0}
        self.settings = CacheSettings.model_validate({**values, **settings})
        line = f"1 1 8:1 / {self.base} rw - xfs /dev/cache rw,prjquota"
        self.cache = Cache(self.settings, lambda: line if mounted else "")
        self.store = JobStore(folder / "jobs")
        self.quotas = Quotas(self.settings, self.store, self.cache.holdings)

    def job(self, job_id: str = "7", plan: dict | None = None, **record) -> JobRecord:
        made = JobRecord(
            job_id=job_id, uid=USER, gid=USER, cluster="c1", plan={"id": "p", **(plan or {})},
            folders=self.cache.prepare("c1", job_id, USER, USER).paths, **record,
        )  # fmt: skip
        self.quotas.begin(made)
        self.store.save(made)
        return made

    def write(self, job_id: str, mb: int, kind: str = "temp", name: str = "file") -> None:
        (self.base / kind / "c1" / job_id / name).write_bytes(b"x" * mb * MB)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


# Counting


def count(folder: Path, budget: space.Budget | None = None) -> space.Count:
    with safefs.opened(folder.parent) as parent:
        return space.count(parent, folder.name, budget or space.Budget())


def test_what_lies_on_the_drive_counts_links_to_elsewhere_do_not(tmp_path: Path) -> None:
    folder, outside = tmp_path / "job", tmp_path / "outside"
    for place in (folder / "a/b", outside):
        place.mkdir(parents=True)
    (folder / "a/b/file").write_bytes(b"x" * MB)
    (outside / "large").write_bytes(b"x" * 5 * MB)
    (folder / "link").symlink_to(outside)
    os.link(folder / "a/b/file", folder / "again")
    sparse = folder / "sparse"
    with sparse.open("wb") as file:
        file.truncate(100 * MB)
    found = count(folder)
    assert found.whole
    assert MB <= found.bytes < 1.2 * MB, "once for both names, nothing for the hole"


def test_a_link_in_place_of_the_folder_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/file").write_bytes(b"x" * MB)
    (tmp_path / "job").symlink_to(tmp_path / "target")
    assert count(tmp_path / "job").bytes == 0


def test_another_file_system_inside_is_not_entered(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    (folder / "mount").mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "none", folder / "mount"], check=False)
    if done.returncode:
        pytest.skip("this machine allows no mounts")
    try:
        (folder / "mount/file").write_bytes(b"x" * MB)
        assert count(folder).bytes < MB
        assert count(folder / "mount") == space.Count(0, whole=False)
    finally:
        subprocess.run(["umount", folder / "mount"], check=True)


def test_a_count_ends_at_its_budget_and_its_depth(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    for number in range(20):
        (folder / str(number)).write_bytes(b"x" * 4096)
    part = count(folder, space.Budget(entries=5))
    assert (part.whole, part.bytes) == (False, 5 * 4096)
    deep = tmp_path / "deep"
    deep.joinpath(*["d"] * 60).mkdir(parents=True)
    assert count(deep).whole is False
    times = iter([0.0, *[99.0] * 1000])
    slow = space.Budget(entries=300, seconds=10, clock=lambda: next(times))
    assert count(folder, slow).whole is True, "the clock is asked every 256 entries"
    assert slow.spent


# Accounting


def test_a_job_beyond_its_plan_is_found_told_once_and_found_again_below(tmp_path: Path) -> None:
    site = Site(tmp_path, quota="accounting", job_quota_gb=1)
    record = site.job(plan={"cache_gb": 1})
    assert record.quota["by"] == "accounting"
    record.quota["limit_bytes"] = 3 * MB
    site.write("7", 2)
    assert site.quotas.count() == []
    assert 2 * MB <= record.quota["used_bytes"] < 2.2 * MB
    site.write("7", 2, "checkpoint")
    (change,) = site.quotas.count()
    assert change.record is record
    assert change.text.startswith("it holds 0.00401 GB in the local cache, its limit is 0.003 GB")
    assert site.quotas.count() == [], "once"
    assert site.quotas.exceeded == 1
    (site.base / "temp/c1/7/file").unlink()
    (back,) = site.quotas.count()
    assert back.text == ""
    assert quota.described(record)["cache_limit"] == "0.003 GB, by accounting"
    assert "cache_exceeded" not in quota.described(record)


def test_a_plan_beats_the_sites_default_and_without_both_there_is_no_limit(tmp_path: Path) -> None:
    site = Site(tmp_path, job_quota_gb=5)
    assert site.job("1", {"cache_gb": 2}).quota["limit_bytes"] == 2 * 10**9
    assert site.job("2").quota["limit_bytes"] == 5 * 10**9
    assert site.quotas.allowance(site.store.get("1")) == 2 * 10**9
    none = Quotas(
        site.settings.model_copy(update={"job_quota_gb": None}), site.store, site.cache.holdings
    )
    free = site.job("3")
    none.begin(free)
    assert free.quota["limit_bytes"] == 0
    assert quota.described(free) == {}
    assert none.allowance(free) == 0


def test_a_user_beyond_his_limit_is_told_in_each_running_job(tmp_path: Path) -> None:
    site = Site(tmp_path, user_quota_gb=1)
    for job_id in ("1", "2"):
        site.job(job_id)
        site.store.get(job_id).quota["used_bytes"] = 600 * MB
    ended = site.job("3")
    ended.phase = ENDED
    other = site.job("4")
    other.uid = USER - 1
    site.quotas._in_turn = lambda: iter(())  # the figures stand
    changes = site.quotas.count()
    assert sorted(c.record.job_id for c in changes if c.text) == ["1", "2"]
    assert (
        "all jobs of its user hold 1.2 GB in the local cache, the limit is 1 GB" in changes[0].text
    )


def test_a_round_without_time_goes_on_where_it_stopped(tmp_path: Path) -> None:
    site = Site(tmp_path, quota="accounting")
    for job_id in ("1", "2", "3"):
        site.job(job_id)
        site.write(job_id, 1)

    class Once(space.Budget):
        """Enough for one job."""

        @property
        def spent(self) -> bool:
            return site.counted >= 1

    site.counted = 0
    real = site.quotas._count

    def counting(record, budget, *, by_hand):
        site.counted += 1
        real(record, budget, by_hand=by_hand)

    site.quotas._count = counting
    seen = []
    for _ in range(3):
        site.counted = 0
        site.quotas.count(Once())
        seen.append([r.job_id for r in site.store.all() if r.quota.get("used_bytes")])
    assert [len(jobs) for jobs in seen] == [1, 2, 3]


def test_off_counts_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, quota=False)
    record = site.job(plan={"cache_gb": 1})
    assert record.quota == {}
    assert site.quotas.count() == []
    assert quota.described(record) == {}


def test_a_record_damaged_by_hand_stops_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, quota="accounting", user_quota_gb=1)
    record = site.job()
    record.quota = {"project": "x", "limit_bytes": [], "used_bytes": None}
    assert site.quotas.count() == []
    site.quotas.end(record)


# Project quota


def test_a_job_gets_the_project_of_its_number_and_gives_it_back(tmp_path: Path, kernel) -> None:
    site = Site(tmp_path, mounted=True, project_ids="1000-1999")
    record = site.job("7", {"cache_gb": 1})
    assert (record.quota["by"], record.quota["project"]) == ("project", 1007)
    assert kernel.tags == [1007, 1007, 1007]
    assert kernel.projects == {1007: [0, 10**9]}
    site.quotas.end(record)
    assert kernel.projects[1007][1] == 10**9, "not while its folders are there"
    record.folders = {}
    site.quotas.end(record)
    site.quotas.end(record)
    assert (kernel.projects[1007][1], record.quota["project"]) == (0, 0)


def test_projects_of_others_are_left_to_them(tmp_path: Path, kernel) -> None:
    site = Site(tmp_path, mounted=True, project_ids="1000-1003")
    kernel.projects = {1003: [5 * MB, 0], 1000: [0, 77]}
    assert site.job("7").quota["project"] == 1001, "after 1003 in use, and 1000 with a limit"
    assert site.job("11").quota["project"] == 1002
    full = site.job("12")
    assert (full.quota["by"], full.quota.get("project")) == ("accounting", None)
    assert kernel.projects[1003] == [5 * MB, 0]


def test_a_restart_keeps_its_project(tmp_path: Path, kernel) -> None:
    site = Site(tmp_path, mounted=True, project_ids="1000-1999")
    before = site.job("7", {"cache_gb": 1})
    kernel.projects[1007][0] = 5 * MB
    again = JobRecord(
        job_id="7", uid=USER, gid=USER, cluster="c1", restarts=1, folders=before.folders
    )
    site.quotas.begin(again, before)
    assert again.quota["project"] == 1007


def test_what_a_user_has_left_limits_each_of_his_jobs(tmp_path: Path, kernel) -> None:
    site = Site(tmp_path, mounted=True, project_ids="1000-1999", user_quota_gb=1)
    one, two = site.job("1", {"cache_gb": 3}), site.job("2", {"cache_gb": 3})
    assert kernel.projects[1001][1] == 10**9
    kernel.projects[1001][0], kernel.projects[1002][0] = 300 * MB, 100 * MB
    site.quotas.count()
    left = 10**9 - one.quota["used_bytes"] - two.quota["used_bytes"]
    assert kernel.projects[1001][1] == one.quota["used_bytes"] + left
    assert kernel.projects[1002][1] == two.quota["used_bytes"] + left
    kernel.projects[1001][0] = 2 * 10**9
    site.quotas.count()
    assert kernel.projects[1002][1] > 0, "0 would be no limit at all"


def test_files_whose_project_was_changed_are_counted_by_hand(tmp_path: Path, kernel) -> None:
    site = Site(tmp_path, mounted=True, project_ids="1000-1999")
    record = site.job("7", {"cache_gb": 1})
    site.write("7", 3)  # the kernel, here, counts nothing of it
    site.quotas.count()
    assert record.quota["used_bytes"] >= 3 * MB


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EPERM, errno.ENOENT])
def test_a_file_system_that_refuses_leaves_accounting(tmp_path, kernel, code, caplog) -> None:
    site = Site(tmp_path, mounted=True)
    kernel.error = OSError(code, os.strerror(code))
    for job_id in ("7", "8"):
        assert site.job(job_id, {"cache_gb": 1}).quota["by"] == "accounting"
    assert caplog.text.count("couldn't use project quota") == 1


def test_only_limits_that_hold_are_believed() -> None:
    def mount(*options: str) -> Mount:
        return Mount("/dev/x", "xfs", frozenset(options))

    assert prjquota.is_enforced(mount("rw", "prjquota"))
    assert prjquota.is_enforced(mount("rw", "pquota"))
    assert not prjquota.is_enforced(mount("rw", "pqnoenforce"))
    assert not prjquota.is_enforced(mount("rw", "usrquota"))
    assert not prjquota.is_enforced(None)


def test_the_structures_have_the_kernels_sizes() -> None:
    assert (prjquota._FSXATTR.size, prjquota._DQUOT.size) == (28, 112)
    assert struct.calcsize("=bbHI6QiiHHbbbb3QiHh8x") == 112


def test_a_device_of_another_number_is_not_taken() -> None:
    with pytest.raises(OSError, match="no device file of /dev/null"):
        prjquota.device_of(Mount("/dev/null", "xfs", frozenset()), os.makedev(250, 250))


@pytest.mark.parametrize("text", ["5-1", "0-10", "1-99999999999", "x", "1-4294967295"])
def test_a_wrong_range_of_projects_is_refused(text: str) -> None:
    with pytest.raises((ValueError, CraterError)):
        CacheSettings.model_validate({"project_ids": text})
