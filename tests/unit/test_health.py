"""How a node is: rates from the kernel's counters, nothing invented, nothing that hangs."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.errors import UsageError
from crater_slurm.model import drives
from crater_slurm.model.health import DriveHealth, GpuHealth, NodeHealth, NumaHealth
from crater_slurm.model.profile import Cpu, Gpu, NodeProfile, NumaNode, Nvme
from crater_slurm.probe.health import nvml_watch
from crater_slurm.probe.health.cpus import CpuSampler
from crater_slurm.probe.health.drives import DriveSampler
from crater_slurm.probe.health.gpus import GpuSampler
from crater_slurm.probe.health.latency import LatencyProbe
from crater_slurm.probe.health.sampler import Sampler
from crater_slurm.store.health import health_from_dict, health_to_dict

PROFILE = NodeProfile(
    name="gn01",
    cpu=Cpu(sockets=2, cores_per_socket=2),
    numa_nodes=(NumaNode(id=0, cpus=(0, 1)), NumaNode(id=1, cpus=(2, 3))),
    gpus=(Gpu(index=0, model="a100", uuid="GPU-a"), Gpu(index=1, model="a100", uuid="GPU-b")),
    nvmes=(Nvme(name="nvme0n1", stable_id="S1"),),
)


def put(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def cpu_lines(*times: tuple[int, int, int]) -> str:
    """/proc/stat of user, idle and iowait ticks per CPU."""
    lines = [
        f"cpu{i} {user} 0 0 {idle} {wait} 0 0 0 0 0" for i, (user, idle, wait) in enumerate(times)
    ]
    return "\n".join(["cpu  0 0 0 0 0 0 0 0 0 0", *lines, "intr 5"]) + "\n"


# CPUs


def test_use_is_counted_per_numa_node_and_waiting_for_io_is_idle(tmp_path: Path) -> None:
    sampler = CpuSampler(tmp_path)
    put(tmp_path, "proc/stat", cpu_lines((100, 0, 0), (0, 100, 0), (50, 50, 0), (0, 0, 0)))
    first = sampler.sample(PROFILE, 0.0)
    assert [n.cpu_utilization_percent for n in first] == [None, None], "a rate needs two looks"
    put(tmp_path, "proc/stat", cpu_lines((200, 0, 0), (50, 150, 0), (50, 100, 50), (0, 0, 100)))
    second = sampler.sample(PROFILE, 1.0)
    assert [n.cpu_utilization_percent for n in second] == [75.0, 0.0]


def test_memory_in_use_is_what_is_not_free(tmp_path: Path) -> None:
    put(
        tmp_path,
        "sys/devices/system/node/node1/meminfo",
        "Node 1 MemTotal:  2097152 kB\nNode 1 MemFree:  1048576 kB\n",
    )
    found = CpuSampler(tmp_path).sample(PROFILE, 0.0)
    assert [n.memory_used_mib for n in found] == [None, 1024]


def test_bandwidth_in_use_comes_from_resctrl_by_l3_domain(tmp_path: Path) -> None:
    sampler = CpuSampler(tmp_path)
    put(tmp_path, "sys/devices/system/cpu/cpu0/cache/index3/id", "0\n")
    put(tmp_path, "sys/devices/system/cpu/cpu2/cache/index3/id", "1\n")
    for domain, count in ((0, 10**9), (1, 5 * 10**9)):
        put(tmp_path, f"sys/fs/resctrl/mon_data/mon_L3_{domain:02d}/mbm_total_bytes", str(count))
    assert [n.memory_bandwidth_gb_s for n in sampler.sample(PROFILE, 10.0)] == [None, None]
    put(tmp_path, "sys/fs/resctrl/mon_data/mon_L3_00/mbm_total_bytes", str(41 * 10**9))
    put(tmp_path, "sys/fs/resctrl/mon_data/mon_L3_01/mbm_total_bytes", "Unavailable")
    assert [n.memory_bandwidth_gb_s for n in sampler.sample(PROFILE, 12.0)] == [20.0, None]


@given(st.binary(max_size=400))
def test_no_content_of_the_kernels_files_is_a_traceback(content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("proc/stat", "proc/loadavg", "proc/diskstats"):
            put(root, name, "")
            (root / name).write_bytes(content)
        CpuSampler(root).sample(PROFILE, 0.0)
        CpuSampler(root).load()
        DriveSampler(root).sample(PROFILE, 0.0)


# Drives


def disk(reads: int, read_kib: int, read_ms: int, writes: int, busy_ms: int) -> str:
    sectors = read_kib * 2
    return (
        f" 259 0 nvme0n1 {reads} 3 {sectors} {read_ms} {writes} 1 {writes * 8} {writes} 0 {busy_ms}"
        " 77 0 0 0 0\n 259 1 nvme0n1p1 9 9 9 9 9 9 9 9 9 9 9\n"
    )


def test_rates_and_awaits_of_a_drive(tmp_path: Path) -> None:
    sampler = DriveSampler(tmp_path)
    put(tmp_path, "proc/diskstats", disk(1000, 4000, 100, 10, 500))
    assert sampler.sample(PROFILE, 100.0) == (DriveHealth(name="nvme0n1", stable_id="S1"),)
    put(tmp_path, "proc/diskstats", disk(3000, 4000 + 10 * 2000, 300, 10, 1500))
    (found,) = sampler.sample(PROFILE, 110.0)
    assert found == DriveHealth(
        name="nvme0n1",
        stable_id="S1",
        read_iops=200.0,
        write_iops=0.0,
        read_mb_s=2.048,
        write_mb_s=0.0,
        read_await_ms=0.1,
        busy_percent=10.0,
    )


def test_a_drive_that_was_replaced_has_no_rates(tmp_path: Path) -> None:
    sampler = DriveSampler(tmp_path)
    put(tmp_path, "proc/diskstats", disk(1000, 4000, 100, 10, 500))
    sampler.sample(PROFILE, 0.0)
    put(tmp_path, "proc/diskstats", disk(5, 20, 1, 0, 1))
    assert sampler.sample(PROFILE, 10.0) == (DriveHealth(name="nvme0n1", stable_id="S1"),)


@pytest.mark.parametrize(
    ("ratio", "word", "weight"),
    [
        (None, "unknown", 1.0),
        (0.69, "unsteady", 0.3),
        (0.70, "fair", 1.0),
        (0.84, "fair", 1.0),
        (0.85, "steady", 1.0),
    ],
)
def test_the_thresholds_of_a_steady_drive(ratio: float | None, word: str, weight: float) -> None:
    assert (drives.steadiness(ratio), drives.weight(ratio)) == (word, weight)


@pytest.mark.parametrize(("latency", "slow"), [(100.0, False), (114.2, False), (114.4, True)])
def test_slow_is_thirty_percent_of_the_speed_lost(latency: float, slow: bool) -> None:
    assert drives.is_slow(latency, 80.0) is slow


# The latency probe


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A folder whose file system takes direct I/O."""
    try:
        fd = os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no direct I/O")
    os.close(fd)
    return tmp_path


def test_latency_is_measured_on_a_file_of_its_own(on_disk: Path) -> None:
    probe = LatencyProbe(on_disk)
    latency = probe.sample()
    assert latency is not None
    assert 0.5 < latency < 1e6
    file = on_disk / ".crater-probe-latency"
    assert (file.stat().st_size, file.stat().st_mode & 0o777) == (64 << 20, 0o600)
    assert probe.problem == ""
    before = file.stat().st_mtime_ns
    assert LatencyProbe(on_disk).sample() is not None
    assert file.stat().st_mtime_ns == before, "it is written once"


def test_a_link_in_its_place_is_not_followed(on_disk: Path) -> None:
    victim = on_disk / "victim"
    victim.write_text("mine")
    (on_disk / ".crater-probe-latency").symlink_to(victim)
    probe = LatencyProbe(on_disk)
    assert probe.sample() is None
    assert "is not watched" in probe.problem
    assert victim.read_text() == "mine"


def test_a_full_file_system_is_left_alone(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=4096))
    probe = LatencyProbe(on_disk)
    assert probe.sample() is None
    assert "too little space" in probe.problem
    assert list(on_disk.glob(".crater*")) == []


def test_a_slow_drive_costs_a_quarter_of_a_second(on_disk: Path) -> None:
    clock = iter(range(0, 10**12, 100_000_000))
    probe = LatencyProbe(on_disk, _clock=lambda: next(clock))
    assert probe.sample() == 100_000.0


# GPUs, whose driver is played by small programs and a module object: there is no GPU here


def child(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


ANSWER = {
    "gpus": [
        {
            "uuid": "GPU-b",
            "temperature_c": 71,
            "throttled": ["thermal"],
            "memory_used_mib": 1000,
            "future_field": 1,
        }
    ]
}
FAITHFUL = f"import sys\nfor _ in sys.stdin: print({json.dumps(json.dumps(ANSWER))}, flush=True)"


def test_gpus_are_told_by_uuid_and_the_child_stays() -> None:
    sampler = GpuSampler(child(FAITHFUL))
    first = sampler.sample(PROFILE)
    assert first == (
        GpuHealth(index=0, uuid="GPU-a", model="a100"),
        GpuHealth(
            index=1,
            uuid="GPU-b",
            model="a100",
            temperature_c=71,
            throttled=("thermal",),
            memory_used_mib=1000,
        ),
    )
    process = sampler._child
    assert sampler.sample(PROFILE) == first
    assert sampler._child is process
    sampler.close()
    assert process is not None
    assert process.returncode is not None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import time; time.sleep(60)", "did not answer in time"),
        ("print('nonsense', flush=True); input()", "Expecting value"),
        ("print('[]', flush=True); input()", "no object"),
        ("print('{}', flush=True); input()", "gpus"),
        ("""print('{"error": "Driver Not Loaded"}', flush=True)""", "Driver Not Loaded"),
        ("raise SystemExit", "ended"),
    ],
)
def test_a_driver_that_fails_costs_the_deadline_and_says_why(code: str, words: str) -> None:
    sampler = GpuSampler(child(code), deadline_seconds=1.0)
    begin = time.monotonic()
    found = sampler.sample(PROFILE)
    assert [gpu.temperature_c for gpu in found] == [None, None]
    assert words in sampler.problem
    assert time.monotonic() - begin < 5
    assert sampler._child is None
    begin = time.monotonic()
    sampler.sample(PROFILE)
    assert time.monotonic() - begin < 0.5, "it is not asked again for a while"


class Fake:
    """Stands for pynvml: every function that is not here is one that the binding lacks."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index == 1:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, _: int) -> bytes:  # noqa: N802
        return b"GPU-a"

    def nvmlDeviceGetMemoryInfo(self, _: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=3 << 30, total=40 << 30)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _: int) -> int:  # noqa: N802
        return 0x01 | 0x20 | 0x80

    def nvmlDeviceGetTotalEccErrors(self, *_: int) -> int:  # noqa: N802
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetPowerUsage(self, _: int) -> int:  # noqa: N802
        return 250_500


def test_what_a_card_does_not_support_is_left_out_and_a_lost_card_is_empty() -> None:
    assert nvml_watch.states(Fake()) == [
        {
            "uuid": "GPU-a",
            "throttled": ["thermal", "power_brake"],
            "memory_used_mib": 3072,
            "memory_total_mib": 40960,
            "power_w": 250.5,
        },
        {},
    ]


# All of it


def test_this_machine_can_be_sampled() -> None:
    sampler = Sampler()
    profile = NodeProfile(
        name="here",
        cpu=Cpu(sockets=1, cores_per_socket=1),
        numa_nodes=(NumaNode(id=0, cpus=tuple(range(os.cpu_count() or 1))),),
    )
    sampler.sample(profile)
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        pass
    found = sampler.sample(profile)
    sampler.close()
    (node,) = found.numa_nodes
    assert found.load is not None
    assert node.cpu_utilization_percent is not None
    assert node.memory_used_mib
    assert 0 < node.cpu_utilization_percent <= 100


HEALTH = NodeHealth(
    node="gn01",
    time=1000.5,
    load=1.5,
    numa_nodes=(NumaHealth(id=0, cpu_utilization_percent=50.0, memory_used_mib=100),),
    gpus=(GpuHealth(index=0, uuid="GPU-a", throttled=("thermal",), temperature_c=70.0),),
    drives=(DriveHealth(name="nvme0n1", latency_us=81.5, critical_warning=0),),
)


def test_health_survives_json() -> None:
    data = json.loads(json.dumps(health_to_dict(HEALTH)))
    assert health_from_dict(data, "gn01") == HEALTH


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "time is missing"),
        ({"time": "now"}, "time: 'now' is not a number"),
        ({"time": 1, "lod": 2}, "did you mean load"),
        ({"time": 1, "gpus": [{"index": 0, "temperature_c": float("nan")}]}, r"gpus\[0\].temper"),
        ({"time": 1, "drives": [{"name": "a\nb"}]}, r"drives\[0\].name"),
    ],
)
def test_what_is_no_health_is_refused_with_its_path(data: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        health_from_dict(data, "gn01")


def test_a_node_speaks_for_itself_only() -> None:
    assert health_from_dict(health_to_dict(HEALTH) | {"node": "other"}, "gn01").node == "gn01"
