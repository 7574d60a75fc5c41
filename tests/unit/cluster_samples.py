"""Small clusters for the tests of placement and of the scheduler, built from a few numbers.

``node`` is a machine of two sockets with 16 cores each, four 40 GB GPUs (two beside each socket),
142 and 138.7 GB/s, one NVMe drive and a cache; every number can be said otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from crater_slurm.model.cluster import SlurmCluster, SlurmNode
from crater_slurm.model.directives import parse_script
from crater_slurm.model.job import GpuOption, GpuScope, Job
from crater_slurm.model.plan import Mode
from crater_slurm.model.profile import (
    Cpu,
    Gpu,
    Method,
    NodeProfile,
    NumaNode,
    Nvme,
    Provenance,
)
from crater_slurm.placement import inventory
from crater_slurm.placement.outcome import Outcome, Scope
from crater_slurm.placement.planner import Planner
from crater_slurm.placement.sharing import Policy
from crater_slurm.scheduler.decide import Answer, Decider
from crater_slurm.scheduler.state import View

KEY = bytes(range(32))
AMPERE = frozenset({"fp32", "tf32", "fp16", "bf16", "int8"})
TURING = frozenset({"fp32", "fp16", "int8"})
AVX512 = frozenset({"avx", "avx2", "avx512f"})
AVX2 = frozenset({"avx", "avx2"})
GIB = 1024


def gpus(
    *numa: int | None,
    model: str = "a100-pcie-40gb",
    gres_type: str | None = "a100",
    memory_mib: int | None = 40 * GIB,
    precisions: frozenset[str] | None = AMPERE,
    first: int = 0,
) -> tuple[Gpu, ...]:
    """Equal GPUs, one for each NUMA node named."""
    return tuple(
        Gpu(
            index=first + i,
            model=model,
            gres_type=gres_type,
            numa_node=where,
            memory_mib=memory_mib,
            precisions=precisions,
        )
        for i, where in enumerate(numa)
    )


def node(
    name: str = "n1",
    *,
    cards: tuple[Gpu, ...] | None = None,
    numa: int = 2,
    sockets: int = 2,
    cores: int = 16,
    threads: int = 1,
    bandwidth: Sequence[float | None] = (142, 138.7),
    memory_gib: int | None = 128,
    avx: frozenset[str] | None = AVX512,
    iops: int | None = 900_000,
    latency_us: float | None = 80,
    nvme: bool = True,
    cache_gb: int | None = 3000,
    method: Method = Method.MEASURED,
) -> NodeProfile:
    """A machine of ``numa`` NUMA nodes with ``cores`` cores each; ``memory_gib`` is of each too."""
    size = cores * threads
    memory = None if memory_gib is None else memory_gib * GIB
    values = list(itertools.islice(itertools.cycle(bandwidth), numa)) if bandwidth else []
    return NodeProfile(
        name=name,
        cpu=Cpu(
            sockets=sockets,
            cores_per_socket=numa * cores // sockets,
            threads_per_core=threads,
            avx=avx,
        ),
        numa_nodes=tuple(
            NumaNode(
                id=i,
                cpus=tuple(range(i * size, (i + 1) * size)),
                socket=i * sockets // numa,
                memory_mib=memory,
                memory_bandwidth_gb_s=values[i] if values else None,
                distances=tuple(10 if i == k else 20 for k in range(numa)),
            )
            for i in range(numa)
        ),
        gpus=gpus(0, 0, 1, 1) if cards is None else cards,
        nvmes=(Nvme(name="nvme0n1", random_read_iops=iops, read_latency_us=latency_us),)
        if nvme
        else (),
        memory_mib=None if memory is None else memory * numa,
        cache_gb=cache_gb,
        source=Provenance(method),
    )


def mixed(name: str = "m1") -> NodeProfile:
    """Two 40 GB GPUs beside NUMA node 0 and two 16 GB ones beside NUMA node 1."""
    small = gpus(1, 1, model="t4", gres_type="t4", memory_mib=15 * GIB, precisions=TURING, first=2)
    return node(name, cards=gpus(0, 0) + small)


def cluster(
    profiles: Iterable[NodeProfile],
    *,
    names: Iterable[str] = (),
    partitions: dict[str, str] | None = None,
    states: dict[str, str] | None = None,
    features: dict[str, set[str]] | None = None,
    shards: dict[str, int] | None = None,
    sizes: dict[str, tuple[int, int]] | None = None,
) -> SlurmCluster:
    """Slurm's view of these machines, and of ``names`` of which nobody knows the hardware."""
    everyone = [p.name for p in profiles] + list(names)
    return SlurmCluster(
        name="test",
        version=(24, 11),
        default_partition="gpu",
        gres_types=frozenset({"gpu", "membw", "nviops", "nvme"}),
        time=0.0,
        nodes=tuple(
            SlurmNode(
                name=name,
                partitions=frozenset({(partitions or {}).get(name, "gpu")}),
                state=(states or {}).get(name, "idle"),
                features=frozenset((features or {}).get(name, ())),
                gres={"shard": shards[name]} if shards and name in shards else {},
                cores=sizes[name][0] if sizes and name in sizes else None,
                memory_mib=sizes[name][1] if sizes and name in sizes else None,
            )
            for name in everyone
        ),
    )


def view(
    *profiles: NodeProfile,
    allow_declared: bool = True,
    policy: Policy | None = None,
    **options: Any,
) -> View:
    """What the scheduler has in memory for these machines."""
    there = cluster(profiles, **options)
    built = inventory.build(there, profiles, allow_declared=allow_declared)
    return View(there, Planner(built, sharing_policy=policy), len(profiles))


def option(count: int, type_: str | None = None, scope: GpuScope = GpuScope.NODE) -> GpuOption:
    """GPUs as a Slurm option asks for them."""
    return GpuOption(scope, count, type_)


def plan(words: str, *profiles: NodeProfile, scope: Scope | None = None, **job: Any) -> Outcome:
    """Outcome for directives and options on these machines."""
    planner = view(*profiles).planner
    return replan(planner, words, scope=scope, **job)


def replan(planner: Planner, words: str, scope: Scope | None = None, **job: Any) -> Outcome:
    """The same on a planner that exists."""
    request = parse_script(f"#CRATER {words}").request
    return planner.plan("p1", request, Job(user_id=1000, **job), scope or Scope())


def message(words: str | None = None, **fields: str) -> dict[str, str]:
    """What the filter sends for a batch job with these directives and job_desc fields."""
    found = {"op": "submit", "uid": "1000", "user": "ada", "kind": "batch", "gres_style": "/"}
    if words is not None:
        found["script"] = f"#!/bin/bash\n#CRATER {words}\nsrun train\n"
    return found | {f"field.{name}": value for name, value in fields.items()}


def decider(mode: Mode = Mode.ENFORCE, key: bytes | None = KEY) -> Decider:
    """A decider with a clock that stands and ids that repeat."""
    return Decider(mode=mode, key=lambda: key, clock=lambda: 1_700_000_000.0, new_id=lambda: "p1")


def decide(
    words: str | None, *profiles: NodeProfile, mode: Mode = Mode.ENFORCE, **fields: str
) -> Answer:
    """Answer to one submission on these machines."""
    return decider(mode).decide(message(words, **fields), view(*profiles))
