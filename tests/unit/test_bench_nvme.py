"""A drive's benchmark: its jobs, its figures, and fio for real."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import Cpu, NodeProfile, Nvme
from crater_slurm.probe.bench import jobs, lock, nvme, scratch, target
from crater_slurm.probe.bench.nvme import NvmeOptions
from crater_slurm.probe.tools.fio import FioDirection, FioJob

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
PROFILE = NodeProfile(
    name="n1",
    cpu=Cpu(sockets=1, cores_per_socket=1),
    numa_nodes=(),
    nvmes=(Nvme(name="nvme0n1"), Nvme(name="nvme1n1")),
)


def test_the_job_file_of_a_random_read() -> None:
    job = {job.name: job for job in jobs.jobs("crater", 20, 3)}["read"]
    assert jobs.job_file(job, "io_uring", 8192).splitlines() == [
        "[read]",
        *("filename=data", "allow_file_create=0", "ioengine=io_uring", "direct=1", "size=8192m"),
        *("thread=1", "rw=randread", "bs=4k", "iodepth=64", "numjobs=4", "time_based=1"),
        *("runtime=20", "ramp_time=3", "group_reporting=1", "randrepeat=0", "norandommap=1"),
        *("write_iops_log=iops", "log_avg_msec=1000"),
    ]


def test_latency_is_at_depth_one_and_the_mix_is_70_to_30() -> None:
    every = {job.name: job for job in jobs.jobs("crater", 5, 1)}
    assert list(every) == ["latency", "read", "mixed", "write", "seqwrite", "seqread"]
    assert (every["latency"].iodepth, every["latency"].numjobs) == (1, 1)
    assert "rwmixread=70" in jobs.job_file(every["mixed"], "libaio", 64)
    assert (every["seqwrite"].rw, every["seqwrite"].block) == ("write", "1M")


def test_seed_is_one_random_write_at_64_times_4() -> None:
    (job,) = jobs.jobs("seed", 120, 3)
    assert (job.rw, job.block, job.iodepth, job.numjobs) == ("randwrite", "4k", 64, 4)
    assert (job.seconds, job.ramp_seconds) == (120, 0)


@pytest.mark.parametrize(
    ("level", "uid", "allowed"),
    [(None, 5, True), ("0", 5, True), ("1", 5, False), ("1", 0, True), ("2", 0, False)],
)
def test_io_uring_is_used_where_the_kernel_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str | None, uid: int, allowed: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(os, "getgroups", lambda: [7])
    folder = tmp_path / "proc/sys/kernel"
    folder.mkdir(parents=True)
    if level is not None:
        (folder / "io_uring_disabled").write_text(level + "\n")
        (folder / "io_uring_group").write_text("-1\n")
    first = "io_uring" if allowed else "libaio"
    assert jobs.engines("Available IO engines:\n\tlibaio\n\tio_uring\n", tmp_path)[0] == first
    if level == "1":
        (folder / "io_uring_group").write_text("7\n")
        assert jobs.io_uring_allowed(tmp_path)


def test_without_a_better_engine_there_is_psync() -> None:
    assert jobs.engines("Available IO engines:\n\tnull\n") == ("psync",)


def direction(iops: float, mb_s: float, clat_us: float) -> FioDirection:
    return FioDirection(
        total_ios=9, io_bytes=9, iops=iops, bandwidth_mb_s=mb_s, clat_mean_us=clat_us
    )


@pytest.mark.parametrize(
    ("name", "value", "unit", "field"),
    [
        ("latency", 3.0, "µs", "read_latency_us"),
        ("read", 100, "IOPS", "random_read_iops"),
        ("mixed", 300, "IOPS", None),
        ("write", 200, "IOPS", "random_write_iops"),
        ("seqwrite", 20.0, "MB/s", "sequential_write_mb_s"),
        ("seqread", 10.0, "MB/s", None),
    ],
)
def test_each_job_has_its_own_value_and_psync_only_depth_one(
    name: str, value: float, unit: str, field: str | None
) -> None:
    job = {job.name: job for job in jobs.jobs("crater", 20, 3)}[name]
    report = FioJob(name=name, read=direction(100, 10, 3), write=direction(200, 20, 4))
    run = nvme._Bench(
        program="fio",
        engine="psync",
        inside=0,
        lock=0,
        options=NvmeOptions(),
        unfit=None,
        prefix="nvmes[1]",
        drive="nvme1n1",
    )
    found = nvme._figure(run, job, report, [90.0, 110.0], 23.5)
    assert (found.value, found.unit) == (value, unit)
    assert found.path == (f"nvmes[1].{field}" if field else None)
    assert bool(found.unfit) == (name != "latency")
    assert found.method.endswith("20 s, 8192 MiB file; IOPS of seconds 90 to 110")


def test_stability_is_p1_over_p99_of_the_seconds() -> None:
    assert nvme.stability([100.0] * 10) == 1
    # 101 values from 0 to 100: p1 = 1, p99 = 99
    assert nvme.stability(list(range(101))) == pytest.approx(1 / 99)
    assert nvme.stability([1.0, 2.0]) is None
    assert nvme.stability([0.0] * 10) is None


@pytest.mark.parametrize(("low", "warns"), [(69.0, True), (70.0, False), (85.0, False)])
def test_the_least_steady_job_counts_and_below_0_7_warns(low: float, warns: bool) -> None:
    samples = {"read": [100.0] * 20, "write": [low] * 10 + [100.0] * 10}
    found = nvme.stability_figure(samples, "nvmes[1]", None, "nvme1n1")
    assert found.value == pytest.approx(low / 100)
    assert found.path == "nvmes[1].iops_stability_ratio"
    assert "20 one-second samples of write" in found.method
    assert bool(found.warnings) == warns
    assert found.for_profile


def test_a_few_samples_are_shown_and_kept_out_of_the_profile() -> None:
    found = nvme.stability_figure({"read": [90.0, 100.0, 100.0]}, "nvmes[0]", None, "x")
    assert found.value is not None
    assert not found.for_profile
    assert nvme.stability_figure({"read": [1.0]}, "nvmes[0]", None, "x").refused


def measured(folder: Path, **options: object) -> dict[str, nvme.Measurement]:
    small = {"seconds": 1, "ramp_seconds": 0, "file_mib": 16, "allow_noise": True, **options}
    where = target.target(folder, allow_any=True)
    steps: list[str] = []
    with lock.lock(folder / "lock") as handle:
        found = nvme.bench(
            PROFILE, where, NvmeOptions(**small), handle, lambda what, _: steps.append(what)  # type: ignore[arg-type]
        )  # fmt: skip
    assert steps[0] == "fill the file once with random data"
    return {item.what.partition(" of ")[0]: item for item in found}


@needs_fio
def test_fio_for_real_fills_all_figures_and_leaves_nothing(tmp_path: Path) -> None:
    found = measured(tmp_path)
    units = {name: item.unit for name, item in found.items() if not item.refused}
    assert units == {
        "random read latency": "µs",
        **dict.fromkeys(("random read", "random 70/30 mix", "random write"), "IOPS"),
        **dict.fromkeys(("sequential write", "sequential read"), "MB/s"),
    }
    assert all(item.value and item.value > 0 for item in found.values() if not item.refused)
    assert "one-second samples" in (found["IOPS stability"].refused or "")
    assert not any(item.for_profile for item in found.values())
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]


@needs_fio
def test_fio_that_is_killed_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subprocess.Popen.communicate

    def killed(self: subprocess.Popen[str], *args: object, **options: object) -> object:
        if "--output-format=json" in self.args:  # type: ignore[operator]
            os.kill(self.pid, signal.SIGKILL)
        return real(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(subprocess.Popen, "communicate", killed)
    with pytest.raises(CraterError, match="with any engine: .*SIGKILL"):
        measured(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]


SCRIPT = """
import sys
from pathlib import Path
from crater_slurm.model.profile import Cpu, NodeProfile
from crater_slurm.probe.bench import lock, nvme, target
folder = Path(sys.argv[1])
options = nvme.NvmeOptions(seconds=60, ramp_seconds=0, file_mib=16, allow_noise=True)
profile = NodeProfile(name="n1", cpu=Cpu(sockets=1, cores_per_socket=1), numa_nodes=())
with lock.lock(folder / "lock") as handle:
    say = lambda what, seconds: print(what, flush=True)
    nvme.bench(profile, target.target(folder, allow_any=True), options, handle, say)
"""


@needs_fio
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_killed_takes_fio_along_and_the_next_start_cleans_up(
    tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdout is not None
        while "latency" not in child.stdout.readline():
            pass
        time.sleep(1)
        child.send_signal(number)
    # The lock is held by fio too: it is free only when fio has ended.
    for _ in range(50):
        try:
            with lock.lock(tmp_path / "lock"):
                break
        except CraterError:
            time.sleep(0.1)
    else:
        pytest.fail("fio lives on")
    told = scratch.clean_leftovers(tmp_path)
    assert len(told) == (number is signal.SIGKILL)
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]
