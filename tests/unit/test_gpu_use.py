"""Who uses which GPU: NVML's child by a stand-in of the library, nvidia-smi's tables, and both."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from crater_slurm.errors import CraterError
from crater_slurm.probe.health import nvml_use
from crater_slurm.probe.health.gpu_use import GpuProcess, GpuUse, UseSampler
from crater_slurm.probe.health.gpus import GpuSampler
from crater_slurm.probe.tools import nvidia_smi_use

GIB = 2**30


class Nvml:
    """Stands for pynvml; what a test sets to None raises, as on a card without it."""

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 7  # noqa: N815

    def __init__(self) -> None:
        self.compute: list[Any] | None = [SimpleNamespace(pid=11, usedGpuMemory=6 * GIB)]
        self.graphics: list[Any] | None = []
        self.samples: list[Any] | None = []
        self.busy: list[Any] | None = []
        self.mig: tuple[int, int] | None = None
        self.asked_since: list[int] = []

    def _told(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if index == 1:
            raise self.NVMLError("GPU is lost")
        return "handle"

    def nvmlDeviceGetUUID(self, _: str) -> bytes:  # noqa: N802
        return b"GPU-a"

    def nvmlDeviceGetMemoryInfo(self, _: str, version: int | None = None) -> Any:  # noqa: N802
        kept = 0 if version == self.nvmlMemory_v2 else GIB
        return SimpleNamespace(used=7 * GIB + kept, total=40 * GIB)

    def nvmlDeviceGetMigMode(self, _: str) -> tuple[int, int]:  # noqa: N802
        return self._told(self.mig)  # type: ignore[no-any-return]

    def nvmlDeviceGetComputeRunningProcesses(self, _: str) -> Any:  # noqa: N802
        return self._told(self.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, _: str) -> Any:  # noqa: N802
        return self._told(self.graphics)

    def nvmlDeviceGetSamples(self, _: str, kind: int, since: int) -> Any:  # noqa: N802
        assert kind == 1
        self.asked_since.append(since)
        return 1, self._told(self.samples)

    def nvmlDeviceGetUtilizationRates(self, _: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=42, memory=1)

    def nvmlDeviceGetProcessUtilization(self, _: str, since: int) -> Any:  # noqa: N802
        return self._told(self.busy)


def sample(time_us: int, value: int) -> Any:
    return SimpleNamespace(timeStamp=time_us, sampleValue=SimpleNamespace(uiVal=value))


def first(watch: nvml_use.Watch) -> dict[str, Any]:
    found, lost = watch.uses()
    assert lost == {}, "a GPU that is lost hides no other"
    return found


def test_the_child_tells_memory_without_the_driver_s_own_and_each_process() -> None:
    assert first(nvml_use.Watch(Nvml())) == {
        "uuid": "GPU-a",
        "memory_used_mib": 7 * 1024,
        "memory_total_mib": 40 * 1024,
        "utilization_percent": 42.0,
        "mig": False,
        "processes": [{"pid": 11, "memory_mib": 6 * 1024, "utilization_percent": 0.0}],
    }


def test_utilization_is_the_mean_of_the_samples_since_the_last_question() -> None:
    nvml = Nvml()
    watch = nvml_use.Watch(nvml)
    nvml.samples = [sample(100, 90), sample(200, 30)]
    assert first(watch)["utilization_percent"] == 60.0
    nvml.samples = [sample(200, 30), sample(300, 10)]  # the driver may tell the last one again
    assert first(watch)["utilization_percent"] == 10.0
    assert nvml.asked_since == [0, 200]
    nvml.samples = None
    assert first(watch)["utilization_percent"] == 42.0


def test_a_process_in_both_lists_counts_once_and_with_mig_by_all_its_instances() -> None:
    nvml = Nvml()
    nvml.mig = (1, 1)
    part = SimpleNamespace(pid=11, usedGpuMemory=2 * GIB)
    nvml.compute = [part, part, SimpleNamespace(pid=12, usedGpuMemory=None)]
    nvml.graphics = [part, SimpleNamespace(pid=13, usedGpuMemory=2**20)]
    nvml.busy = None
    found = first(nvml_use.Watch(nvml))
    assert found["mig"] is True
    assert found["processes"] == [
        {"pid": 11, "memory_mib": 4096, "utilization_percent": None},
        {"pid": 12, "memory_mib": None, "utilization_percent": None},
        {"pid": 13, "memory_mib": 1, "utilization_percent": None},
    ]


def test_a_driver_that_tells_of_no_processes_says_so() -> None:
    nvml = Nvml()
    nvml.compute = nvml.graphics = None
    assert first(nvml_use.Watch(nvml))["processes"] is None


def test_a_process_s_utilization_is_a_mean_of_what_is_new() -> None:
    nvml = Nvml()
    watch = nvml_use.Watch(nvml)
    nvml.busy = [
        SimpleNamespace(pid=11, timeStamp=100, smUtil=20),
        SimpleNamespace(pid=11, timeStamp=200, smUtil=40),
        SimpleNamespace(pid=11, timeStamp=200, smUtil=4_000_000),  # as some drivers say of none
    ]
    assert first(watch)["processes"][0]["utilization_percent"] == 30.0
    assert first(watch)["processes"][0]["utilization_percent"] == 0.0


def test_an_older_binding_without_the_newer_calls_serves() -> None:
    class Old(Nvml):
        nvmlDeviceGetSamples = nvmlDeviceGetProcessUtilization = None  # noqa: N815
        nvmlDeviceGetMigMode = None  # noqa: N815

        def nvmlDeviceGetMemoryInfo(self, _: str) -> Any:  # type: ignore[override]  # noqa: N802
            return SimpleNamespace(used=8 * GIB, total=40 * GIB)

    found = first(nvml_use.Watch(Old()))
    assert found["memory_used_mib"] == 8 * 1024
    assert found["processes"] == [{"pid": 11, "memory_mib": 6 * 1024, "utilization_percent": None}]


# nvidia-smi

GPUS = """\
GPU-a, 7168 MiB, 40960 MiB, 63 %, Disabled
GPU-b, [N/A], 40960 MiB, [N/A], Enabled
"""
APPS = "GPU-a, 11, 6144 MiB\nGPU-a, 12, [N/A]\nGPU-c, 13, 1 MiB\n"


def test_nvidia_smi_tells_the_same_in_two_tables() -> None:
    first, second = nvidia_smi_use.decode(GPUS, APPS)
    assert first == {
        "uuid": "GPU-a",
        "memory_used_mib": 7168,
        "memory_total_mib": 40960,
        "utilization_percent": 63.0,
        "mig": False,
        "processes": [
            {"pid": 11, "memory_mib": 6144, "utilization_percent": None},
            {"pid": 12, "memory_mib": None, "utilization_percent": None},
        ],
    }
    assert (second["memory_used_mib"], second["mig"], second["processes"]) == (None, True, [])


@pytest.mark.parametrize("gpus", ["NVIDIA-SMI has failed because", "GPU-a, 7168 MiB\n"])
def test_what_is_no_table_is_refused(gpus: str) -> None:
    with pytest.raises(CraterError):
        nvidia_smi_use.decode(gpus, "")


def test_nvidia_smi_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    notes: list[str] = []
    assert nvidia_smi_use.read(notes) == []
    assert notes == ["nvidia-smi says nothing of who uses the GPUs: nvidia-smi is not installed"]


# Both


def child(code: str) -> GpuSampler:
    return GpuSampler([sys.executable, "-c", code], deadline_seconds=5.0)


def test_the_child_stays_and_nonsense_of_one_gpu_is_unknown() -> None:
    told = {
        "gpus": [
            {"uuid": "GPU-a", "memory_used_mib": 5, "utilization_percent": 40,
             "processes": [{"pid": 11, "memory_mib": -3, "utilization_percent": 900}, {"pid": "x"}]},
            {"uuid": 7},
            {"uuid": "GPU-b", "memory_used_mib": "many", "mig": True, "processes": None},
            {},
        ]
    }  # fmt: skip
    code = f"import sys\nfor _ in sys.stdin: print({json.dumps(json.dumps(told))}, flush=True)"
    nvml = child(code)
    sampler = UseSampler(nvml)
    expected = (
        GpuUse("GPU-a", 5, None, 40.0, False, (GpuProcess(11),)),
        GpuUse("GPU-b", mig=True),
    )
    assert sampler.sample() == expected
    process = nvml._child
    assert sampler.sample() == expected
    assert nvml._child is process
    sampler.close()
    assert process is not None
    assert process.returncode is not None


def test_nvidia_smi_stands_in_but_is_asked_rarely() -> None:
    asked, now = [], [0.0]

    def smi(_: list[str]) -> list[dict[str, Any]]:
        asked.append(now[0])
        return nvidia_smi_use.decode(GPUS, APPS)

    nvml = child("""print('{"error": "no pynvml"}', flush=True)""")
    sampler = UseSampler(nvml, smi, lambda: now[0])
    assert [gpu.uuid for gpu in sampler.sample()] == ["GPU-a", "GPU-b"]
    assert sampler.problem == ""
    now[0] = 30.0
    assert sampler.sample() == ()
    now[0] = 121.0
    assert len(sampler.sample()) == 2
    assert asked == [0.0, 121.0]


def test_when_neither_tells_the_reasons_of_both_are_known() -> None:
    def smi(notes: list[str]) -> list[dict[str, Any]]:
        notes.append("nvidia-smi is not installed")
        return []

    sampler = UseSampler(child("""print('{"error": "no pynvml"}', flush=True)"""), smi)
    assert sampler.sample() == ()
    assert "no pynvml" in sampler.problem
    assert "nvidia-smi is not installed" in sampler.problem


def test_a_real_child_answers_on_any_machine() -> None:
    sampler = UseSampler(smi=lambda notes: notes.append("no nvidia-smi") or [])  # type: ignore[func-returns-value]
    found = sampler.sample()
    sampler.close()
    assert found or "unknown" in sampler.problem
