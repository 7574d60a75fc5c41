"""Peaks of running jobs: what is counted as need, whose GPU memory it is, and who is told when."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from node_fakes import FakeTree, ask, make_proc, make_sys, settings, signed, wait_for

from crater_slurm.node import job_io, peaks, upkeep, usage
from crater_slurm.node.gpu_share import GpuShare, Holder, Owners, shares
from crater_slurm.node.job_io import Io, IoMeter
from crater_slurm.node.main import Daemon
from crater_slurm.node.observe import Observer
from crater_slurm.node.peaks import Peaks, PeakStore, Sample
from crater_slurm.node.server import dispatch
from crater_slurm.node.services import Roots, Services
from crater_slurm.node.upkeep import Loop
from crater_slurm.node.usage import Usage
from crater_slurm.probe.health.gpu_use import GpuProcess, GpuUse

MIB = 2**20
STAT = f"""\
anon {300 * MIB}
file {5000 * MIB}
kernel {20 * MIB}
shmem {40 * MIB}
slab_reclaimable {12 * MIB}
inactive_file {4900 * MIB}
"""


def cgroup(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


# The cgroup


def test_page_cache_is_no_need(tmp_path: Path) -> None:
    folder = cgroup(
        tmp_path,
        memory__stat=STAT,
        memory__current=f"{5320 * MIB}\n",
        memory__peak=f"{5500 * MIB}\n",
        memory__events="low 0\nhigh 0\nmax 9\noom 1\noom_kill 2\n",
        cpu__stat="usage_usec 7500000\nuser_usec 7000000\n",
    )
    # anon 300 + shmem 40 + kernel 20 less 12 that it would drop
    assert usage.read(folder) == Usage(348 * MIB, 5500 * MIB, 2, 7.5)


def test_an_older_kernel_tells_parts_and_no_peak_and_swap_is_need(tmp_path: Path) -> None:
    folder = cgroup(
        tmp_path,
        memory__stat=f"anon {100 * MIB}\nkernel_stack {MIB}\npagetables {2 * MIB}\n"
        f"percpu {MIB}\nslab_reclaimable {50 * MIB}\nslab_unreclaimable {3 * MIB}\n",
        memory__current=f"{160 * MIB}\n",
        memory__swap__current=f"{10 * MIB}\n",
    )
    assert usage.read(folder) == Usage(117 * MIB, 160 * MIB, None, None)


def test_a_cgroup_that_is_gone_or_damaged_tells_nothing(tmp_path: Path) -> None:
    assert usage.read(tmp_path / "gone") == Usage()
    damaged = cgroup(tmp_path / "job", memory__stat="anon\nanon x\n-1", memory__peak="max")
    assert usage.read(damaged) == Usage()


# Drives


def test_io_is_told_between_looks_and_since_the_start_at_the_first(tmp_path: Path) -> None:
    meter = IoMeter(tmp_path / "proc", tmp_path / "sys")
    folder = cgroup(tmp_path / "job", io__stat="259:0 rbytes=1000 wbytes=20 rios=3 wios=1\n")
    assert meter.advance("7", folder, first=True) == Io(1000, 20, 4)
    cgroup(folder, io__stat="259:0 rbytes=1500 wbytes=20 rios=5 wios=1 dbytes=0 dios=0\n")
    assert meter.advance("7", folder, first=False) == Io(500, 0, 2)
    assert meter.advance("7", folder, first=False) == Io(0, 0, 0)


def test_after_a_restart_the_first_look_only_begins(tmp_path: Path) -> None:
    folder = cgroup(tmp_path / "job", io__stat="259:0 rbytes=9000 wbytes=20 rios=3 wios=1\n")
    meter = IoMeter(tmp_path, tmp_path)
    assert meter.advance("7", folder, first=False) is None
    assert meter.advance("7", folder, first=False) == Io(0, 0, 0)
    meter.keep([])
    assert meter.advance("7", folder, first=False) is None, "the job was forgotten"


def test_a_device_on_others_does_not_count_twice(tmp_path: Path) -> None:
    (tmp_path / "sys/dev/block/253:0/slaves/nvme0n1").mkdir(parents=True)
    (tmp_path / "sys/dev/block/7:0/loop").mkdir(parents=True)
    (tmp_path / "sys/dev/block/259:0/slaves").mkdir(parents=True)
    lines = [f"{device} rbytes=100 wbytes=1 rios=1 wios=0" for device in ("253:0", "259:0", "7:0")]
    folder = cgroup(tmp_path / "job", io__stat="\n".join(lines) + "\n")
    meter = IoMeter(tmp_path / "proc", tmp_path / "sys")
    assert meter.advance("7", folder, first=True) == Io(100, 1, 1)


def process(proc: Path, pid: int, read: int = 0, written: int = 0, group: str = "") -> None:
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    text = f"rchar: 99999\nwchar: 1\nread_bytes: {read}\nwrite_bytes: {written}\n"
    (proc / str(pid) / "io").write_text(text)
    (proc / str(pid) / "cgroup").write_text(f"0::{group}\n")


def test_without_the_io_controller_the_processes_are_summed(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    folder = cgroup(tmp_path / "job", cgroup__procs="")
    task = cgroup(folder / "step_0/user/task_0", cgroup__procs="11\n12\n")
    process(proc, 11, read=100, written=5)
    process(proc, 12, read=50)
    meter = IoMeter(proc, tmp_path)
    assert meter.advance("7", folder, first=True) == Io(150, 5, None)
    cgroup(task, cgroup__procs="11\n13\n")
    process(proc, 11, read=160, written=5)
    process(proc, 13, read=7)
    assert meter.advance("7", folder, first=False) == Io(67, 0, None)
    process(proc, 11, read=3)  # another process with the number of the first
    assert meter.advance("7", folder, first=False) == Io(3, 0, None)


def test_neither_controller_nor_processes_is_unknown(tmp_path: Path) -> None:
    assert IoMeter(tmp_path, tmp_path).advance("7", tmp_path / "gone", first=True) is None


def test_a_job_of_endless_cgroups_costs_a_bounded_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_io, "_MOST_FOLDERS", 5)
    monkeypatch.setattr(job_io, "_MOST_PROCESSES", 8)
    for i in range(20):
        cgroup(tmp_path / f"g{i}", cgroup__procs="1\n2\n3\n")
    assert len(job_io.processes(tmp_path)) == 8


# GPUs


def use(uuid: str = "GPU-0", **more: Any) -> GpuUse:
    fields: dict[str, Any] = {
        "memory_used_mib": 20_000,
        "memory_total_mib": 40_960,
        "utilization_percent": 80.0,
        "processes": (),
    }
    return GpuUse(uuid, **fields | more)


MINE = Holder(("job_7",), frozenset({"GPU-0"}), whole=True)
OWNERS = {11: "job_7", 12: "job_7", 21: "job_8"}.get


def one(gpu: GpuUse, holder: Holder = MINE) -> GpuShare | None:
    found = shares([gpu], holder, OWNERS)
    return found[0] if found else None


def test_memory_is_that_of_the_job_s_processes() -> None:
    gpu = use(processes=(GpuProcess(11, 6000), GpuProcess(12, 500), GpuProcess(99, 300)))
    assert one(gpu) == GpuShare("GPU-0", 6500, 40_960, 80.0)


def test_where_the_driver_hides_processes_a_whole_gpu_is_the_job_s() -> None:
    assert one(use(processes=None)) == GpuShare("GPU-0", 20_000, 40_960, 80.0)
    hidden = use(processes=(GpuProcess(11, None),))
    assert one(hidden) == GpuShare("GPU-0", 20_000, 40_960, 80.0)


def test_a_neighbour_s_memory_is_never_counted() -> None:
    both = use(processes=(GpuProcess(11, None), GpuProcess(21, None)))
    assert one(both) == GpuShare("GPU-0", None, 40_960, None)
    shared = Holder(("job_7",), frozenset({"GPU-0"}), whole=False)
    assert one(use(processes=None), shared) == GpuShare("GPU-0", None, 40_960, None)
    only_theirs = use(processes=(GpuProcess(21, 9000),))
    assert one(only_theirs) == GpuShare("GPU-0", None, 40_960, None)


def test_on_a_shared_gpu_the_job_s_processes_tell_its_utilization() -> None:
    mine = GpuProcess(11, 6000, 30.0), GpuProcess(12, 10, 5.0)
    gpu = use(processes=(*mine, GpuProcess(21, 9000, 60.0)))
    assert one(gpu) == GpuShare("GPU-0", 6010, 40_960, 35.0)


def test_a_gpu_that_is_not_the_job_s_counts_only_by_its_processes() -> None:
    assert one(use("GPU-5")) is None
    stray = use("GPU-5", processes=(GpuProcess(11, 70),))
    assert one(stray) == GpuShare("GPU-5", 70, 40_960, None)


def test_with_mig_numbers_name_instances_and_only_processes_tell() -> None:
    """Slurm's index 0 may be an instance on any card, also one that lies beside other jobs'."""
    cards = [use("GPU-0", processes=()), use("GPU-1", mig=True, processes=(GpuProcess(11, 4000),))]
    assert shares(cards, MINE, OWNERS) == (GpuShare("GPU-1", 4000, None, None),)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", "job_7"),
        ("0::/system.slice/n1_slurmstepd.scope/s1A2B/step_batch", "s1A2B"),
        ("0::/system.slice/slurmstepd.scope/system", None),
        ("0::/user.slice/user-1000.slice/job_7", None),
        ("4:memory:/slurm/uid_1000/job_7/step_0\n0::/", "job_7"),
        ("", None),
    ],
)
def test_a_process_belongs_to_the_job_whose_cgroup_it_is_in(
    tmp_path: Path, text: str, name: str | None
) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5/cgroup").write_text(text + "\n")
    owners = Owners(tmp_path)
    assert owners(5) == name
    assert owners(6) is None


# Peaks


def test_peaks_only_grow_and_means_are_means() -> None:
    found = Peaks("7", started=1000.0)
    first = Usage(300 * MIB, 900 * MIB, 0, 15.0)
    gpus = (GpuShare("a", 9000, 40_960, 100.0), GpuShare("b", 17_600, 40_960, 50.0))
    found.add(Sample(1010.0, first, Io(50_000_000, 0, 1000), gpus))
    second = Usage(200 * MIB + 1, 900 * MIB, 0, 60.0)
    found.add(
        Sample(1040.0, second, Io(30_000_000, 60_000_000, 30), (GpuShare("b", 100, 1, 51.0),))
    )
    assert found.figures() == {
        "host_memory_peak_mib": 300,
        "host_memory_total_peak_mib": 900,
        "gpu_memory_peak_mib": 17_600,
        "gpu_memory_size_mib": 1,
        "cpu_cores_mean": 1.5,  # 60 s of CPU in 40 s
        "gpu_utilization_mean_percent": 63.0,  # of 75 and 51
        "gpu_utilization_max_percent": 75.0,
        "gpu_utilization_recent_percent": 63.0,
        "ssd_read_mb_s_peak": 5.0,  # 50 MB in the first 10 s
        "ssd_write_mb_s_peak": 2.0,
        "ssd_read_mb_s_mean": 2.0,  # 80 MB in 40 s
        "ssd_write_mb_s_mean": 1.5,
        "ssd_iops_peak": 100.0,
    }


def test_what_was_never_seen_is_not_said() -> None:
    found = Peaks("7", started=0.0)
    found.add(Sample(30.0, Usage(cpu_seconds=3.0)))
    assert found.figures() == {"cpu_cores_mean": 0.1}


def test_a_clock_that_is_set_back_makes_no_rate() -> None:
    found = Peaks("7", started=1000.0)
    found.add(Sample(1010.0, Usage(), Io(10_000_000, 0)))
    found.add(Sample(900.0, Usage(), Io(10_000_000, 0)))
    assert found.figures()["ssd_read_mb_s_peak"] == 1.0
    assert found.time == 1010.0


def test_peaks_survive_a_restart_and_damage_costs_one_job(tmp_path: Path) -> None:
    store = PeakStore(tmp_path / "peaks")
    kept = store.of("7", 1000.0)
    kept.add(Sample(1030.0, Usage(5 * MIB), Io(1, 1), (GpuShare("a", 3, 4, 5.0),)))
    store.save(kept)
    for name, text in {
        "8.json": "{", "9.json": "[]", "10.json": '{"job_id": "11", "started": 1.0}',
        "12.json": '{"job_id": "12", "started": "x"}', ".13.tmp": "x",
    }.items():  # fmt: skip
        (tmp_path / "peaks" / name).write_text(text)
    again = PeakStore(tmp_path / "peaks")
    assert again.all() == [kept]
    assert os.listdir(tmp_path / "peaks") == ["7.json"]
    assert again.of("7", 1000.0) == kept
    assert again.of("7", 2000.0).samples == 0, "another run of the job has peaks of its own"
    again.drop("7")
    assert os.listdir(tmp_path / "peaks") == []


def test_a_full_disk_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    store = PeakStore(tmp_path)
    monkeypatch.setattr(peaks, "write_atomically", full)
    store.save(store.of("7", 1.0))
    assert "couldn't save those of job 7: No space left" in caplog.text


# The observer


class Spool(list[dict[str, Any]]):
    away = False

    def send(self, report: dict[str, Any]) -> None:
        self.append(json.loads(json.dumps(report)))

    def waits(self) -> bool:
        return self.away


class Gpus:
    def __init__(self) -> None:
        self.told: tuple[GpuUse, ...] = ()
        self.problem = ""
        self.asked = 0

    def sample(self) -> tuple[GpuUse, ...]:
        self.asked += 1
        return self.told

    def close(self) -> None:
        pass


class Site:
    """A node with a fake tree and an observer whose clock only the test moves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = FakeTree(folder / "cgroup")
        make_sys(folder / "sys", {0: ("0-7", 2048)})
        make_proc(folder / "proc", 1, 0, "0-7")
        gpus = [{"index": i, "uuid": f"GPU-{i}", "numa_node": 0} for i in range(4)]
        (folder / "profile.json").write_text(json.dumps({"gpus": gpus}))
        self.spool, self.gpus, self.now = Spool(), Gpus(), 0.0
        self.start()

    def start(self) -> None:
        roots = Roots(self.folder / "proc", self.folder / "sys")
        self.services = Services(settings(self.folder, sample_seconds=30), roots)
        upkeep.recover(self.services)
        self.observer = Observer(self.services, self.spool, self.gpus, lambda: self.now)  # type: ignore[arg-type]

    def hook(self, operation: str, **env: str) -> None:
        answer = dispatch(self.services, ask(operation, **env))
        assert answer.status == "ok", answer.logs

    def job(self, job_id: str = "7", indexes: str = "", **plan: Any) -> Path:
        """A job from its Prolog to its first task; its cgroup."""
        more = {"SLURM_JOB_GPUS": indexes} if indexes else {}
        comment = signed(id=f"p{job_id}", **plan)
        self.hook("prolog", SLURM_JOB_ID=job_id, SLURM_JOB_COMMENT=comment, **more)
        record = self.services.store.get(job_id)
        assert record is not None
        self.now = record.started
        self.tree.run_job(f"job_{job_id}", 1000, "0-3")
        return self.tree.scope / f"job_{job_id}"

    def look(self, seconds: float = 30) -> None:
        self.now += seconds
        self.observer.round()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    if os.geteuid() != 0:
        pytest.skip("prepares jobs of others, so it needs root")
    return Site(tmp_path)


def test_a_job_is_watched_and_its_peaks_reported_at_its_end(site: Site) -> None:
    folder = site.job()
    cgroup(folder, memory__stat=STAT, cpu__stat="usage_usec 60000000\n")
    site.look()
    cgroup(folder, memory__stat=f"anon {100 * MIB}\n", cpu__stat="usage_usec 90000000\n")
    site.look()
    assert site.spool == []
    site.hook("epilog", SLURM_JOB_EXIT_CODE2="0:0")
    site.observer.round()
    (report,) = site.spool
    record = site.services.store.get("7")
    assert record is not None
    assert report | {"time": 0, "seconds": 0} == {
        "job_id": "7",
        "plan_id": "p7",
        "node": "n1",
        "time": 0,
        "seconds": 0,
        "ended": True,
        "succeeded": True,
        "oom_kills": 0,
        "samples": 2,
        "gpus": 0,
        "figures": {"host_memory_peak_mib": 348, "cpu_cores_mean": 1.5},
    }
    assert report["seconds"] == pytest.approx(60, abs=0.01)
    assert os.listdir(site.folder / "state/peaks") == []
    site.look()
    assert len(site.spool) == 1, "an end is told once"


@pytest.mark.parametrize(
    ("code", "succeeded", "kills"),
    [("1:0", False, 0), ("0:125", False, 1), (None, None, 0), ("x", None, 0), ("0:0", True, 0)],
)
def test_how_a_job_ended_is_told_as_far_as_slurm_says(
    site: Site, code: str | None, succeeded: bool | None, kills: int
) -> None:
    cgroup(site.job(), memory__stat=STAT)
    site.look()
    site.hook("epilog", **({} if code is None else {"SLURM_JOB_EXIT_CODE2": code}))
    site.observer.round()
    (report,) = site.spool
    assert (report.get("succeeded"), report["oom_kills"]) == (succeeded, kills)


def test_a_running_job_is_reported_every_tenth_look_while_reports_are_taken(site: Site) -> None:
    for name in ("7", "8"):
        cgroup(site.job(name), memory__stat=STAT)
    for _ in range(10):
        site.look()
    assert [(r["job_id"], r["ended"], r["samples"]) for r in site.spool] == [
        ("7", False, 10),
        ("8", False, 10),
    ]
    site.spool.away = True
    for _ in range(10):
        site.look()
    assert len(site.spool) == 2, "reports of running jobs do not pile up"
    site.hook("epilog", SLURM_JOB_ID="8")
    site.observer.round()
    assert site.spool[2]["ended"] is True, "the last one is kept for the scheduler"


def test_recent_utilization_is_that_since_the_last_report(site: Site) -> None:
    site.job(indexes="1", gpus=1)
    for busy in (90.0, 10.0):
        site.gpus.told = (use("GPU-1", processes=None, utilization_percent=busy),)
        for _ in range(10):
            site.look()
    seen = [
        (
            report["figures"]["gpu_utilization_mean_percent"],
            report["figures"]["gpu_utilization_recent_percent"],
        )
        for report in site.spool
    ]
    assert seen == [(90.0, 90.0), (50.0, 10.0)]
    assert site.spool[0]["gpus"] == 1
    assert site.spool[0]["figures"]["gpu_memory_peak_mib"] == 20_000


def test_the_driver_is_asked_only_while_a_job_has_gpus(site: Site) -> None:
    cgroup(site.job(), memory__stat=STAT)
    site.look()
    assert site.gpus.asked == 0


def test_two_jobs_on_one_gpu_are_told_apart_or_not_at_all(site: Site) -> None:
    for name in ("7", "8"):
        site.hook(
            "prolog",
            SLURM_JOB_ID=name,
            SLURM_JOB_COMMENT=signed(id=f"p{name}", gpus=1),
            SLURM_JOB_GPUS="0",
        )
        cgroup(site.tree.scope / f"job_{name}", memory__stat=STAT)
    site.now = 2e9
    scope = f"/system.slice/{site.tree.scope.name}"
    process(site.folder / "proc", 11, group=f"{scope}/job_7/step_0")
    process(site.folder / "proc", 21, group=f"{scope}/job_8/step_0")
    site.gpus.told = (use(processes=(GpuProcess(11, 6000, 20.0), GpuProcess(21, None))),)
    site.look()
    figures = {p.job_id: p.figures() for p in site.observer._peaks.all()}
    assert figures["7"]["gpu_memory_peak_mib"] == 6000
    assert figures["7"]["gpu_utilization_mean_percent"] == 20.0
    assert "gpu_memory_peak_mib" not in figures["8"]


def test_a_restart_forgets_no_peak_and_tells_of_ends_that_it_missed(site: Site) -> None:
    folder = site.job()
    cgroup(folder, memory__stat=STAT)
    site.look()
    site.start()
    cgroup(folder, memory__stat=f"anon {MIB}\n")
    site.look()
    site.hook("epilog", SLURM_JOB_EXIT_CODE2="0:0")
    site.start()  # it died between the Epilog and the report
    site.observer.round()
    (report,) = site.spool
    assert report["figures"]["host_memory_peak_mib"] == 348
    assert report["samples"] == 2


def test_a_requeued_job_begins_anew(site: Site) -> None:
    cgroup(site.job(), memory__stat=STAT)
    site.look()
    site.hook("epilog", SLURM_JOB_EXIT_CODE2="0:15")
    site.hook("prolog", SLURM_JOB_COMMENT=signed(id="p7"), SLURM_JOB_RESTART_COUNT="1")
    cgroup(site.tree.scope / "job_7", memory__stat=f"anon {MIB}\n")
    site.look()
    assert [(r["ended"], r.get("succeeded")) for r in site.spool] == [(True, None)]
    (now,) = site.observer._peaks.all()
    assert (now.samples, now.need_mib) == (1, 1)


def test_an_early_call_reports_ends_but_does_not_look(site: Site) -> None:
    cgroup(site.job(), memory__stat=STAT)
    site.look()
    site.look(1)
    assert site.observer._peaks.all()[0].samples == 1
    site.look(-3600)
    assert site.observer._peaks.all()[0].samples == 2, "a clock set back stops nothing"


def test_several_slurmd_on_one_machine_have_a_scope_each(site: Site) -> None:
    cgroup(site.job(), memory__stat=STAT)
    other = cgroup(site.tree.root / "system.slice/a0_slurmstepd.scope/job_7")
    cgroup(other, memory__stat=f"anon {9999 * MIB}\n")
    site.look()
    assert site.observer._peaks.all()[0].need_mib == 348


def test_a_job_that_nothing_can_be_seen_of_is_not_reported(site: Site) -> None:
    comment = signed(id="p7")
    site.hook("prolog", SLURM_JOB_COMMENT=comment)
    site.look()
    site.hook("epilog")
    site.observer.round()
    assert site.spool == []


def test_a_hanging_driver_holds_up_no_hook(site: Site) -> None:
    gone = threading.Event()
    hangs = threading.Event()

    class Hanging(Gpus):
        def sample(self) -> tuple[GpuUse, ...]:
            hangs.set()
            gone.wait(30)
            return ()

    site.observer = Observer(site.services, site.spool, Hanging(), lambda: site.now)  # type: ignore[arg-type]
    loop = Loop("observe", 30, site.observer.round)
    site.hook("prolog", SLURM_JOB_COMMENT=signed(id="p7", gpus=1), SLURM_JOB_GPUS="0")
    loop.start()
    try:
        assert hangs.wait(5)
        site.hook("epilog")
        record = site.services.store.get("7")
        assert record is not None
        assert record.phase == "ended"
    finally:
        gone.set()
        assert wait_for(lambda: loop.stop())


# The daemon round it


def test_the_daemon_reports_an_end_soon_after_its_epilog(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("prepares jobs of others, so it needs root")
    site = Site(tmp_path)
    (tmp_path / "run").mkdir(exist_ok=True)
    daemon = Daemon(site.services)
    assert daemon._observer is not None
    daemon._observer._spool = site.spool  # type: ignore[assignment]
    cgroup(site.job(), memory__stat=STAT)
    daemon.start()
    try:
        kept = tmp_path / "state/peaks/7.json"
        assert wait_for(kept.exists), "it looks at once, and then every half minute"
        answer = daemon._handle(ask("epilog", SLURM_JOB_EXIT_CODE2="0:0"))
        assert site.spool == [], "nothing of it is done before slurmd has its answer"
        for work in answer.afterwards:
            work()
        assert wait_for(lambda: len(site.spool) == 1, 10)
    finally:
        daemon.stop()
    assert site.spool[0]["figures"]["host_memory_peak_mib"] == 348
    assert not kept.exists()


def test_a_site_may_switch_it_off(tmp_path: Path) -> None:
    services = Services(settings(tmp_path, observe=False, report=True))
    assert services.observed is None
    daemon = Daemon(services)
    assert daemon._observer is None
    assert not (tmp_path / "state/peaks").exists()
    assert Services(settings(tmp_path, report=True)).observed is not None
