"""Large files beside the cache are seen in /proc, told once, and nothing else is looked at."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_fakes import USER, settings, wait_for

from crater_slurm.config.checkpoints import Checkpoints
from crater_slurm.node import direct_writes, observe
from crater_slurm.node.direct_writes import DirectWriteWatch, sentence
from crater_slurm.node.jobs import JobRecord
from crater_slurm.node.proc_mounts import MountPoint, fs_path, local_disk, mount_points
from crater_slurm.node.services import Roots, Services

MB = 10**6
MOUNTS = """\
20 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
21 20 8:2 /sub /data rw - xfs /dev/nvme0n1 rw,prjquota
22 20 0:40 / /home rw - nfs4 server:/home rw,vers=4.2
23 20 0:41 / /dev/shm rw - tmpfs shm rw
24 20 0:42 / /run/containers/a rw - overlay overlay rw,upperdir=/data/up,workdir=/data/work
25 20 0:43 / /run/containers/b rw - overlay overlay rw,upperdir=/dev/shm/up
26 20 0:44 / /with\\040space rw - fuse.sshfs x rw
not a line
"""


def record(folder: Path | None = None, **values) -> JobRecord:
    folders = {"temp": str(folder)} if folder else {}
    plan = {"id": "p", "checkpoint": "on"}
    return JobRecord(
        job_id="7", uid=USER, gid=USER, cluster="c1", plan=plan, folders=folders, **values
    )


def watch(**values) -> DirectWriteWatch:
    small = {"direct_write_mb": 4, "direct_write_checkpoint_mb": 1, **values}
    return DirectWriteWatch(Checkpoints.model_validate(small))


# Mounts


def test_disks_of_the_node_are_told_from_all_else() -> None:
    points = mount_points(MOUNTS)
    local = {point.point for point in points.values() if local_disk(point, points)}
    assert local == {"/", "/data", "/run/containers/a"}
    assert points[26].point == "/with space"


def test_a_file_is_the_same_from_inside_a_container() -> None:
    outside = fs_path(MountPoint("8:2", "/sub", "/data", "xfs"), "/data/temp/c1/7/x")
    inside = fs_path(MountPoint("8:2", "/sub/temp/c1/7", "/scratch", "xfs"), "/scratch/x")
    assert (outside.device, outside.path) == (inside.device, inside.path)
    root = fs_path(MountPoint("8:1", "/", "/", "ext4"), "/var/x")
    assert root.path == "/var/x"


# A real process

Writer = Callable[[str], "subprocess.Popen[str]"]
SCRIPT = """\
import os, sys
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Process:
    """Python that does as it is told, line by line."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def do(self, line: str) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.end()


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    points = mount_points(Path("/proc/self/mountinfo").read_text())
    point = direct_writes.holding(str(tmp_path), points)
    if point is None or not local_disk(point, points):
        pytest.skip(f"{tmp_path} is on no disk of this machine")
    (tmp_path / "cache").mkdir()
    return tmp_path


def test_a_large_file_beside_the_cache_is_named_with_what_was_written(
    disk: Path, process: Process
) -> None:
    process.do(f"f = open({str(disk / 'out.data')!r}, 'wb', 0); f.write(bytes(5 * {MB}))")
    told = watch().look(record(disk / "cache"), [process.pid])
    assert told == [f"{disk}/out.data (0.005 GB)"]


def test_one_below_the_cache_is_not(disk: Path, process: Process) -> None:
    process.do(f"f = open({str(disk / 'cache/out.data')!r}, 'wb', 0); f.write(bytes(5 * {MB}))")
    assert watch().look(record(disk / "cache"), [process.pid]) == []


def test_a_neighbour_of_the_cache_with_a_like_name_is_named(disk: Path, process: Process) -> None:
    (disk / "cache2").mkdir()
    process.do(f"f = open({str(disk / 'cache2/out.pt')!r}, 'wb', 0); f.write(bytes(5 * {MB}))")
    assert len(watch().look(record(disk / "cache"), [process.pid])) == 1


@pytest.mark.parametrize(
    ("name", "mb", "seen"),
    [("a.pt", 2, True), ("a.ckpt.tmp", 2, True), ("a.SAFETENSORS", 2, True), ("a.log", 2, False),
     ("a.pt", 0, False)],
)  # fmt: skip
def test_a_name_like_a_checkpoints_needs_less(
    disk: Path, process: Process, name: str, mb: int, seen: bool
) -> None:
    process.do(f"f = open({str(disk / name)!r}, 'wb', 0); f.write(bytes({mb} * {MB}))")
    assert bool(watch().look(record(disk / "cache"), [process.pid])) is seen


@pytest.mark.parametrize("mode", ["rb", "ab", "r+b"])
def test_a_file_that_was_large_before_counts_by_its_growth(
    disk: Path, process: Process, mode: str
) -> None:
    file = disk / "old.data"
    file.write_bytes(bytes(6 * MB))
    subject = watch()
    process.do(f"f = open({str(file)!r}, {mode!r}, 0)")
    assert subject.look(record(disk / "cache"), [process.pid]) == []
    if mode != "rb":
        process.do(f"f.seek(0, 2); f.write(bytes(5 * {MB}))")
    assert bool(subject.look(record(disk / "cache"), [process.pid])) is (mode != "rb")


def test_a_deleted_file_a_pipe_and_a_process_that_is_gone_are_no_matter(
    disk: Path, process: Process
) -> None:
    file = str(disk / "gone.data")
    process.do(f"f = open({file!r}, 'wb', 0); f.write(bytes(5 * {MB})); os.unlink({file!r})")
    assert watch().look(record(disk / "cache"), [process.pid, 2**22 + 5]) == []


def test_a_look_is_bounded(disk: Path, process: Process, monkeypatch) -> None:
    process.do(f"f = open({str(disk / 'out.data')!r}, 'wb', 0); f.write(bytes(5 * {MB}))")
    monkeypatch.setattr(direct_writes, "_MOST_FILES", 1)
    assert watch().look(record(disk / "cache"), [process.pid]) == [], "only its first file"
    monkeypatch.setattr(direct_writes, "_MOST_FILES", 4096)
    monkeypatch.setattr(direct_writes, "_MOST_PROCESSES", 0)
    assert watch().look(record(disk / "cache"), [process.pid]) == []


def test_a_name_of_the_users_making_is_shown_harmlessly(disk: Path, process: Process) -> None:
    name = str(disk / "a\nslurmstepd: error\x1b[2J.pt")
    process.do(f"f = open({name!r}, 'wb', 0); f.write(bytes(2 * {MB}))")
    (told,) = watch().look(record(disk / "cache"), [process.pid])
    assert told.endswith("a?slurmstepd: error?[2J.pt (0.002 GB)")
    assert sentence([told]).isprintable()


def test_files_of_the_network_and_of_memory_are_not_even_asked(tmp_path: Path, monkeypatch) -> None:
    """A server that hangs would hold whoever asks for the size of a file there."""
    proc = tmp_path / "proc"
    for folder in ("self", "9/fd", "9/fdinfo"):
        (proc / folder).mkdir(parents=True)
    for where in ("self", "9"):
        (proc / where / "mountinfo").write_text(MOUNTS)
    for number, mount in enumerate((22, 23, 25, 26, 99)):
        (proc / f"9/fd/{number}").touch()
        text = f"pos:\t99000000\nflags:\t0100001\nmnt_id:\t{mount}\n"
        (proc / f"9/fdinfo/{number}").write_text(text)
    monkeypatch.setattr(direct_writes, "_file", lambda *_: pytest.fail("it was asked"))
    subject = DirectWriteWatch(Checkpoints(), proc)
    assert subject.look(record(tmp_path), [9]) == []


# Who is told


@pytest.mark.parametrize(
    ("change", "wanted"),
    [({}, True), ({"plan": None}, False), ({"plan": {"id": "p", "checkpoint": "off"}}, False),
     ({"plan": {"id": "p"}}, False), ({"plan": {"id": "p"}, "checkpoints": {"used": True}}, True),
     ({"direct_writes": ["a"]}, False), ({"folders": {}}, False)],
)  # fmt: skip
def test_only_jobs_with_checkpoints_and_a_cache_are_looked_at(tmp_path, change, wanted) -> None:
    job = record(tmp_path)
    for name, value in change.items():
        setattr(job, name, value)
    assert watch().wanted(job) is wanted
    assert watch(direct_writes=False).wanted(job) is False


@pytest.mark.skipif(os.geteuid() != 0, reason="the daemon runs as root")
def test_a_job_is_told_once_and_its_record_keeps_it(disk: Path, process: Process, caplog) -> None:
    (disk / "cache").rmdir()
    checkpoints = {"direct_write_mb": 4}
    services = Services(settings(disk, checkpoints=checkpoints), Roots())
    told: list[tuple[str, str]] = []
    services.life.notices._send = lambda job_id, text: told.append((job_id, text))
    job = record(disk / "cache", boot=services.boot)
    services.store.save(job)
    folder = disk / "cgroup/system.slice/slurmstepd.scope/job_7"
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text(f"{process.pid}\n")
    process.do(f"f = open({str(disk / 'out.data')!r}, 'wb', 0); f.write(bytes(5 * {MB}))")
    now = [0.0]
    subject = observe.Observer(services, None, clock=lambda: now[0])
    for _ in range(3):
        subject.round()
        now[0] += 1000
    assert wait_for(lambda: bool(told))
    ((job_id, text),) = told
    assert job_id == "7"
    assert text.startswith("crater: this job writes large files to this node's disk beside its")
    assert f"{disk}/out.data (0.005 GB)" in text
    assert services.store.get("7").direct_writes == [f"{disk}/out.data (0.005 GB)"]
    assert services.life.direct_writers == 1
    subject.close()
