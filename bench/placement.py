"""Placement on the published openb traces: each policy's GPU allocation beside the published one.

Fill-ups until 130 % of the cluster's GPU was asked for, mean over seeds, and the time of one
decision. ``CRATER_BENCH_SEEDS`` (``42-51``), ``CRATER_BENCH_TRACES`` and ``CRATER_BENCH_POLICIES``
(names with commas between) ask for fewer.
"""

from __future__ import annotations

import csv
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.table import quantile, show
from crater_slurm.placement.packing.compiled import COMPILED
from crater_slurm.placement.packing.state import Mix
from crater_slurm.simulate.fill import arrivals, fill
from crater_slurm.simulate.policies import POLICIES
from crater_slurm.simulate.trace import Nodes, Task, openb_nodes, openb_tasks

_DATA = Path(os.environ.get("CRATER_TEST_DATA") or Path(__file__).parents[2] / "shared/data")
_FOLDER = _DATA / "traces/openb"
_TRACES = ("default", "cpu050", "gpushare40", "multigpu20", "gpuspec33")
_LOAD = 1.3


def run() -> None:
    if not (_FOLDER / "published_allo.csv").exists():
        print(f"placement: skipped, there are no openb traces in {_FOLDER} (CRATER_TEST_DATA)\n")
        return
    seeds = _seeds(os.environ.get("CRATER_BENCH_SEEDS", "42-51"))
    traces = _names("CRATER_BENCH_TRACES", _TRACES)
    policies = _names("CRATER_BENCH_POLICIES", tuple(POLICIES))
    nodes = openb_nodes(_FOLDER / "openb_node_list_gpu_node.csv")
    published = _published()
    for trace in traces:
        tasks = list(openb_tasks(_FOLDER / f"openb_pod_list_{trace}.csv", nodes))
        rows = []
        for policy in policies:
            known = published.get((trace, POLICIES[policy].published or ""), [])
            rows.append(_row(policy, tasks, nodes, seeds, known))
        show(
            f"{trace}: GPU allocation in % at {_LOAD:.0%} arrived load, "
            f"seeds {seeds[0]}-{seeds[-1]} (`python -m bench placement`)",
            ["policy", "published", "here", "difference", "its standard error", "lowest", "highest",
             "s per fill-up"],
            rows,
        )  # fmt: skip
    _decisions(nodes)


def _row(
    policy: str,
    tasks: Sequence[Task],
    nodes: Nodes,
    seeds: Sequence[int],
    published: Sequence[float],
) -> list[str]:
    begin = time.process_time()
    found = [fill(tasks, nodes, policy, share=_LOAD, seed=seed).allocation for seed in seeds]
    spent = (time.process_time() - begin) / len(seeds)
    mean = statistics.mean(found)
    known, beside = "", ["", ""]
    if published:
        known = f"{statistics.mean(published):.2f}"
        error = math.hypot(_error(published), _error(found))
        beside = [f"{mean - statistics.mean(published):+.2f}", f"{error:.2f}"]
    extremes = [f"{min(found):.2f}", f"{max(found):.2f}"]
    row = [policy, known, f"{mean:.2f}", *beside, *extremes, f"{spent:.1f}"]
    print(" ".join(row), flush=True)
    return row


def _error(values: Sequence[float]) -> float:
    """Standard error of their mean; the order of arrivals and of the nodes is chance."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _published() -> dict[tuple[str, str], list[float]]:
    """Of each published seed, by trace and policy, at the load that is replayed here."""
    found: dict[tuple[str, str], list[float]] = {}
    with (_FOLDER / "published_allo.csv").open(newline="") as opened:
        for row in csv.DictReader(opened):
            trace = row["workload"].removeprefix("openb_pod_list_")
            found.setdefault((trace, row["sc_policy"]), []).append(float(row[f"{100 * _LOAD:.0f}"]))
    return found


def _decisions(nodes: Nodes) -> None:
    """The time of one decision, and of making the mix anew, which is outside of it."""
    tasks = list(openb_tasks(_FOLDER / "openb_pod_list_default.csv", nodes))
    mix = Mix.target(Counter(task.need for task in tasks))
    rows = []
    for name in ("bestfit", "fgd", "crater", "crater-learning"):
        cluster = nodes.cluster()
        policy = POLICIES[name].make(cluster, mix, np.random.default_rng(0))
        choosing, learning = [], []
        for need in arrivals(tasks, cluster.total, _LOAD, 42):
            begin = time.thread_time_ns()
            policy.arrived(need)
            learnt = time.thread_time_ns()
            choice = policy.choose(need)
            choosing.append((time.thread_time_ns() - learnt) / 1e3)
            learning.append((learnt - begin) / 1e3)
            if choice is not None:
                cluster.place(need, *choice)
                policy.placed(need, choice[0])
        del choosing[0]  # the first compiles, or loads what was compiled
        figures = [statistics.mean(choosing), statistics.median(choosing), quantile(choosing, 0.99)]
        rows.append([name, *(f"{x:.0f}" for x in (*figures, max(choosing), max(learning)))])
    how = "compiled" if COMPILED else "plain Python (numba is not installed)"
    show(
        f"One decision over {len(nodes.names)} nodes, us of CPU, {how}",
        ["policy", "mean", "median", "p99", "longest", "longest to learn a mix"],
        rows,
    )


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def _names(variable: str, known: tuple[str, ...]) -> tuple[str, ...]:
    asked = tuple(name for name in os.environ.get(variable, "").split(",") if name)
    if unknown := [name for name in asked if name not in known]:
        raise SystemExit(f"{variable}: {unknown[0]} is unknown; there are {', '.join(known)}")
    return asked or known
