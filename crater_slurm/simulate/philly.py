"""Reads run times in the Philly form: a CSV file with a column ``runtime`` in seconds.

The published file has that column alone, so GPUs are drawn by a rule; a file may say them in a
column ``gpus``, and may have ``submit`` (seconds), ``cpus`` and ``memory_mib``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path

import numpy as np

from crater_slurm.errors import UsageError
from crater_slurm.placement.packing.kernels import WHOLE
from crater_slurm.simulate.trace import Nodes, Notes, Task, rows, whole

#: GPUs of a job and how often: 70 % one, 10 % two, 15 % four, 5 % eight, as schedulers are compared
#: on this trace (Narayanan et al., OSDI 2020, section 7.1). The mean is 1.9, the trace's is 1.93.
GPUS = (1, 2, 4, 8)
SHARES = (0.70, 0.10, 0.15, 0.05)
#: One draw for all replays: a seed moves arrivals, never what a job is.
DRAW = 20170807


def tasks(file: Path, nodes: Nodes, notes: Notes) -> Iterator[Task]:
    """Tasks of the file, in its order; a million rows take no memory."""
    random = np.random.default_rng(DRAW)
    cpu_milli, memory_mib = per_gpu(nodes)
    for line, row in rows(file, ("runtime",)):
        where = f"{file}:{line}"
        if row.get("gpus"):
            gpus = whole(row, "gpus", where)
        else:
            gpus = int(random.choice(GPUS, p=SHARES))
            notes.say("GPUs: none in this trace, drawn as 70 % 1, 10 % 2, 15 % 4, 5 % 8")
        own_cpu = whole(row, "cpus", where) * 1000 if row.get("cpus") else cpu_milli * max(1, gpus)
        own_memory = whole(row, "memory_mib", where) if row.get("memory_mib") else memory_mib * gpus
        if not row.get("cpus"):
            notes.say(f"CPU: none in this trace, {cpu_milli / 1000:g} cores a GPU")
        if not row.get("memory_mib"):
            notes.say(f"memory: none in this trace, {memory_mib} MiB a GPU")
        yield Task(
            name=f"philly-{line}",
            need=nodes.need(cpu_milli=own_cpu, memory_mib=own_memory, gpus=gpus),
            arrival=seconds(row, "submit", where) if row.get("submit") else 0.0,
            duration=seconds(row, "runtime", where),
        )


def per_gpu(nodes: Nodes) -> tuple[int, int]:
    """Milli-CPU and MiB that go with a GPU: half the share of the node that has least of either.

    Half, so that CPU and memory, of which the trace says nothing, are not what jobs wait for.
    """
    sized = [(rest, gpus) for rest, gpus in zip(nodes.rest, nodes.gpus, strict=True) if gpus]
    if not sized:
        return 1000, 1024
    cpu = min(rest[0] // gpus for rest, gpus in sized) // 2
    return max(WHOLE, cpu // 1000 * 1000), min(rest[1] // gpus for rest, gpus in sized) // 2


def seconds(row: Mapping[str, str], name: str, where: str) -> float:
    """Seconds of a row, not negative; UsageError with the place otherwise."""
    text = (row.get(name) or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and 0 <= value < 1e12):
        raise UsageError(f"{where}: {name} is {text!r}, which is no number of seconds from 0")
    return value
