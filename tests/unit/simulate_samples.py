"""Small clusters and workloads that tests of the simulator share."""

from __future__ import annotations

from collections.abc import Sequence

from crater_slurm.simulate.trace import Nodes, Notes, Task
from crater_slurm.simulate.workload import Workload, collect


def nodes(*gpus: int, cpus: int = 64, memory_mib: int = 1_000_000) -> Nodes:
    """Nodes of one GPU model, with so many GPUs each."""
    return Nodes(
        names=tuple(f"n{i}" for i in range(len(gpus))),
        gpus=gpus,
        models=(0,) * len(gpus),
        rest=((cpus * 1000, memory_mib),) * len(gpus),
        model_names=("a100",),
    )


def job(
    on: Nodes, arrival: float, gpus: int, runs: float, *, limit: float | None = None,
    milli: int = 1000, cpus: int = 1, wide: int = 1, name: str = "",
) -> Task:  # fmt: skip
    """A job that asks ``gpus`` a node of ``wide`` nodes, and by default the time that it runs."""
    need = on.need(cpu_milli=cpus * 1000, memory_mib=100, gpus=gpus, gpu_milli=milli)
    return Task(name, need, arrival, runs, runs if limit is None else limit, wide)


def work(tasks: Sequence[Task]) -> Workload:
    return collect(tasks, Notes(), lambda _: None)
