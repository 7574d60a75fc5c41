"""Who uses which GPU now: asked of NVML's child, or now and then of nvidia-smi where it can't be.

Both have a deadline. What they print is checked here; a GPU that tells nonsense tells nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crater_slurm.probe.health.gpus import GpuSampler
from crater_slurm.probe.tools import nvidia_smi_use

_COMMAND = (sys.executable, "-m", "crater_slurm.probe.health.nvml_use")
#: nvidia-smi starts processes and wakes idle GPUs.
_SMI_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a GPU, by its id on this machine; unknown is None."""

    pid: int
    memory_mib: int | None = None
    utilization_percent: float | None = None


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A GPU as a whole, and its processes; None when the driver does not tell of processes.

    A GPU with ``mig`` is several: its memory and utilization as a whole are nobody's.
    """

    uuid: str
    memory_used_mib: int | None = None
    memory_total_mib: int | None = None
    utilization_percent: float | None = None
    mig: bool = False
    processes: tuple[GpuProcess, ...] | None = None


class UseSampler:
    """Owns the child. ``problem`` says why nothing is known."""

    def __init__(
        self,
        nvml: GpuSampler | None = None,
        smi: Callable[[list[str]], list[dict[str, Any]]] = nvidia_smi_use.read,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml = nvml or GpuSampler(_COMMAND)
        self._smi = smi
        self._clock = clock
        self._not_before = 0.0
        self.problem = ""

    def sample(self) -> tuple[GpuUse, ...]:
        """The GPUs now; none when nobody tells, or when it is too early to ask nvidia-smi again."""
        told = self._nvml.ask()
        self.problem = self._nvml.problem
        if self.problem:
            if self._clock() < self._not_before:
                return ()
            self._not_before = self._clock() + _SMI_SECONDS
            notes: list[str] = []
            told = self._smi(notes)
            self.problem = "; ".join([self.problem, *notes]) if notes else ""
        found = (_gpu(entry) for entry in told)
        return tuple(gpu for gpu in found if gpu is not None)

    def close(self) -> None:
        """End the child."""
        self._nvml.close()


def _gpu(entry: dict[str, Any]) -> GpuUse | None:
    uuid, processes = entry.get("uuid"), entry.get("processes")
    if not isinstance(uuid, str):
        return None
    return GpuUse(
        uuid,
        _whole(entry.get("memory_used_mib")),
        _whole(entry.get("memory_total_mib")),
        _percent(entry.get("utilization_percent")),
        entry.get("mig") is True,
        tuple(
            GpuProcess(
                p["pid"], _whole(p.get("memory_mib")), _percent(p.get("utilization_percent"))
            )
            for p in processes
            if isinstance(p, dict) and isinstance(p.get("pid"), int)
        )
        if isinstance(processes, list)
        else None,
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _percent(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value <= 100 else None
