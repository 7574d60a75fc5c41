"""The child that asks NVIDIA's driver who uses which GPU, and how much: a line for each line read.

It stays, because starting NVML costs more than all questions of an hour. The driver keeps samples
of the last seconds, so that a question every half minute still gets a mean and not one moment.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_UTILIZATION_SAMPLES = 1  # NVML_GPU_UTILIZATION_SAMPLES
_MEMORY_V2 = 0x2000028  # nvmlMemory_v2, for bindings that don't name it


class Watch:
    """Asks the module ``nvml``, and remembers until when samples were told already."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._seen_us: dict[tuple[str, str], int] = {}

    def uses(self) -> list[dict[str, Any]]:
        """Every GPU, in NVML's order; one that fails to answer is an empty entry."""
        return [self._use(index) for index in range(self._nvml.nvmlDeviceGetCount())]

    def _ask(self, function: str, *arguments: Any) -> Any:
        call = getattr(self._nvml, function, None)  # an older binding lacks newer functions
        try:
            return call(*arguments) if call is not None else None
        except Exception as error:  # a TypeError too: older bindings take fewer arguments
            if isinstance(error, self._nvml.NVMLError | TypeError | AttributeError):
                return None
            raise

    def _use(self, index: int) -> dict[str, Any]:
        handle = self._ask("nvmlDeviceGetHandleByIndex", index)
        uuid = None if handle is None else self._ask("nvmlDeviceGetUUID", handle)
        if uuid is None:
            return {}
        name = uuid.decode(errors="replace") if isinstance(uuid, bytes) else str(uuid)
        # The second version leaves out what the driver itself keeps.
        version = getattr(self._nvml, "nvmlMemory_v2", _MEMORY_V2)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle, version)
        if memory is None:
            memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        return {
            "uuid": name,
            "memory_used_mib": memory and int(memory.used) // 2**20,
            "memory_total_mib": memory and int(memory.total) // 2**20,
            "utilization_percent": self._utilization(handle, name),
            "mig": bool(mode and mode[0]),
            "processes": self._processes(handle, name),
        }

    def _utilization(self, handle: Any, name: str) -> float | None:
        """Mean of the samples since the last question; the present value where none are kept."""
        last = self._seen_us.get((name, "gpu"), 0)
        kept = self._ask("nvmlDeviceGetSamples", handle, _UTILIZATION_SAMPLES, last)
        samples = [s for s in (kept[1] if kept else ()) if s.timeStamp > last]
        if samples:
            self._seen_us[name, "gpu"] = max(sample.timeStamp for sample in samples)
            return sum(int(s.sampleValue.uiVal) for s in samples) / len(samples)
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        return None if rates is None else float(rates.gpu)

    def _processes(self, handle: Any, name: str) -> list[dict[str, Any]] | None:
        """Processes with their memory and utilization; None when the driver does not tell any."""
        found: dict[int, dict[str, Any]] = {}
        lists = [
            self._ask(f"nvmlDeviceGet{kind}RunningProcesses", handle)
            for kind in ("Compute", "Graphics")
        ]
        if lists == [None, None]:
            return None
        # One process may be in both lists, with all of its memory; with MIG, once per instance.
        for listed in lists:
            inside: dict[int, int | None] = {}
            for process in listed or ():
                used, before = process.usedGpuMemory, inside.get(process.pid, 0)
                known = used is not None and before is not None
                inside[process.pid] = int(used) + before if known else None  # type: ignore[operator]
            for pid, used in inside.items():
                mib = None if used is None else used // 2**20
                found.setdefault(pid, {"pid": pid, "memory_mib": mib})
        busy = self._process_utilization(handle, name)
        for pid, entry in found.items():
            entry["utilization_percent"] = busy.get(pid, 0.0) if busy is not None else None
        return list(found.values())

    def _process_utilization(self, handle: Any, name: str) -> dict[int, float] | None:
        last = self._seen_us.get((name, "processes"), 0)
        told = self._ask("nvmlDeviceGetProcessUtilization", handle, last)
        if told is None:
            return None
        values: dict[int, list[int]] = {}
        for sample in told:
            if sample.timeStamp > last and sample.smUtil <= 100:
                values.setdefault(sample.pid, []).append(int(sample.smUtil))
            self._seen_us[name, "processes"] = max(
                self._seen_us.get((name, "processes"), 0), int(sample.timeStamp)
            )
        return {pid: sum(each) / len(each) for pid, each in values.items()}


def main() -> None:
    """Answer until the other side closes."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        print(json.dumps({"error": str(error)[:200]}), flush=True)
        return
    watch = Watch(pynvml)
    for _ in sys.stdin:
        try:
            print(json.dumps({"gpus": watch.uses()}), flush=True)
        except pynvml.NVMLError as error:
            print(json.dumps({"error": str(error)[:200]}), flush=True)
            return


if __name__ == "__main__":
    main()
