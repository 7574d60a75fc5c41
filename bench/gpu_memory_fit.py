"""Fits the four fitted figures of each recipe to measured rows, and tells how that generalises.

Per recipe: a fixed overhead, the allocator's share of what moves, and the two half widths of the
interval. Nothing else is fitted, and nothing per model. ``cross_validate`` fits again without the
rows that it then predicts: without one model of a framework (the framework is known), and without
the whole framework (which is then ``generic``). Not part of the package.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.memory_rows import Row
from crater_slurm.catalogue.llms import describe
from crater_slurm.placement.prediction import Prediction, predict
from crater_slurm.placement.prediction.fit import fit
from crater_slurm.placement.prediction.recipes import GENERIC, Recipe, recipe_for

_COARSE = (lambda _: [0.55, 0.9, 1.3, 1.7, 2.1], lambda _: [1.0, 1.2, 1.5, 1.8, 2.1, 2.5, 3.0, 3.5])
_FINE = (lambda o: [max(0.55, o + d) for d in (-0.2, -0.1, 0, 0.1, 0.2)],
         lambda f: [max(1.0, f + d) for d in (-0.15, -0.1, -0.05, 0, 0.05, 0.1, 0.15)])  # fmt: skip
_STATIC = [0.04, 0.06, 0.08, 0.1, 0.13, 0.17]
_DYNAMIC = [0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0]
#: How hard a recipe with few rows is held to the generic figures.
_HELD = 0.2
#: With fewer rows than this an interval can't be told from them, and is at least so wide.
_ENOUGH, _FLOOR_OF_FEW, _FLOOR = 20, (0.15, 0.5), (0.08, 0.2)
#: A recipe whose facts are known and of which no row is.
_UNMEASURED, _FEWEST = (0.15, 0.65), 3
#: Rows in which what moves is a smaller share of the peak say nothing of its interval.
_EXERCISED = 0.15
#: How much wider an interval is made for models that are not among the rows; one model alone
#: says little of the next.
_OF_UNSEEN = 1.0
#: A framework that nobody knows may do what no recipe does.
_FLOOR_OF_UNKNOWN = (0.2, 1.2)


@dataclass(frozen=True, slots=True)
class Result:
    """One row and what was predicted of it, by whom."""

    row: Row
    prediction: Prediction

    @property
    def error(self) -> float:
        return self.prediction.expected / self.row.actual - 1

    @property
    def slack(self) -> float:
        return self.prediction.upper / self.row.actual - 1


def predicted(row: Row, recipe: Recipe | None = None) -> Result:
    known = describe(row.workload)
    prediction = predict(
        row.workload, known, meter=row.meter, card_bytes=row.card_bytes, recipe=recipe
    )
    return Result(row, prediction)


def fitted(rows: Sequence[Row], recipe: Recipe, prior: Recipe | None = None) -> Recipe:
    """``recipe`` with its four figures fitted to ``rows``, held to ``prior``'s."""

    def loss(trial: Recipe) -> float:
        results = [predicted(row, trial) for row in rows]
        off = sum(min(abs(math.log1p(r.error)), 0.5) for r in results)
        if prior is None:
            return off
        far = abs(trial.overhead_gb - prior.overhead_gb) / 2
        return off + _HELD * (far + abs(trial.fragmentation - prior.fragmentation) / 2)

    best = recipe
    for overheads, fragmentations in (_COARSE, _FINE):
        grid = [
            replace(best, overhead_gb=round(o, 2), fragmentation=round(f, 2))
            for o in overheads(best.overhead_gb)
            for f in fragmentations(best.fragmentation)
        ]
        best = min(grid, key=loss)
    static, moving = _widths(rows, best)
    floor = _FLOOR if len(rows) >= _ENOUGH else _FLOOR_OF_FEW
    shares = [_shape(row, best)[3] ** 0.5 / row.actual for row in rows]
    if len(rows) < _ENOUGH and statistics.median(shares) < _EXERCISED:
        floor = (floor[0], _UNMEASURED[1])
    return replace(best, spread_static=max(static, floor[0]), spread_dynamic=max(moving, floor[1]))


def _widths(rows: Sequence[Row], recipe: Recipe, over: float = 1.0) -> tuple[float, float]:
    """The narrowest pair that holds 98 % of the rows, and more for what few rows can't show."""
    allowed = int(0.02 * len(rows))
    shapes = [_shape(row, recipe) for row in rows]

    def cost(pair: tuple[float, float]) -> tuple[int, float]:
        squares = (pair[0] ** 2, pair[1] ** 2)
        bounds = [
            (x + math.sqrt(none + squares[0] * static + squares[1] * moving)) / row.actual
            for row, (x, none, static, moving) in zip(rows, shapes, strict=True)
        ]
        missed = sum(bound * over < 1 for bound in bounds)
        return max(0, missed - allowed), statistics.mean(bounds)

    static, moving = min(itertools.product(_STATIC, _DYNAMIC), key=cost)
    margin = 1 + _OF_UNSEEN / math.sqrt(len({_model(row) for row in rows}))
    return round(margin * static, 3), round(margin * moving, 3)


def _shape(row: Row, recipe: Recipe) -> tuple[float, float, float, float]:
    """Expected value, and the squares that a row's half width is made of: fixed, per square of
    the static figure, per square of the moving one."""

    def square(static: float, moving: float) -> tuple[float, float]:
        trial = replace(recipe, spread_static=static, spread_dynamic=moving)
        expected = predicted(row, trial).prediction.expected
        free = predicted(replace(row, card_bytes=None), trial).prediction
        return expected, (free.upper - free.expected) ** 2

    expected, none = square(0.0, 0.0)
    static, moving = square(0.01, 0.0)[1], square(0.0, 0.01)[1]
    return expected, none, (static - none) * 1e4, (moving - none) * 1e4


def fits_its_card(row: Row) -> bool:
    """Whether the row's work is said to fit the card that it ran on."""
    return fit(row.workload, int((row.card_bytes or 0) / 2**20)).fits


def by_recipe(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[recipe_for(row.workload.framework).name].append(row)
    return dict(groups)


def fit_all(rows: Sequence[Row]) -> list[Recipe]:
    """Generic from all rows, each framework counting alike; then each framework's own."""
    general = fit_generic(rows)
    found = [general]
    for group in by_recipe(rows).values():
        own = recipe_for(group[0].workload.framework)
        if own.name != "generic":
            found.append(_grounded(group, own, general))
    return found


def fit_generic(rows: Sequence[Row]) -> Recipe:
    """The figures for a framework that nobody knows: medians over the known ones' fits, and an
    interval that holds the rows of every framework predicted as generic."""
    groups = list(by_recipe(rows).values())
    each = [fitted(g, GENERIC) for g in groups if len(g) >= 3]
    middle = replace(
        GENERIC,
        overhead_gb=round(statistics.median(r.overhead_gb for r in each), 2),
        fragmentation=round(statistics.median(r.fragmentation for r in each), 2),
    )
    static, moving = _widths(rows, middle, over=1.1)
    return replace(
        middle,
        spread_static=max(static, _FLOOR_OF_UNKNOWN[0]),
        spread_dynamic=max(moving, _FLOOR_OF_UNKNOWN[1]),
    )


def leave_one_model_out(rows: Sequence[Row]) -> list[Result]:
    """Every row by its framework's recipe, fitted without any row of its model."""
    found = []
    generic: dict[str, Recipe] = {}
    for group in by_recipe(rows).values():
        own = recipe_for(group[0].workload.framework)
        for model in dict.fromkeys(_model(row) for row in group):
            rest = [row for row in rows if _model(row) != model]
            general = generic[model] = generic.get(model) or fit_generic(rest)
            same = [row for row in group if _model(row) != model]
            recipe = _grounded(same, own, general)
            found += [predicted(row, recipe) for row in group if _model(row) == model]
    return found


def leave_one_framework_out(rows: Sequence[Row]) -> list[Result]:
    """Every row as if its framework were unknown, fitted without any row of it."""
    found = []
    for name, group in by_recipe(rows).items():
        rest = [row for row in rows if recipe_for(row.workload.framework).name != name]
        general = fit_generic(rest)
        for row in group:
            unknown = replace(row, workload=replace(row.workload, framework="unheard-of"))
            found.append(predicted(unknown, general))
    return found


def _grounded(rows: Sequence[Row], own: Recipe, general: Recipe) -> Recipe:
    """``own`` fitted; with too few rows to fit anything its facts stay and the figures are those
    of an unknown framework, with an interval between."""
    if len(rows) >= _FEWEST:
        return fitted(rows, own, general)
    return replace(
        own,
        overhead_gb=general.overhead_gb,
        fragmentation=general.fragmentation,
        spread_static=_UNMEASURED[0],
        spread_dynamic=_UNMEASURED[1],
    )


def _model(row: Row) -> str:
    known = describe(row.workload)
    return known.name if known else row.model
