"""All stages of a decision as the scheduler runs them, on a large and busy cluster.

10,000 nodes of 300 makes, 50,000 running jobs, every stage on: rules, health, prediction corrected
by seen peaks, score, and what jobs strand, whose picture is taken anew in another thread meanwhile.
Beside it the same submissions with the rules alone. In a process of its own, whose memory is told.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

from bench.decision import gres_of, message, nodes
from bench.table import quantile, show
from crater_slurm.model.cluster import NodeUse, SlurmCluster, SlurmNode
from crater_slurm.model.observation import Observation, key_of
from crater_slurm.model.plan import Mode
from crater_slurm.model.profile import NodeProfile
from crater_slurm.model.workload import Workload
from crater_slurm.placement import inventory
from crater_slurm.placement.planner import Planner
from crater_slurm.placement.sharing import Policy
from crater_slurm.scheduler.decide import Decider
from crater_slurm.scheduler.predicting import Predictor
from crater_slurm.scheduler.preferring import Preferring
from crater_slurm.scheduler.state import View

NODES, MAKES, JOBS, REPEATS = 10_000, 300, 50_000, 6000
REQUESTS = (
    "gpus=2 cpus=8 numa=strict gpu-memory=16GiB",
    "gpus=1 cpus=4 model=Llama-3-8B method=lora framework=torchtune micro-batch=2",
    "gpus=8 cpus=32 model=Llama-3-70B method=qlora framework=unsloth micro-batch=1",
    "cpus=16 avx=avx512 memory-bandwidth=100",
    "gpus=4 cpus=16 ssd-iops=800k ssd-latency=100us",
    "gpus=1 cpus=4 gpu-memory=8GiB gpu-sharing=yes",
    "gpus=4 model=Qwen-7B method=full sharding=zero2 cpus=24",
)


def run() -> None:
    """Print the table of a run in another process."""
    subprocess.run([sys.executable, "-m", "bench.daemon"], check=True)


def _cluster() -> tuple[View, dict[str, NodeProfile], dict[str, NodeUse]]:
    chance = random.Random(5)
    profiles = []
    for i, profile in enumerate(nodes(NODES)):
        cores = profile.cpu.cores_per_socket
        # Another size of memory is another make: a site's purchases differ by such things.
        memory = (profile.memory_mib or 0) + 1024 * (i % MAKES)
        cpu = dataclasses.replace(profile.cpu, model=f"{profile.cpu.model} #{i % MAKES}")
        profiles.append(dataclasses.replace(profile, memory_mib=memory, cpu=cpu))
        assert cores
    used = {}
    for profile in profiles:
        jobs = JOBS // NODES
        gpus = min(len(profile.gpus), chance.randint(0, jobs))
        used[profile.name] = NodeUse(cpus=4 * jobs, memory_mib=8192 * jobs, gres={"gpu": gpus})
    cluster = SlurmCluster(
        name="bench",
        version=(24, 11),
        default_partition="gpu",
        gres_types=frozenset({"gpu", "shard", "membw", "nviops", "nvme"}),
        nodes=tuple(
            SlurmNode(
                name=p.name,
                partitions=frozenset({"gpu"}),
                state="mixed",
                gres=gres_of(p),
                features=frozenset({f"gpu_{p.gpus[0].model}"} if p.gpus else {"cpu"}),
            )
            for p in profiles
        ),
        time=time.time(),
    )
    built = inventory.build(cluster, profiles)
    view = View(cluster, Planner(built, sharing_policy=Policy()), len(profiles))
    return view, {p.name: p for p in profiles}, used


@functools.cache
def _seen(key: str, model: str) -> tuple[Observation, ...]:
    return tuple(
        Observation(
            job_id=n, plan_id="p", node="n1", time=float(n), seconds=900.0, ended=True, samples=9,
            key=key, workload={"model": model}, gpu_memory_peak_mib=20_000 + n,
        )
        for n in range(16)
    )  # fmt: skip


def _peaks(workload: Workload) -> tuple[Observation, ...]:
    """Sixteen jobs of the same kind, as an index of the scheduler keeps them."""
    return _seen(key_of(workload), workload.model or "")


def _times(decider: Decider, view: View) -> list[float]:
    chooser = random.Random(3)
    for words in REQUESTS:
        decider.decide(message(words), view)
    gc.collect()
    found = []
    for _ in range(REPEATS):
        asked = message(chooser.choice(REQUESTS))
        begin = time.perf_counter()
        decider.decide(asked, view)
        found.append(time.perf_counter() - begin)
        time.sleep(0.001)  # other threads have their turn, as between two submissions
    return found


def _main() -> None:
    sys.setswitchinterval(0.0005)
    view, profiles, used = _cluster()
    gc.collect()
    gc.freeze()
    plain = Decider(mode=Mode.ENFORCE, key=lambda: b"k" * 32)
    preferring = Preferring(
        lambda: view, lambda: profiles, lambda: used, share=0.5, tolerance=0.05, seconds=5
    )

    def prefer(outcome, there):  # type: ignore[no-untyped-def]
        preferring.learn(outcome, there.planner.inventory)
        return preferring.look(outcome, there.planner.inventory)

    whole = dataclasses.replace(plain, predict=Predictor(_peaks), preferring=prefer)
    rows = []
    alone = _times(plain, view)
    rest = _times(whole, view)
    stop = threading.Event()

    def pictures() -> None:
        while not stop.is_set():
            begin = time.perf_counter()
            preferring.refresh()
            took.append(time.perf_counter() - begin)

    took: list[float] = []
    thread = threading.Thread(target=pictures, daemon=True)
    thread.start()
    beside = _times(whole, view)
    stop.set()
    thread.join()
    for name, times in (
        ("rules alone", alone),
        ("all stages", rest),
        ("all stages, pictures taken without pause beside", beside),
    ):
        rows.append([name, *(f"{quantile(times, q) * 1e6:,.0f}" for q in (0.5, 0.99, 1))])
    # Not ru_maxrss, which begins with that of the process that started this one.
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    makes = view.planner.inventory.makes
    show(
        f"A decision in the daemon, µs: {NODES:,} nodes, {makes} makes, {JOBS:,} running jobs "
        "(`python -m bench daemon`)",
        ["", "p50", "p99", "longest"],
        rows,
    )
    print(f"Memory at its highest {peak:,.0f} MiB; a picture of the cluster takes "
          f"{quantile(took, 0.5):.2f} s.\n")  # fmt: skip


if __name__ == "__main__":
    _main()
