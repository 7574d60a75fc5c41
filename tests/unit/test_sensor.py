"""crater-probe serve: one profile file, reports that wait, metrics that lie not and cost nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_fakes import wait_for
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from store_samples import rich_profile

from crater_slurm.config import Settings
from crater_slurm.errors import CraterError
from crater_slurm.model.health import DriveHealth, GpuHealth, NodeHealth, NumaHealth
from crater_slurm.model.profile import Cpu, Gpu, Method, NodeProfile, NumaNode, Nvme, Provenance
from crater_slurm.probe.limits import Limits
from crater_slurm.probe.profile import Scan
from crater_slurm.sensor import metrics
from crater_slurm.sensor.metrics import NodeCollector, Picture
from crater_slurm.sensor.sensor import Sensor
from crater_slurm.slurm import spool as spool_module
from crater_slurm.store import profile_file

ROOT = Path(__file__).resolve().parents[2]
SCANNED = NodeProfile(
    name="gn01",
    cpu=Cpu(sockets=1, cores_per_socket=2),
    numa_nodes=(NumaNode(id=0, cpus=(0, 1), memory_mib=1000),),
    nvmes=(Nvme(name="nvme0n1", stable_id="S1"),),
    source=Provenance(Method.MEASURED),
)


class Scheduler:
    """Takes what is delivered, or is away."""

    def __init__(self) -> None:
        self.away = False
        self.profiles: list[dict[str, Any]] = []
        self.health: list[dict[str, Any]] = []

    def __call__(self, url: str, body: bytes, credential: str) -> int:
        assert url == "http://ctl:9192/node/v1/reports"
        assert credential == f"cred {hashlib.sha256(body).hexdigest()}"
        if self.away:
            raise ConnectionRefusedError(111, "Connection refused")
        report = json.loads(body)
        assert report["node"] == "gn01"
        if "profile" in report:
            self.profiles.append(report["profile"])
        else:
            self.health.append(report["health"])
        return 204


class Bench:
    """A sensor whose machine and scheduler are played."""

    def __init__(self, folder: Path, **probe: Any) -> None:
        self.folder = folder
        self.scheduler = Scheduler()
        self.profile = SCANNED
        self.notes: tuple[str, ...] = ()
        self.fault: Exception | None = None
        times = {"sample_seconds": 1, "publish_seconds": 1, "scan_seconds": 10}
        self.settings = Settings.model_validate(
            {
                "scheduler": {"url": "http://ctl:9192/"},
                "node": {
                    "profile": folder / "profile.json",
                    "cache": {"mount_point": folder / "none"},
                },
                "probe": times | {"state_dir": folder / "state"} | probe,
            }
        )
        self.start()

    def start(self) -> None:
        self.sensor = Sensor(
            self.settings,
            "gn01",
            read=self.read,
            deliver=self.scheduler,
            credential=lambda text: f"cred {text}",
        )
        self.sensor.start()

    def read(self, name: str, root: Path) -> Scan:
        assert (name, root) == ("gn01", Path("/"))
        if self.fault:
            raise self.fault
        return Scan(self.profile, Limits(cpus=(0, 1), memory_nodes=(0,)), self.notes)

    def scan(self) -> None:
        self.sensor.rescan.set()
        self.sensor.turn()

    @property
    def file(self) -> NodeProfile | None:
        return profile_file.read(self.folder / "profile.json")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(spool_module, "_FIRST_WAIT_SECONDS", 0.02)
    found = Bench(tmp_path)
    yield found
    found.sensor.stop()


def test_a_turn_scans_samples_and_reports(bench: Bench) -> None:
    wait = bench.sensor.turn()
    assert 0 < wait <= 1
    assert bench.file == SCANNED
    assert wait_for(lambda: bench.scheduler.profiles)
    assert [health["node"] for health in bench.scheduler.health] == ["gn01"]
    assert bench.sensor.picture is not None
    assert bench.sensor.picture.profile == SCANNED


def test_an_unchanged_profile_is_reported_once_also_after_a_restart(bench: Bench) -> None:
    bench.sensor.turn()
    assert wait_for(lambda: bench.scheduler.profiles)
    bench.scan()
    bench.sensor.stop()
    bench.start()
    bench.sensor.turn()
    time.sleep(0.1)
    assert len(bench.scheduler.profiles) == 1


def test_changed_hardware_is_reported_at_the_next_scan(bench: Bench) -> None:
    bench.sensor.turn()
    bench.profile = dataclasses.replace(SCANNED, nvmes=())
    bench.scan()
    assert wait_for(lambda: len(bench.scheduler.profiles) == 2)
    assert "nvmes" not in bench.scheduler.profiles[1]


def test_profiles_wait_for_the_scheduler_in_order_and_through_a_restart(bench: Bench) -> None:
    bench.scheduler.away = True
    bench.sensor.turn()
    bench.profile = dataclasses.replace(SCANNED, memory_mib=5)
    bench.scan()
    assert wait_for(lambda: len(list((bench.folder / "state/spool").glob("*.json"))) == 2)
    bench.sensor.stop()
    bench.scheduler.away = False
    bench.start()
    assert wait_for(lambda: len(bench.scheduler.profiles) == 2)
    assert [p.get("memory_mib") for p in bench.scheduler.profiles] == [None, 5]


def test_what_was_calibrated_meanwhile_survives_the_scan(bench: Bench) -> None:
    bench.sensor.turn()
    measured = Provenance(Method.MEASURED)

    def calibrate(old: NodeProfile | None) -> NodeProfile:
        assert old is not None
        node = dataclasses.replace(old.numa_nodes[0], memory_bandwidth_gb_s=142.0)
        paths = {"numa_nodes[0].memory_bandwidth_gb_s": measured}
        return dataclasses.replace(old, numa_nodes=(node,), provenance=paths)

    profile_file.update(bench.folder / "profile.json", calibrate)
    bench.scan()
    assert bench.file is not None
    assert bench.file.numa_nodes[0].memory_bandwidth_gb_s == 142.0
    assert wait_for(lambda: len(bench.scheduler.profiles) == 2)
    assert bench.scheduler.profiles[1]["numa_nodes"][0]["memory_bandwidth_gb_s"] == 142.0


def test_the_file_of_a_cloned_image_is_no_memory_of_this_node(bench: Bench) -> None:
    other = dataclasses.replace(SCANNED, name="gn99", cache_gb=77)
    profile_file.update(bench.folder / "profile.json", lambda _: other)
    bench.sensor.turn()
    assert bench.file == SCANNED


def test_a_damaged_file_is_set_aside(bench: Bench) -> None:
    (bench.folder / "profile.json").write_text('{"name": "gn01", "cpu"')
    bench.sensor.turn()
    assert bench.file == SCANNED
    assert (bench.folder / "profile.json.damaged").exists()


@pytest.mark.parametrize("fault", [CraterError("no CPU is online"), RuntimeError("a bug")])
def test_a_scan_that_fails_is_told_and_the_probe_goes_on(
    bench: Bench, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    bench.sensor.turn()
    bench.fault = fault
    bench.scan()
    assert "scan" in caplog.text
    bench.fault = None
    bench.profile = dataclasses.replace(SCANNED, memory_mib=7)
    bench.scan()
    assert bench.file is not None
    assert bench.file.memory_mib == 7


def test_what_can_not_be_read_is_told_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.notes = ("DIMMs are unknown: dmidecode needs root",)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            bench.scan()
    assert caplog.text.count("dmidecode needs root") == 1


def test_health_that_could_not_be_sent_is_superseded_not_queued(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.scheduler.away = True
    for _ in range(3):
        bench.sensor._due["publish"] = 0.0
        bench.sensor.turn()
    assert caplog.text.count("health can't be reported") == 1
    bench.scheduler.away = False
    bench.sensor._due["publish"] = 0.0
    bench.sensor.turn()
    assert len(bench.scheduler.health) == 1


def test_a_site_may_keep_its_nodes_silent(tmp_path: Path) -> None:
    bench = Bench(tmp_path, publish=False)
    bench.sensor.turn()
    bench.sensor.stop()
    assert bench.file == SCANNED
    assert (bench.scheduler.profiles, bench.scheduler.health) == ([], [])


def test_a_folder_that_can_not_be_made_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in the way")
    with pytest.raises(CraterError, match=r"can't write below .*/state"):
        Bench(tmp_path)


# The profile file


def test_two_that_change_the_file_at_once_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    profile_file.update(file, lambda _: dataclasses.replace(SCANNED, memory_mib=1))

    def add(old: NodeProfile | None) -> NodeProfile:
        assert old is not None
        assert old.memory_mib is not None
        time.sleep(0.01)
        return dataclasses.replace(old, memory_mib=old.memory_mib + 1)

    threads = [
        threading.Thread(target=lambda: [profile_file.update(file, add) for _ in range(5)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = profile_file.read(file)
    assert found is not None
    assert found.memory_mib == 21
    assert file.stat().st_mode & 0o777 == 0o644


# Metrics

HEALTH = NodeHealth(
    node="gn01",
    time=1000.0,
    load=3.5,
    numa_nodes=(
        NumaHealth(id=0, cpu_utilization_percent=75.0, memory_used_mib=1024),
        NumaHealth(id=1, cpu_utilization_percent=0.0, memory_bandwidth_gb_s=20.5),
    ),
    gpus=(
        GpuHealth(
            index=1,
            temperature_c=71,
            memory_used_mib=1000,
            throttled=("thermal",),
            ecc_uncorrected=2,
        ),
    ),
    drives=(DriveHealth(name="nvme0n1", write_iops=123.0, latency_us=90.5, critical_warning=0),),
)


def series(picture: Picture | None) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    registry = CollectorRegistry()
    registry.register(NodeCollector(lambda: picture))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.documentation, family.name
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def test_the_names_that_were_promised_are_there_with_their_values() -> None:
    found = series(Picture(rich_profile(), HEALTH, ("one problem",)))
    gpu = (("gpu", "1"), ("model", "a100-pcie-40gb"), ("node", "gn01"), ("uuid", "GPU-5a1c"))
    drive = (("device", "nvme0n1"), ("model", "Samsung PM9A3"), ("node", "gn01"))
    numa = (("node", "gn01"), ("numa", "0"))
    expected = {
        ("crater_gpu_sm_count", gpu): 108,
        ("crater_gpu_memory_used_bytes", gpu): 1000 * 2**20,
        ("crater_gpu_memory_total_bytes", gpu): 40960 * 2**20,
        ("crater_gpu_temperature_celsius", gpu): 71,
        ("crater_gpu_throttled", tuple(sorted((*gpu, ("reason", "thermal"))))): 1,
        ("crater_gpu_ecc_errors_total", tuple(sorted((*gpu, ("kind", "uncorrected"))))): 2,
        ("crater_cpu_utilization_percent", numa): 75.0,
        ("crater_cpu_numa_memory_bandwidth_gb_s", numa): 0.1 + 0.2,
        ("crater_cpu_numa_memory_bandwidth_used_gb_s", (("node", "gn01"), ("numa", "1"))): 20.5,
        ("crater_ssd_write_iops", drive): 123.0,
        ("crater_ssd_latency_us", drive): 90.5,
        ("crater_ssd_calibrated_latency_us", drive): 87.2,
        ("crater_ssd_iops_stability_ratio", drive): 0.92,
        ("crater_ssd_critical_warning", drive): 0,
        ("crater_node_load", (("node", "gn01"),)): 3.5,
        ("crater_probe_problems", (("node", "gn01"),)): 1,
    }
    assert expected.items() <= found.items()
    names = {name for name, _ in found}
    for pattern in ("gpu_sm", "cpu_numa", "ssd_latency"):
        assert any(pattern in name for name in names)


def test_what_is_unknown_has_no_series() -> None:
    found = series(Picture(SCANNED, NodeHealth(node="gn01", time=1.0)))
    names = {name for name, _ in found}
    assert names == {
        *("crater_probe_info", "crater_probe_sample_timestamp_seconds", "crater_probe_problems"),
    }


def test_before_the_first_sample_there_is_the_version() -> None:
    assert {name for name, _ in series(None)} == {"crater_probe_info"}


def test_names_from_hardware_are_escaped() -> None:
    gpu = Gpu(index=0, model='bad"model\\', sm_count=1)
    profile = dataclasses.replace(SCANNED, gpus=(gpu,))
    found = series(Picture(profile, NodeHealth(node="gn01", time=1.0)))
    labels = next(dict(labels) for name, labels in found if name == "crater_gpu_sm_count")
    assert labels["model"] == 'bad"model\\'


def test_every_metric_is_documented() -> None:
    pages = (ROOT / "docs" / "probe.md").read_text()
    source = Path(metrics.__file__).read_text()
    names = set(re.findall(r'"(crater_[a-z_]+)"', source))
    names |= {f"crater_gpu_{m}" for m, _ in (metrics._GPU_FACTS | metrics._GPU_STATES).values()}
    names |= {f"crater_ssd_{m}" for m, _ in (metrics._DRIVE_FACTS | metrics._DRIVE_STATES).values()}
    assert len(names) > 25
    assert [name for name in sorted(names) if name not in pages] == []
