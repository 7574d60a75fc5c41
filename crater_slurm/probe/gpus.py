"""GPUs of this machine as NVIDIA's driver tells them; none where there is no driver."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from crater_slurm.model.profile import Gpu
from crater_slurm.probe.system import read_int

_log = logging.getLogger("crater.probe")


def gpus(root: Path) -> tuple[Gpu, ...]:
    """GPUs in the order of their PCI addresses, which is Slurm's order for File=nvidia[0-N]."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        _log.info("no NVIDIA GPU is read: %s", error)
        return ()
    try:
        found = [_gpu(pynvml, i, root) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    return tuple(found)


def _gpu(nvml: Any, index: int, root: Path) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        model=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        pci_bus_id=bus,
        numa_node=read_int(root / "sys/bus/pci/devices" / bus / "numa_node"),
        memory_mib=int(nvml.nvmlDeviceGetMemoryInfo(handle).total) // 2**20,
        compute_capability=f"{major}.{minor}",
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
