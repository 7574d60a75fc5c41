"""What simulations came to, as JSON, as rows of CSV, and as the table that is printed."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crater_slurm.simulate.replay import Replayed
from crater_slurm.simulate.study import Filled, Plan, Run
from crater_slurm.simulate.trace import Nodes, Trace

#: Jobs by the GPUs that they ask, of all their nodes.
SIZES = ("none", "share", "1", "2-3", "4-7", "8 or more")
#: Columns of the CSV file; a row is one measure at one place of one curve.
CSV_COLUMNS = ("policy", "requests", "load", "seed", "x", "measure", "value")


def as_json(
    name: str, trace: Trace, nodes: Nodes, plan: Plan, runs: Sequence[Run]
) -> dict[str, Any]:
    """All of it. Shares are in %, times in seconds; docs/simulate.md says what each key is."""
    return {
        "trace": name,
        "format": trace.format,
        "mode": "replay" if plan.fill is None else "fill",
        "fill": plan.fill,
        "nodes": {"count": len(nodes.names), "gpus": sum(nodes.gpus), "counted": list(nodes.kinds)},
        "assumed": trace.notes.lines(),
        "runs": [_run(run) for run in runs],
    }


def _run(run: Run) -> dict[str, Any]:
    seeds = [filled_values(one) for one in run.fills]
    for one, offered in zip(run.replays, run.offered, strict=True):
        seeds.append({"seed": one.seed, "offered": _round(100 * offered), **replay_values(one)})
    mean = {name: _mean([s[name] for s in seeds]) for name in seeds[0] if name != "seed"}
    return {
        "policy": run.policy,
        "requests": run.requests,
        "load": run.load,
        "seeds": seeds,
        "mean": mean,
    }


def _mean(values: Sequence[Any]) -> Any:
    """Mean of numbers; of tables, the mean of each entry where it is."""
    if not isinstance(values[0], dict):
        return _round(float(np.mean(values)))
    names = dict.fromkeys(name for value in values for name in value)
    return {name: _mean([v[name] for v in values if name in v]) for name in SIZES if name in names}


def filled_values(one: Filled) -> dict[str, Any]:
    """Figures of one fill-up."""
    return {
        "seed": one.fill.seed,
        "allocation": _round(one.fill.allocation),
        "fragmented": _round(one.fill.fragmented),
        "arrived": one.fill.arrived,
        "placed": one.fill.placed,
    }


def replay_values(one: Replayed) -> dict[str, Any]:
    """Figures of one replay."""
    waits = one.waits if len(one.waits) else np.zeros(1)
    median, most = np.percentile(waits, [50, 95])
    return {
        "jobs": one.jobs,
        "counted": len(one.waits),
        "mean_wait_s": _round(float(waits.mean())),
        "median_wait_s": _round(float(median)),
        "p95_wait_s": _round(float(most)),
        "max_wait_s": _round(float(waits.max())),
        "mean_wait_s_by_gpus": waits_by_gpus(one),
        "at_once": _round(100 * float((waits == 0).mean())),
        "allocated": _round(one.mean("allocated")),
        "used": _round(one.mean("used")),
        "cpu": _round(one.mean("cpu")),
        "fragmented": _round(one.mean("fragmented")),
        "span_s": _round(one.span),
        "makespan_s": _round(one.makespan),
    }


def waits_by_gpus(one: Replayed) -> dict[str, float]:
    """Mean wait of the jobs of each size in SIZES that there are."""
    edges = [1, 1000, 2000, 4000, 8000]
    place = np.searchsorted(edges, one.milli, side="right")
    return {
        name: _round(float(one.waits[place == i].mean()))
        for i, name in enumerate(SIZES)
        if (place == i).any()
    }


def _round(value: float) -> float:
    return round(value, 4)


def write_csv(file: Path, runs: Sequence[Run]) -> None:
    """The curves, in rows of CSV_COLUMNS."""
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow(CSV_COLUMNS)
        for run in runs:
            load = "" if run.load is None else run.load
            for seed, x, measure, value in _points(run):
                row = (run.policy, run.requests, load, seed, _round(x), measure, _round(value))
                writer.writerow(row)


def _points(run: Run) -> Iterator[tuple[int, float, str, float]]:
    for filled in run.fills:
        for x, value in filled.fill.curve:
            yield filled.fill.seed, x, "allocation", value
        for x, value in filled.fragments:
            yield filled.fill.seed, x, "fragmented", value
    for replayed in run.replays:
        for sample in replayed.samples:
            for name in ("allocated", "used", "cpu", "fragmented", "waiting"):
                yield replayed.seed, sample.time, name, getattr(sample, name)


def table(runs: Sequence[Run], plan: Plan) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Titles and rows: one row a run, means over the seeds."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        found = _run(run)
        mean, seeds = found["mean"], found["seeds"]
        first = (run.policy, run.requests)
        if plan.fill is not None:
            allocations = [seed["allocation"] for seed in seeds]
            rows.append((
                *first, f"{mean['allocation']:.2f}",
                f"{min(allocations):.2f} - {max(allocations):.2f}", f"{mean['fragmented']:.1f}",
                f"{mean['placed']:,.0f} of {mean['arrived']:,.0f}",
            ))  # fmt: skip
        else:
            rows.append((
                *first, f"{mean['offered']:.1f}", duration(mean["mean_wait_s"]),
                duration(mean["median_wait_s"]), duration(mean["p95_wait_s"]),
                f"{mean['allocated']:.1f}", f"{mean['used']:.1f}", f"{mean['cpu']:.1f}",
                f"{mean['fragmented']:.1f}", duration(mean["makespan_s"]),
            ))  # fmt: skip
    if plan.fill is not None:
        return ("POLICY", "REQUESTS", "ALLOCATED %", "SEEDS", "FRAGMENTED %", "PLACED"), rows
    titles = (
        "POLICY", "REQUESTS", "LOAD %", "MEAN WAIT", "MEDIAN", "95 %", "GPU %", "USED %", "CPU %",
        "FRAGMENTED %", "MAKESPAN",
    )  # fmt: skip
    return titles, rows


def duration(seconds: float) -> str:
    """``0 s``, ``12.5 s``, ``3.2 min``, ``4.5 h``, ``2.1 d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"
