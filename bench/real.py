"""A published trace on a real slurmctld: what Slurm itself allocates, stock, well configured, and
with crater enforcing.

The fill-up of ``bench placement``, but every task asks a slurmctld that has the trace's nodes
(without slurmd: jobs are allocated and never start) for its allocation. What can't be had at once
is dropped, as the published method does. Slurm gives whole cores and 32nds of a card, so needs are
rounded up to those, and the simulator is shown with the same rounding beside it.
``CRATER_BENCH_NODES=8`` takes each eighth node, ``CRATER_BENCH_SEEDS`` the first seed of several,
``CRATER_BENCH_CASES=3`` that way to run Slurm alone. A case takes 20 minutes, nearly all of them
salloc's waiting for slurmctld, so that several processes can share the cases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from bench.placement import _FOLDER
from bench.table import show
from crater_slurm.lab import Lab
from crater_slurm.placement.packing.kernels import WHOLE
from crater_slurm.placement.packing.score import fragmented
from crater_slurm.placement.packing.state import ANY_MODEL, Cluster, Mix, Need
from crater_slurm.simulate.fill import arrivals, fill
from crater_slurm.simulate.trace import Nodes, Task, openb_nodes, openb_tasks
from crater_slurm.slurm import hostlist

_LOAD = 1.3
_SLICES = 32
#: The trace has no GPU memory; a card of this size has 32 slices of 1 GiB.
_CARD_MIB = 32768
_RELEASE = "24.11"  # 22.05 does not tell on which card shards are
_AVX = ["avx", "avx2"]
#: slurmctld takes minutes to read the shards of 1,213 nodes.
_START_SECONDS = 1800.0

#: Asks for each line's allocation in turn, at once or not at all, and prints its node. A batch job
#: would wait for the next round of the scheduler; salloc would wait for nodes that never come, so
#: it is killed as soon as it has said what it got, and Slurm keeps the allocation. Slurm tries a
#: new job on the preferred nodes alone, and in its next round on the others too. Here that second
#: look comes at once: what pends is asked for again with --immediate, which prefers nothing.
_FEED = """
import json, re, subprocess, sys

def said(*argv):
    return subprocess.run(argv, capture_output=True, text=True).stdout.strip()

def asked(*argv):
    argv = ["salloc", "--no-shell", *argv]
    child = subprocess.Popen(argv, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    words, found = "", None
    for text in child.stderr:
        words += text
        if found := re.search("(Granted|Pending) job allocation ([0-9]+)", text):
            break
    child.kill()
    child.wait()
    if found and found.group(1) == "Granted":
        return found.group(2), ""
    if found:
        said("scancel", found.group(2))
    return None, words[-300:]

for line in open(sys.argv[1]):
    job, words = asked(*json.loads(line))
    if not job and "Pending" in words:
        job, words = asked("--immediate", *json.loads(line))
    node = said("squeue", "-h", "-j", job, "-o", "%N") if job else ""
    print(json.dumps([node, words]), flush=True)
"""
_NO_ROOM = ("Requested nodes are busy", "temporarily unavailable", "Unable to allocate resources")


@dataclass(frozen=True)
class Case:
    """One way to run Slurm: with shards, with more in slurm.conf, with crater."""

    title: str
    shards: bool = True
    crater: bool = False
    weights: bool = False
    conf: dict[str, str] = field(default_factory=dict)


_CASES = (
    Case("stock Slurm: a share is a whole GPU", shards=False),
    Case("Slurm with shards"),
    Case(
        "Slurm with shards, weights (fewest GPUs first) and bf_busy_nodes",
        weights=True,
        conf={
            "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1,"
            "bf_busy_nodes",
            "SelectTypeParameters": "CR_Core_Memory,CR_PACK_NODES",
        },
    ),
    Case("Slurm with shards, crater enforcing", crater=True),
    Case("Slurm with shards, crater enforcing, its weights", crater=True, weights=True),
)


def run() -> None:
    if not (_FOLDER / "published_allo.csv").exists():
        print(f"real: skipped, there are no openb traces in {_FOLDER} (CRATER_TEST_DATA)\n")
        return
    trace = os.environ.get("CRATER_BENCH_TRACES", "default").split(",")[0]
    seed = int(os.environ.get("CRATER_BENCH_SEEDS", "42").split("-")[0])
    whole = openb_nodes(_FOLDER / "openb_node_list_gpu_node.csv")
    nodes = whole.every(int(os.environ.get("CRATER_BENCH_NODES", "1")))
    asked = list(openb_tasks(_FOLDER / f"openb_pod_list_{trace}.csv", nodes))
    tasks = [dataclasses.replace(task, need=rounded(task.need)) for task in asked]
    rows = []
    for title, policy, of in (
        ("simulator, Slurm's order", "slurm", tasks),
        ("simulator, Slurm's order, the trace as it is", "slurm", asked),
        ("simulator, Slurm's order with weights", "slurm-weights", tasks),
        ("simulator, crater preferring", "crater-prefer-unweighted", tasks),
        ("simulator, crater preferring, with weights", "crater-prefer", tasks),
        ("simulator, crater naming any node", "crater", tasks),
    ):
        found = fill(of, nodes, policy, share=_LOAD, seed=seed)
        rows.append(
            [title, f"{found.placed}", f"{found.allocation:.2f}", f"{found.fragmented:.1f}", ""]
        )
    wanted = os.environ.get("CRATER_BENCH_CASES", "0,1,2,3,4").split(",")
    for case in (_CASES[int(n)] for n in wanted):
        rows.append(_on_slurm(case, tasks, nodes, seed))
        print(" | ".join(rows[-1]), flush=True)
    show(
        f"{trace} on {len(nodes.names)} nodes at {_LOAD:.0%} arrived load, seed {seed}, "
        f"slurmctld {_RELEASE} (`python -m bench real`)",
        ["", "placed", "GPU allocation, %", "of the idle GPU fragmented, %", "ms per job"],
        rows,
    )


def rounded(need: Need) -> Need:
    """What Slurm can be asked for: whole cores, at least one, and 32nds of a card."""
    cores = max(1, -(-need.take[0] // 1000))
    milli = need.milli
    if 0 < milli < WHOLE:
        milli = -(-WHOLE * _shards(need) // _SLICES)
    return dataclasses.replace(need, milli=milli, take=(cores * 1000, *need.take[1:]))


def _shards(need: Need) -> int:
    return -(-need.milli * _SLICES // WHOLE)


def _on_slurm(case: Case, tasks: Sequence[Task], nodes: Nodes, seed: int) -> list[str]:
    needs = arrivals(tasks, nodes.cluster().total, _LOAD, seed)
    with tempfile.TemporaryDirectory() as folder:
        inventory = Path(folder) / "openb.yaml"
        inventory.write_text(yaml.safe_dump({"nodes": list(_entries(nodes))}))
        sharing = {"allow": "shard" if case.shards else "off", "reserve": 0}
        lab = Lab(
            name=f"real{_CASES.index(case)}",  # so that cases can run side by side
            slurm=_RELEASE,
            inventory=str(inventory),
            controller_only=True,
            cloud=True,
            crater=case.crater,
            weights=case.weights,
            crater_conf={"sharing": sharing},
            slurm_conf=case.conf,
        )
        with contextlib.ExitStack() as stack:
            lab.up(timeout=_START_SECONDS)
            stack.callback(lab.down)
            begin = time.monotonic()
            answers = _feed(lab, [_options(need, case, nodes) for need in needs])
            spent = time.monotonic() - begin
            rest = _rest(nodes, needs, [node for node, _ in answers], case)
    placed = [n for n, (node, _) in zip(needs, answers, strict=True) if node]
    allocation = 100 * sum(need.gpu for need in placed) / rest.total
    mix = Mix.target(Counter(task.need for task in tasks))
    return [
        case.title,
        f"{len(placed)}",
        f"{allocation:.2f}",
        f"{100 * fragmented(rest, mix):.1f}",
        f"{1e3 * spent / len(needs):.0f}",
    ]


def _entries(nodes: Nodes) -> Iterator[dict[str, Any]]:
    """Nodes of one make that stand together, as a lab's inventory has them."""
    numbered = enumerate(zip(nodes.gpus, nodes.models, nodes.rest, strict=True), start=1)
    for (gpus, model, rest), group in groupby(numbered, key=lambda pair: pair[1]):
        names = [f"n{number:04d}" for number, _ in group]
        yield {
            "name": hostlist.compress(names),
            "profile": _profile(gpus, nodes.model_names[model], rest[0] // 1000, rest[1]),
        }


def _profile(gpus: int, model: str, cores: int, memory_mib: int) -> dict[str, Any]:
    one = {"id": 0, "cpus": f"0-{cores - 1}", "socket": 0, "memory_mib": memory_mib}
    return {
        "memory_mib": memory_mib,
        "cpu": {
            "model": "of the trace",
            "arch": "x86_64",
            "sockets": 1,
            "cores_per_socket": cores,
            "threads_per_core": 1,
            "avx": _AVX,
        },
        "numa_nodes": [{**one, "distances": [10]}],
        "gpus": [
            {
                "index": i,
                "numa_node": 0,
                "pci_bus_id": f"0000:{i + 1:02x}:00.0",
                "model": model.lower(),
                "gres_type": model.lower(),
                "memory_mib": _CARD_MIB,
            }
            for i in range(gpus)
        ],
    }


def _options(need: Need, case: Case, nodes: Nodes) -> list[str]:
    """sbatch's arguments for a need."""
    cores, memory = need.take[0] // 1000, need.take[1]
    options = [f"--mem={memory}", "-n1", "-N1"]
    if need.allowed != ANY_MODEL:
        models = (m for i, m in enumerate(nodes.model_names) if need.allowed >> i & 1)
        options.append("--constraint=" + "|".join(f"gpu_{m.lower()}" for m in models))
    share = 0 < need.milli < WHOLE
    if share and case.shards:
        options.append(f"--gres=shard:{_shards(need)}")
    elif need.count and not case.crater:
        options.append(f"--gres=gpu:{need.count}")
    if not case.crater:
        return [*options, f"-c{cores}"]
    wish = f"crater: cpus={cores}" + (f" gpus={need.count}" if need.count and not share else "")
    return [*options, f"--comment={wish}"]


def _feed(lab: Lab, jobs: Sequence[list[str]]) -> list[tuple[str, str]]:
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    (lab.home() / "jobs").write_text(lines)
    (lab.home() / "feed.py").write_text(_FEED)
    for file in ("jobs", "feed.py"):
        (lab.home() / file).chmod(0o644)
    done = lab.run(["python3", "feed.py", "jobs"], timeout=6 * 3600, check=True)
    answers = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    refused = [text for node, text in answers if not node and not any(w in text for w in _NO_ROOM)]
    if refused:
        print(f"{len(refused)} refused, such as: {refused[0]}")
    return answers


def _rest(nodes: Nodes, needs: Sequence[Need], where: Sequence[str], case: Case) -> Cluster:
    """The cluster as Slurm left it. Which cards it gave is not told by every release, so each
    node's needs are packed on its cards again, the largest first; a share that then has no card
    (Slurm's were packed otherwise) is told and counts on none."""
    cluster, lost = nodes.cluster(), 0
    there = [(need, name) for need, name in zip(needs, where, strict=True) if name]
    for need, name in sorted(there, key=lambda one: -one[0].gpu):
        taken = need
        if need.count and not case.shards:
            taken = dataclasses.replace(need, milli=WHOLE)
        try:
            cluster.place(taken, int(name[1:]) - 1, None)
        except ValueError:
            lost += 1
    if lost:
        print(f"{lost} of {len(there)} could not be packed on their nodes' cards again")
    return cluster
