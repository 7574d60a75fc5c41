"""The child that asks NVIDIA's driver how its GPUs are: one line of JSON for each line it reads.

It stays, because starting NVML costs more than all questions of a minute. What a card does not
support is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from crater_slurm.model.health import THROTTLE_REASONS


def states(nvml: Any) -> list[dict[str, Any]]:
    """What each GPU says, in NVML's order; a GPU that fails to answer is an empty entry."""
    return [_state(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def _state(nvml: Any, index: int) -> dict[str, Any]:
    def ask(function: str, *arguments: Any) -> Any:
        call: Callable[..., Any] | None = getattr(nvml, function, None)
        try:
            return call(handle, *arguments) if call is not None else None
        except nvml.NVMLError:
            return None

    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError:
        return {}
    memory, use = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetUtilizationRates")
    power = ask("nvmlDeviceGetPowerUsage")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    uuid = ask("nvmlDeviceGetUUID")
    found = {
        "uuid": uuid.decode() if isinstance(uuid, bytes) else uuid,
        "temperature_c": ask("nvmlDeviceGetTemperature", 0),
        "throttled": [word for bit, word in THROTTLE_REASONS.items() if (reasons or 0) & bit],
        "ecc_corrected": ask("nvmlDeviceGetTotalEccErrors", 0, 0),
        "ecc_uncorrected": ask("nvmlDeviceGetTotalEccErrors", 1, 0),
        "memory_used_mib": memory and int(memory.used) // 2**20,
        "memory_total_mib": memory and int(memory.total) // 2**20,
        "utilization_percent": use and use.gpu,
        "memory_utilization_percent": use and use.memory,
        "power_w": power and power / 1000,
    }
    return {name: value for name, value in found.items() if value is not None}


def main() -> None:
    """Answer until the other side closes."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        print(json.dumps({"error": str(error)[:200]}), flush=True)
        return
    for _ in sys.stdin:
        try:
            print(json.dumps({"gpus": states(pynvml)}), flush=True)
        except pynvml.NVMLError as error:
            print(json.dumps({"error": str(error)[:200]}), flush=True)
            return


if __name__ == "__main__":
    main()
