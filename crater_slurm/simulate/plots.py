"""Draws simulations with matplotlib, as PNG and SVG; an extra, so its absence is said in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crater_slurm.errors import UsageError
from crater_slurm.simulate.results import duration
from crater_slurm.simulate.study import Filled, Plan, Run
from crater_slurm.simulate.trace import Nodes

#: Colours that people with any colour vision tell apart (Okabe and Ito); others are brown.
COLOURS = {
    "crater": "#D55E00", "fgd": "#0072B2", "bestfit": "#009E73", "packing": "#CC79A7",
    "clustering": "#E69F00", "dotprod": "#56B4E9", "random": "#666666", "firstfit": "#000000",
}  # fmt: skip
WHOLE_STYLE = (0, (4, 2))
#: Nodes above which the picture of the cluster takes a sample of them, all sizes alike.
MOST_NODES = 1500
#: Where the axis of waiting times is marked, in seconds.
WAITS = {
    "none": 1, "10 s": 10, "1 min": 60, "10 min": 600, "1 h": 3600, "6 h": 6 * 3600,
    "1 d": 86400, "7 d": 7 * 86400, "70 d": 70 * 86400,
}  # fmt: skip
_STYLE: Any = {
    "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False, "svg.hashsalt": "crater",
    "figure.constrained_layout.use": True,
}  # fmt: skip


def require() -> None:
    """UsageError when matplotlib is not there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "plots need matplotlib: pip install 'crater-slurm[simulate]', or leave out --plot"
        ) from error


def write(folder: Path, nodes: Nodes, plan: Plan, runs: Sequence[Run]) -> list[Path]:
    """All plots of the runs, each as PNG and SVG; the files, in the order they were written."""
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    made: list[tuple[str, Figure]] = []
    with mpl.rc_context(_STYLE):
        if plan.fill is not None:
            made.append(("load", _by_load(runs)))
            made.extend(
                (f"cluster-{run.policy}-{run.requests}", _cluster(nodes, run)) for run in runs
            )
        else:
            for load in dict.fromkeys(run.load for run in runs):
                own = [run for run in runs if run.load == load]
                suffix = "" if load is None else f"-{100 * load:g}"
                made.append((f"waiting{suffix}", _waiting(own)))
                made.append((f"use{suffix}", _use(own)))
        files = []
        for name, figure in made:
            _settle(figure)
            for form in ("png", "svg"):
                file = folder / f"{name}.{form}"
                # No date inside: the same seed gives the same bytes.
                metadata = {"Date": None} if form == "svg" else {"Software": None}
                figure.savefig(file, dpi=150, metadata=metadata)
                files.append(file)
    return files


def _settle(figure: Any) -> None:
    """Lay the figure out for good: the solver's last digits vary, and SVG has them in its names."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position([round(value, 4) for value in axes.get_position().bounds])


def _styles(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A policy's own colour, the same in every plot, and a dashed line for whole-GPU requests."""
    several = len({run.requests for run in runs}) > 1
    return [
        {
            "color": COLOURS.get(run.policy, "#8C564B"),
            "linestyle": WHOLE_STYLE if run.requests == "whole" else "-",
            "label": f"{run.policy}, {'whole GPUs' if run.requests == 'whole' else 'shares'}"
            if several
            else run.policy,
            "linewidth": 1.8,
        }
        for run in runs
    ]


def _by_load(runs: Sequence[Run]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4))
    left, right = figure.subplots(1, 2)
    lows = []
    for run, style in zip(runs, _styles(runs), strict=True):
        x, low, mean, high = _band([filled.fill.curve for filled in run.fills])
        left.plot(x, mean, **style | {"label": f"{style['label']}  {mean[-1]:.2f} %"})
        left.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        lows.append(mean[-1])
        x, low, mean, high = _band([filled.fragments for filled in run.fills])
        right.plot(x, mean, **style)
        right.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    end = float(x[-1])
    left.plot([0, min(100, end)], [0, min(100, end)], color="#999999", linewidth=0.8, zorder=0)
    start = min(70.0, end * 0.6)
    left.set(
        title="GPU allocation where the cluster gets full", xlabel="arrived load, % of all GPUs",
        ylabel="allocated, % of all GPUs", xlim=(start, end), ylim=(min(start, *lows), 101),
    )  # fmt: skip
    left.legend(loc="lower right", fontsize=9)
    right.set(
        title="Idle GPU that no usual job can take", xlabel="arrived load, % of all GPUs",
        ylabel="fragmented, % of idle GPU", ylim=(0, 101), xlim=(0, end),
    )  # fmt: skip
    return figure


def _band(curves: Sequence[Sequence[tuple[float, float]]]) -> tuple[np.ndarray, ...]:
    """x, lowest, mean and highest of curves, on a common x."""
    last = min(curve[-1][0] for curve in curves)
    x = np.linspace(0, last, 261)
    each = np.asarray([np.interp(x, [p[0] for p in c], [p[1] for p in c]) for c in curves])
    return x, each.min(axis=0), each.mean(axis=0), each.max(axis=0)


def _cluster(nodes: Nodes, run: Run) -> Any:
    """Every GPU of the cluster as a cell, at some arrived loads, for the first seed."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    filled: Filled = run.fills[0]
    colours = np.asarray([[0.93, 0.95, 0.97], [0.55, 0.77, 0.87], [0.0, 0.38, 0.62]])
    shades = np.linspace(0, 1, 101)
    table = np.stack([np.interp(shades, [0, 0.01, 1], colours[:, c]) for c in range(3)], axis=1)
    shown = ListedColormap(table).with_extremes(bad="white")
    # Nodes of one size together, largest first, so that the eye finds rows of eight.
    order = sorted(range(len(nodes.gpus)), key=lambda n: (-nodes.gpus[n], nodes.models[n], n))
    order = [n for n in order if nodes.gpus[n]]
    order = order[:: -(-len(order) // MOST_NODES)]
    figure = Figure(figsize=(11, 5.6))
    axes = np.atleast_1d(figure.subplots(1, len(filled.pictures)))
    for place, (arrived, used) in zip(axes, filled.pictures, strict=True):
        cells, columns = _cells(used, [nodes.gpus[n] for n in order], order)
        drawn = place.imshow(
            np.ma.masked_less(cells, 0), cmap=shown, vmin=0, vmax=100, aspect="auto",
            interpolation="nearest",
        )  # fmt: skip
        total = np.maximum(used, 0).sum() / (sum(nodes.gpus) * 10)
        place.set_title(f"{arrived:.0f} % arrived\n{total:.1f} % in use", fontsize=10)
        place.set_xticks([]), place.set_yticks([])
        place.spines[:].set_visible(False)
        place.grid(visible=False)
    figure.colorbar(drawn, ax=list(axes), label="GPU in use, %", shrink=0.7, pad=0.01)
    figure.suptitle(
        f"{run.policy}: each cell is a GPU, the GPUs of a node side by side, "
        f"{columns} nodes a row; nodes with most GPUs on top"
    )
    return figure


def _cells(used: np.ndarray, sizes: Sequence[int], order: Sequence[int]) -> tuple[np.ndarray, int]:
    """Nodes laid out in rows that hold whole nodes, % in use; -1 where there is nothing."""
    widest = max(sizes)
    # As many GPUs a row as make the picture about twice as high as wide.
    across = max(1, round((sum(sizes) / 2.2) ** 0.5 / widest)) * widest
    rows: list[list[float]] = [[]]
    for node, size in zip(order, sizes, strict=True):
        if len(rows[-1]) + size > across:
            rows.append([])
        rows[-1].extend((used[node, :size] / 10).tolist())
    cells = np.full((len(rows), across), -1.0)
    for i, row in enumerate(rows):
        cells[i, : len(row)] = row
    return cells, across // widest


def _waiting(runs: Sequence[Run]) -> Any:
    """Share of the jobs that waited at most so long."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.4))
    axes = figure.subplots()
    longest, low = 60.0, 99.0
    for run, style in zip(runs, _styles(runs), strict=True):
        waits = np.concatenate([one.waits for one in run.replays])
        if not len(waits):
            continue
        at, often = np.unique(waits, return_counts=True)
        share = 100 * np.cumsum(often) / len(waits)
        # A thousand steps are enough to draw, whatever the number of jobs.
        few = np.unique(np.linspace(0, len(at) - 1, 1000).astype(int))
        label = f"{style['label']}, mean {duration(float(waits.mean()))}"
        axes.step(np.maximum(at[few], 1.0), share[few], where="post", **style | {"label": label})
        longest, low = max(longest, float(at[-1])), min(low, float(share[0]))
    axes.set_xscale("log")
    axes.set_xticks(list(WAITS.values()), list(WAITS))
    axes.minorticks_off()
    axes.set(
        title="How long jobs wait", xlabel="waiting time at most", ylabel="jobs, %",
        xlim=(1.0, longest * 1.3), ylim=(max(0.0, low - 0.1 * (100 - low)), 100.2),
    )  # fmt: skip
    axes.legend(loc="lower right", fontsize=9)
    return figure


def time_unit(span: float) -> tuple[float, str]:
    """Seconds of the unit that an axis over ``span`` seconds counts in, and its name."""
    for seconds, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if span > 2 * seconds:
            return seconds, name
    return 1.0, "seconds"


def _use(runs: Sequence[Run]) -> Any:
    """Allocation, fragmentation and the queue over time, of the first seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7))
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=[2, 1.2, 1])
    size, unit = time_unit(max(run.replays[0].span for run in runs))
    for run, style in zip(runs, _styles(runs), strict=True):
        one = run.replays[0]
        x = [sample.time / size for sample in one.samples]
        top.plot(x, [s.allocated for s in one.samples], **style | {"linewidth": 1.4})
        if run.requests == "whole":
            used = [s.used for s in one.samples]
            label = f"{run.policy}, whole GPUs: really used"
            top.plot(x, used, color=style["color"], linewidth=1, linestyle=":", label=label)
        middle.plot(x, [s.fragmented for s in one.samples], **style | {"linewidth": 1.2})
        bottom.plot(x, [s.waiting for s in one.samples], **style | {"linewidth": 1.2})
        if one.warm_up and run is runs[0]:
            for axes in (top, middle, bottom):
                axes.axvspan(0, one.warm_up / size, color="#999999", alpha=0.15, linewidth=0)
            top.text(one.warm_up / size / 2, 2, "warm-up, not counted", ha="center", fontsize=8)
    top.set(ylabel="GPUs allocated, %", ylim=(0, 101), title="The cluster over time")
    middle.set(ylabel="fragmented,\n% of idle GPU", ylim=(0, 101))
    bottom.set(ylabel="jobs waiting", xlabel=f"{unit} since the first arrival")
    bottom.set_ylim(bottom=0)
    top.legend(loc="lower right", ncols=2, fontsize=9)
    return figure
