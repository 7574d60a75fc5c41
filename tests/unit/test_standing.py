"""A node does not flap: what it counts as changes by several reports in a row, with a margin."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.placement.avoid import avoid
from crater_slurm.placement.health import HealthScore
from crater_slurm.placement.standing import Standing, Steps, step
from crater_slurm.placement.terms import Term

STEPS = Steps()  # degraded below 0.5; tiers 0.75, 0.5, 0.25; margin 0.05; 3 reports


def after(values: Iterable[float], steps: Steps = STEPS, begin: Standing | None = None) -> Standing:
    standing = begin or Standing()
    for value in values:
        standing = step(standing, HealthScore(node="n1", value=value), steps)
    return standing


def lost(fault: bool) -> HealthScore:
    term = Term(
        name="gpu_lost", value=0.0 if fault else 1.0, seen="x", threshold="all", fault=fault
    )
    return HealthScore(node="n1", value=term.value, terms=(term,))


def steps_of(scores: Iterable[HealthScore]) -> Standing:
    standing = Standing()
    for score in scores:
        standing = step(standing, score, STEPS)
    return standing


@pytest.mark.parametrize(
    ("values", "degraded", "tier"),
    [
        ([], False, 0),
        ([0.1, 0.1], False, 0),  # two reports are not enough
        ([0.1, 0.1, 0.1], True, 3),
        ([0.1, 0.1, 0.9, 0.1, 0.1], False, 0),  # never three in a row
        ([0.5] * 3, False, 1),  # at the bound is not below it
        ([0.49] * 3, True, 2),
        ([0.75] * 3, False, 0),
        ([0.74] * 3, False, 1),
        ([0.6, 0.3, 0.1], False, 1),  # all three are below the first bound only
    ],
)
def test_three_reports_in_a_row_make_the_difference(
    values: list[float], degraded: bool, tier: int
) -> None:
    found = after(values)
    assert (found.degraded, found.tier(STEPS)) == (degraded, tier)


@pytest.mark.parametrize(
    ("values", "degraded", "tier"),
    [
        ([0.54] * 9, True, 2),  # over the bound, but not by the margin
        ([0.55] * 3, False, 1),
        ([0.55] * 2, True, 3),
        ([0.55, 0.55, 0.54, 0.55, 0.55], True, 2),
        ([0.8] * 3, False, 0),
    ],
)
def test_to_be_better_takes_a_margin_and_three_reports(
    values: list[float], degraded: bool, tier: int
) -> None:
    found = after(values, begin=after([0.1] * 3))
    assert (found.degraded, found.tier(STEPS)) == (degraded, tier)


def test_a_node_at_a_bound_stays_what_it_is() -> None:
    standing = after([0.49] * 3)
    for value in (0.51, 0.49) * 20:
        standing = after([value], begin=standing)
        assert standing.degraded


def test_a_full_score_is_always_enough_to_recover() -> None:
    steps = Steps(degraded_below=1.0, tiers=(1.0,), reports=1)
    assert after([0.99], steps).degraded
    assert not after([0.99, 1.0], steps).degraded


def test_a_stale_report_makes_all_unknown_again() -> None:
    standing = step(after([0.1] * 3), HealthScore(node="n1", value=1.0, flags=("stale",)), STEPS)
    assert standing == Standing()
    assert not standing.settled(STEPS)


def test_a_standing_is_settled_once_so_many_reports_agree() -> None:
    assert not after([0.1, 0.1]).settled(STEPS)
    assert after([0.1, 0.1, 0.1]).settled(STEPS)
    assert after([1, 1, 1]).settled(STEPS)
    assert not after([1, 1, 0.1]).settled(STEPS)


def test_faults_come_and_go_by_three_reports() -> None:
    bad, good = lost(True), lost(False)
    assert steps_of([bad, bad]).faults() == frozenset()
    assert steps_of([bad] * 3).faults() == {"gpu_lost"}
    assert steps_of([bad] * 3 + [good] * 2).faults() == {"gpu_lost"}
    assert not steps_of([bad] * 3 + [good] * 2).gone("gpu_lost", STEPS)
    assert steps_of([bad] * 3 + [good] * 3).faults() == frozenset()
    assert steps_of([good] * 3).gone("gpu_lost", STEPS)


def test_silence_of_a_fault_is_no_recovery() -> None:
    quiet = HealthScore(node="n1", value=1.0)
    found = steps_of([lost(True)] * 3 + [quiet] * 9)
    assert found.faults() == {"gpu_lost"}
    assert not steps_of([quiet] * 9).gone("gpu_lost", STEPS)
    assert not Standing().gone("gpu_lost", STEPS)


@given(st.lists(st.floats(0, 1), max_size=40))
def test_worse_tiers_hold_only_with_the_milder_ones(values: list[float]) -> None:
    standing = after(values)
    on = [standing.on(f"tier {i}") for i in (1, 2, 3)]
    assert on == sorted(on, reverse=True)
    assert standing.degraded == standing.on("tier 2")  # the same bound


# Leaving degraded nodes out -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passed", "worst_first", "nodes", "usable", "named", "left_out"),
    [
        (0b1111, [], 1, 0b1111, 0, 0),
        (0b1111, [0b0001], 1, 0b1111, 0, 0b0001),
        (0b1111, [0b0001], 3, 0b1111, 0, 0b0001),
        (0b1111, [0b0001], 4, 0b1111, 0, 0),  # all four are needed
        (0b1111, [0b1111], 1, 0b1111, 0, 0),  # all are degraded
        (0b1110, [0b0001], 1, 0b1111, 0, 0),  # it can't run the job anyway
        (0b1111, [0b0001], 1, 0b0001, 0, 0),  # the others are down
        (0b0011, [0b0001], 1, 0b0011, 0b0001, 0),  # the user named it
        (0b0111, [0b0011], 1, 0b0111, 0b0001, 0b0010),
        (0b1111, [0b0001, 0b0010], 2, 0b1111, 0, 0b0011),
        (0b1111, [0b0001, 0b0010], 3, 0b1111, 0, 0b0001),  # the worst one only
        (0b0111, [0b0011, 0b0100], 1, 0b0111, 0, 0b0011),
        (0b0011, [0b0001], 0, 0b0011, 0, 0b0001),
    ],
)
def test_degraded_nodes_are_left_out_as_far_as_others_can(
    passed: int, worst_first: list[int], nodes: int, usable: int, named: int, left_out: int
) -> None:
    assert avoid(passed, worst_first, nodes, usable=usable, named=named) == left_out


sets = st.integers(0, 255)


@given(sets, st.lists(sets, max_size=4), st.integers(0, 9), sets, sets)
def test_health_alone_never_makes_a_job_impossible(
    passed: int, grades: list[int], nodes: int, usable: int, named: int
) -> None:
    left_out = avoid(passed, grades, nodes, usable=usable, named=named)
    degraded = 0
    for grade in grades:
        degraded |= grade
    assert left_out & ~passed == 0
    assert left_out & named == 0
    assert left_out & ~degraded == 0
    could = (passed & usable).bit_count() >= max(nodes, 1)
    can = (passed & ~left_out & usable).bit_count() >= max(nodes, 1)
    assert can == could or not left_out
    assert can or not left_out
