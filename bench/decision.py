"""One decision inside the scheduler, over the number of profiled nodes.

Compared with the plainest thing that could answer: looking at every node's profile in turn, as
the first version of any such filter does.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import time
from itertools import cycle, islice

from bench.table import quantile, show
from crater_slurm.lab import inventory as lab_inventory
from crater_slurm.model.cluster import SlurmCluster, SlurmNode
from crater_slurm.model.job import Job
from crater_slurm.model.plan import Mode
from crater_slurm.model.profile import NodeProfile
from crater_slurm.model.slices import slicing
from crater_slurm.placement import inventory, rules
from crater_slurm.placement.need import join
from crater_slurm.placement.planner import Planner
from crater_slurm.placement.sharing import Policy
from crater_slurm.scheduler.decide import Decider
from crater_slurm.scheduler.state import View

SIZES = (10, 100, 1000, 10_000)
REPEATS = 2000
REQUESTS = (
    "gpus=2 cpus=8 numa=strict gpu-memory=16GiB",
    "gpus=1 cpus=4 precision=bf16",
    "gpus=8 cpus=32 numa=strict memory-bandwidth=140",
    "cpus=16 avx=avx512 memory-bandwidth=100",
    "gpus=4 cpus=16 ssd-iops=800k ssd-latency=100us",
    "gpus=2 cpus=20 numa=strict",
    "gpus=16",
    "gpus=1 cpus=4 gpu-memory=8GiB gpu-sharing=yes",
)


def nodes(count: int) -> list[NodeProfile]:
    """``count`` nodes over the makes of the demo inventory, each measured: no two are equal."""
    kinds = [entry.profile for entry in lab_inventory.load("demo").entries]
    chance = random.Random(11)
    return [_measured(kind, f"n{i}", chance) for i, kind in enumerate(islice(cycle(kinds), count))]


def _measured(kind: NodeProfile, name: str, chance: random.Random) -> NodeProfile:
    """A node of this make whose measurements are a few per cent off, as real ones are."""

    def about(value: float | None) -> float | None:
        return None if value is None else value * chance.gauss(1, 0.02)

    numa_nodes = tuple(
        dataclasses.replace(n, memory_bandwidth_gb_s=about(n.memory_bandwidth_gb_s))
        for n in kind.numa_nodes
    )
    nvmes = tuple(
        dataclasses.replace(
            drive,
            random_read_iops=int(about(drive.random_read_iops) or 0) or None,
            read_latency_us=about(drive.read_latency_us),
        )
        for drive in kind.nvmes
    )
    cache = int(about(kind.cache_gb) or 0) or None
    return dataclasses.replace(kind, name=name, numa_nodes=numa_nodes, nvmes=nvmes, cache_gb=cache)


def view(profiles: list[NodeProfile]) -> View:
    cluster = SlurmCluster(
        name="bench",
        version=(24, 11),
        default_partition="gpu",
        gres_types=frozenset({"gpu", "shard", "membw", "nviops", "nvme"}),
        nodes=tuple(
            SlurmNode(name=p.name, partitions=frozenset({"gpu"}), state="idle", gres=gres_of(p))
            for p in profiles
        ),
        time=time.time(),
    )
    planner = Planner(inventory.build(cluster, profiles), sharing_policy=Policy())
    return View(cluster, planner, len(profiles))


def gres_of(profile: NodeProfile) -> dict[str, int]:
    """GPUs and their shards, as crater renders them."""
    shards = sum(slicing(gpu.memory_mib or 0).usable for gpu in profile.gpus)
    return {"gpu": len(profile.gpus), "shard": shards}


def message(words: str) -> dict[str, str]:
    script = f"#!/bin/bash\n#CRATER {words}\n"
    return {"op": "submit", "uid": "1000", "user": "u", "kind": "batch", "script": script}


def run() -> None:
    rows = []
    for size in SIZES:
        profiles = nodes(size)
        begin = time.perf_counter()
        current = view(profiles)
        built = time.perf_counter() - begin
        decider = Decider(mode=Mode.ENFORCE, key=lambda: b"k" * 32)
        times = _decisions(decider, current, fresh=False)
        cold = _decisions(decider, current, fresh=True)
        naive = _naive(profiles)
        rows.append(
            [
                f"{size:,}",
                f"{current.planner.inventory.makes}",
                *(f"{quantile(times, q) * 1e6:,.0f}" for q in (0.5, 0.99)),
                *(f"{quantile(cold, q) * 1e6:,.0f}" for q in (0.5, 0.99)),
                f"{quantile(naive, 0.5) * 1e6:,.0f}",
                f"{built * 1e3:,.0f}",
            ]
        )
    show(
        "One decision, µs (`python -m bench decision`)",
        [
            "nodes",
            "makes",
            "p50",
            "p99",
            "new need p50",
            "new need p99",
            "node by node p50",
            "picture rebuilt, ms",
        ],
        rows,
    )


def _decisions(decider: Decider, current: View, *, fresh: bool) -> list[float]:
    """Seconds of each decision; ``fresh`` needs were never asked before."""
    chooser = random.Random(7)
    for words in REQUESTS:
        decider.decide(message(words), current)
    gc.collect()
    gc.freeze()
    times = []
    for i in range(REPEATS if not fresh else REPEATS // 4):
        words = chooser.choice(REQUESTS)
        if fresh:
            words += f" cache={i % 4000 + 1}GB"
        text = message(words)
        begin = time.perf_counter()
        decider.decide(text, current)
        times.append(time.perf_counter() - begin)
    return times


def _naive(profiles: list[NodeProfile]) -> list[float]:
    from crater_slurm.model.directives import parse_script

    times = []
    for words in REQUESTS:
        request = parse_script(f"#CRATER {words}\n").request
        need = join(request, Job(user_id=1)).need
        begin = time.perf_counter()
        for profile in profiles:
            rules.evaluate(profile, need)
        times.append(time.perf_counter() - begin)
    return times
