"""A drive's benchmark: which folders it refuses, its jobs, its private folder, and fio for real."""

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
from crater_slurm.probe.bench.target import Target

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
PROFILE = NodeProfile(
    name="n1",
    cpu=Cpu(sockets=1, cores_per_socket=1),
    numa_nodes=(),
    nvmes=(Nvme(name="nvme0n1"), Nvme(name="nvme1n1")),
)


class Machine:
    """A /sys and /proc with one file system, mounted where the test's folder is."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.folder.mkdir()
        device = folder.stat().st_dev
        self.number = f"{os.major(device)}:{os.minor(device)}"
        (root / "sys/dev/block").mkdir(parents=True)
        (root / "proc/self").mkdir(parents=True)

    def block(self, path: str, **links: str) -> Path:
        """A block device's folder; ``links`` are the devices below it."""
        folder = self.root / "sys/devices" / path
        (folder / "slaves").mkdir(parents=True, exist_ok=True)
        for name, below in links.items():
            (folder / "slaves" / name).symlink_to(self.root / "sys/devices" / below)
        return folder

    def mounted(self, kind: str, source: str, block: Path | None, number: str = "") -> None:
        if block is not None:
            (self.root / "sys/dev/block" / self.number).symlink_to(block)
        line = f"9 1 {number or self.number} / {self.folder} rw - {kind} {source} rw"
        (self.root / "proc/self/mountinfo").write_text(f"1 1 0:1 / / rw - ext4 /dev/x rw\n{line}\n")

    def target(self, **options: bool) -> Target:
        return target.target(self.folder, self.root, **options)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root", tmp_path / "folder")


def test_a_partition_is_on_its_drive(machine: Machine) -> None:
    machine.block("pci/nvme/nvme0/nvme0n1")
    partition = machine.block("pci/nvme/nvme0/nvme0n1/nvme0n1p2")
    (partition / "partition").write_text("2\n")
    machine.mounted("xfs", "/dev/nvme0n1p2", partition)
    found = machine.target()
    assert (found.filesystem, found.drives, found.unfit) == ("xfs", ("nvme0n1",), None)
    assert nvme.place_in_profile(PROFILE, found) == ("nvmes[0]", None)


def test_lvm_on_md_on_partitions_is_on_all_their_drives(machine: Machine) -> None:
    for name in ("nvme0n1", "nvme1n1"):
        machine.block(f"pci/{name}")
        (machine.block(f"pci/{name}/{name}p1") / "partition").write_text("1\n")
    machine.block("virtual/md0", a="pci/nvme0n1/nvme0n1p1", b="pci/nvme1n1/nvme1n1p1")
    machine.mounted("ext4", "/dev/mapper/v", machine.block("virtual/dm-0", md0="virtual/md0"))
    found = machine.target()
    assert found.drives == ("nvme0n1", "nvme1n1")
    place, why = nvme.place_in_profile(PROFILE, found)
    assert place is None
    assert "nvme0n1, nvme1n1 carry the folder together" in (why or "")


def test_a_btrfs_subvolume_is_on_the_drives_of_its_file_system(machine: Machine) -> None:
    machine.block("pci/nvme1n1")
    devices = machine.root / "sys/fs/btrfs/uuid/devices"
    devices.mkdir(parents=True)
    (devices / "nvme1n1").symlink_to(machine.root / "sys/devices/pci/nvme1n1")
    # A subvolume's device number is no mount's.
    machine.mounted("btrfs", "/dev/nvme1n1", None, number="0:33")
    assert machine.target().drives == ("nvme1n1",)


@pytest.mark.parametrize(
    ("kind", "source"), [("tmpfs", "tmpfs"), ("nfs4", "server:/x"), ("overlay", "overlay")]
)
def test_what_is_on_no_local_drive_is_refused_and_never_in_a_profile(
    machine: Machine, kind: str, source: str
) -> None:
    machine.mounted(kind, source, None)
    with pytest.raises(CraterError, match=rf"is on {kind} \({source}\), which is no file system"):
        machine.target()
    allowed = machine.target(allow_any=True)
    assert nvme.place_in_profile(PROFILE, allowed) == (None, allowed.unfit)
    assert kind in (allowed.unfit or "")


def test_a_drive_that_the_profile_does_not_have_is_named() -> None:
    where = Target(folder=Path("/x"), filesystem="ext4", drives=("sda",))
    assert nvme.place_in_profile(PROFILE, where)[1] == "sda is no NVMe drive of the profile"


def test_links_files_devices_and_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    for name, words in (("link", "symbolic link"), ("file", "no folder"), ("none", "No such file")):
        with pytest.raises(CraterError, match=words):
            target.target(tmp_path / name, allow_any=True)


def test_a_device_is_refused_whatever_is_allowed() -> None:
    blocks = [p for p in Path("/dev").iterdir() if p.is_block_device() and not p.is_symlink()]
    if not blocks:
        pytest.skip("no block device in /dev")
    with pytest.raises(CraterError, match="is a device, and measuring one destroys"):
        target.target(blocks[0], allow_any=True)


def test_a_file_needs_its_size_and_five_percent_or_a_gib_beside_it() -> None:
    assert target.too_small(9216, 10_000, 8192) is None  # 1 GiB is more than 500 MiB
    assert target.too_small(9215, 10_000, 8192) is not None
    assert target.too_small(13_192, 100_000, 8192) is None  # 5 % are 5000 MiB
    why = target.too_small(13_191, 100_000, 8192)
    assert "13191 MiB are free, 8192 MiB for the file and 5000 MiB beside it" in (why or "")


def test_a_drive_that_others_use_is_refused_with_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "sys/class/block/nvme0n1/stat"
    stat.parent.mkdir(parents=True)
    stat.write_text("1 2 3 4 5 6 7 8 9 5000 11\n")
    after = ["1 2 3 4 5 6 7 8 9 5100 11\n", "1 2 3 4 5 6 7 8 9 5211 11\n"]
    monkeypatch.setattr(time, "sleep", lambda seconds: stat.write_text(after.pop(0)))
    assert target.busy(["nvme0n1"], tmp_path) is None  # 100 ms of a second
    why = target.busy(["nvme0n1"], tmp_path)  # 111 ms
    assert why is not None
    assert why.startswith("nvme0n1 was busy 11 % of a second")
    with pytest.raises(CraterError, match="how busy sda is"):
        target.io_ticks_ms("sda", tmp_path)


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


def test_the_private_folder_is_gone_whatever_happens(tmp_path: Path) -> None:
    with scratch.scratch(tmp_path, 4096) as inside:
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "data").stat().st_size == 4096
        assert os.fstat(inside).st_ino == folder.stat().st_ino
    with pytest.raises(KeyboardInterrupt), scratch.scratch(tmp_path, 4096):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_sigterm_ends_the_run_through_the_removal(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(scratch.TerminatedError, match="SIGTERM"), scratch.scratch(tmp_path, 4096):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_space_is_an_error_and_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(CraterError, match="can't write in"), scratch.scratch(tmp_path, 2**60):
        pass
    assert list(tmp_path.iterdir()) == []


def leftover(folder: Path, name: str = ".crater-bench-0123456789abcdef", mode: int = 0o700) -> Path:
    path = folder / name
    path.mkdir(mode=mode)
    path.chmod(mode)
    (path / "data").write_text("x")
    return path


def test_what_a_killed_run_left_is_removed_and_told(tmp_path: Path) -> None:
    path = leftover(tmp_path)
    (path / "iops_iops.3.log").write_text("")
    assert scratch.clean_leftovers(tmp_path) == [f"removed {path}, left by a run that was killed"]
    assert list(tmp_path.iterdir()) == []


def test_what_only_looks_like_a_leftover_stays(tmp_path: Path) -> None:
    strange = leftover(tmp_path)
    (strange / "thesis.tex").write_text("")
    opened = leftover(tmp_path, ".crater-bench-1123456789abcdef", 0o755)
    other = leftover(tmp_path, ".crater-bench-old")
    valued = tmp_path / "valued"
    valued.mkdir()
    (valued / "data").write_text("")
    link = tmp_path / ".crater-bench-2123456789abcdef"
    link.symlink_to(valued)
    told = scratch.clean_leftovers(tmp_path)
    assert [line.rpartition(": ")[2] for line in told] == [
        "it holds 'thesis.tex'",
        "it belongs to another user, or others may enter it",
        "it is no folder",
    ]
    assert all(
        p.exists() for p in (strange / "data", opened / "data", other, valued / "data", link)
    )


def test_a_link_inside_a_leftover_goes_and_what_it_points_to_stays(tmp_path: Path) -> None:
    valued = tmp_path / "valued"
    valued.write_text("x")
    path = leftover(tmp_path)
    (path / "data").unlink()
    (path / "data").symlink_to(valued)
    scratch.clean_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [valued]


def test_a_link_is_no_place_for_the_private_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with (
        pytest.raises(CraterError, match="can't open the folder"),
        scratch.scratch(tmp_path / "link", 1),
    ):
        pass


def test_one_benchmark_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "run" / "bench.lock"
    busy = pytest.raises(CraterError, match="another crater-probe bench runs")
    with lock.lock(file), busy, lock.lock(file):
        pass
    with lock.lock(file):
        pass
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(CraterError, match="can't open the lock"), lock.lock(tmp_path / "link"):
        pass


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
    with pytest.raises(CraterError, match="SIGKILL|with any engine"):
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
