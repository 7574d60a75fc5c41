"""Who uses which GPU, as two tables of nvidia-smi tell it: for machines without NVML's binding.

Each table is a process of its own and takes a second or more, so nobody should ask often.
"""

from __future__ import annotations

import re
from typing import Any

from crater_slurm.errors import CraterError
from crater_slurm.probe.tools.nvidia_smi import parse_table
from crater_slurm.probe.tools.run import run
from crater_slurm.probe.tools.values import number, whole

GPU_FIELDS = ("uuid", "memory.used", "memory.total", "utilization.gpu", "mig.mode.current")
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory")
TIMEOUT_S = 15.0


def read(notes: list[str]) -> list[dict[str, Any]]:
    """Every GPU in the words of ``nvml_use``; none, with the reason in ``notes``, on failure."""
    try:
        gpus = _table("gpu", GPU_FIELDS)
        return decode(gpus, _table("compute-apps", PROCESS_FIELDS) if gpus.strip() else "")
    except CraterError as error:
        notes.append(f"nvidia-smi says nothing of who uses the GPUs: {error}")
        return []


def decode(gpus: str, processes: str) -> list[dict[str, Any]]:
    """The two tables as one list. Raises CraterError on what are no such tables."""
    found: dict[str, dict[str, Any]] = {
        row["uuid"]: {
            "uuid": row["uuid"],
            "memory_used_mib": whole(row["memory.used"]),
            "memory_total_mib": whole(row["memory.total"]),
            "utilization_percent": number(row["utilization.gpu"]),
            "mig": row["mig.mode.current"] == "Enabled",
            "processes": [],
        }
        for row in parse_table(gpus, GPU_FIELDS)
        if row["uuid"]
    }
    for row in parse_table(processes, PROCESS_FIELDS):
        pid = whole(row["pid"])
        gpu = found.get(row["gpu_uuid"] or "")
        if gpu is not None and pid is not None:
            mib = whole(row["used_memory"])
            entry = {"pid": pid, "memory_mib": mib, "utilization_percent": None}
            gpu["processes"].append(entry)
    return list(found.values())


def _table(kind: str, fields: tuple[str, ...]) -> str:
    argv = ["nvidia-smi", f"--query-{kind}={','.join(fields)}", "--format=csv,noheader"]
    output = run(argv, timeout_s=TIMEOUT_S)
    if output.problem is not None:
        raise CraterError(output.problem)
    # A machine where nothing runs says so in words, with some drivers.
    return re.sub(r"(?im)^no running (compute )?processes found.*$", "", output.text)
