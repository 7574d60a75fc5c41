"""Scores of nodes: kept ones equal fresh ones, and the time that is spent is bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_samples import cluster, clusters, needs, packs_measure, share, whole

from crater_slurm.placement.packing import kernels
from crater_slurm.placement.packing.score import Scorer, fragments_of, packs_of
from crater_slurm.placement.packing.state import Cluster, Mix, Need, Placed


def slow_gains(found: Cluster, need: Need, measure: kernels.Measure) -> list[float]:
    """Each node's gain in what packs, with every GPU tried for a share."""
    gains = []
    for node, fits in enumerate(found.fitting(need)):
        if not fits:
            gains.append(kernels.NOT_THERE)
            continue
        model, share = found.models[node], need.count == 1 and need.milli < 1000
        before = kernels.packs(found.gpus[node], found.rest[node], model, measure)
        gpus = np.flatnonzero(found.gpus[node] >= need.milli) if share else [None]
        after = []
        for gpu in gpus:
            placed = found.place(need, node, gpu)
            after.append(kernels.packs(found.gpus[node], found.rest[node], model, measure))
            found.release(need, placed)
        gains.append(max(after) - before)
    return gains


STEPS = st.lists(st.tuples(needs(), st.integers(0, 3)), max_size=12)


@given(clusters(), STEPS, st.lists(needs(), min_size=1, max_size=3))
def test_kept_scores_equal_those_from_scratch(
    found: Cluster, steps: list[tuple[Need, int]], mix: list[Need]
) -> None:
    measure = packs_of(Mix.of([(need, 1.0) for need in mix]), streams=2, length=6)
    kept = Scorer(found, measure)
    placed: list[tuple[Need, Placed]] = []
    for need, at in steps:
        scores, _ = kept.scores(need)
        assert scores.tolist() == pytest.approx(slow_gains(found, need, measure))
        node = at % found.nodes
        if scores[node] > kernels.NOT_THERE:
            placed.append((need, found.place(need, node)))
        elif placed:
            found.release(*placed.pop(0))


@given(clusters(), STEPS, st.lists(needs(), min_size=1, max_size=3))
def test_fgd_s_kept_scores_equal_those_from_scratch(
    found: Cluster, steps: list[tuple[Need, int]], mix: list[Need]
) -> None:
    measure = fragments_of(Mix.of([(need, 1.0) for need in mix]))
    kept = Scorer(found, measure)
    for need, at in steps:
        scores, choice = kept.scores(need)
        fresh_scores, fresh_choice = Scorer(found, measure).scores(need)
        assert scores.tolist() == fresh_scores.tolist()
        assert choice.tolist() == fresh_choice.tolist()
        if scores[at % found.nodes] > kernels.NOT_THERE:
            found.place(need, at % found.nodes)


@given(clusters(), STEPS)
def test_a_bound_on_evaluations_hides_no_node_when_there_is_none_else(
    found: Cluster, steps: list[tuple[Need, int]]
) -> None:
    measure = packs_of(Mix.of([(share(500), 1.0)]), streams=2, length=6)
    bounded = Scorer(found, measure, most=0)
    for need, at in steps:
        scores, choice = bounded.scores(need)
        fitting = found.fitting(need)
        assert (scores > kernels.NOT_THERE).any() == fitting.any()
        assert not (scores > kernels.NOT_THERE)[~fitting].any()
        node = int(np.argmax(scores))
        if fitting.any():  # the GPU that goes with an old score has room as well
            gpu = int(choice[node])
            found.place(need, node, gpu if gpu >= 0 else None)
        if fitting[at % found.nodes] and found.fitting(need)[at % found.nodes]:
            found.place(need, at % found.nodes)


def test_equal_states_share_an_evaluation() -> None:
    found = cluster(*[(2, 8)] * 50)
    scorer = Scorer(found, packs_measure([share(500), whole()]))
    scorer.scores(share(300))
    assert scorer._memo.made[0] == 2  # before and after
    found.place(share(300), 7)
    scorer.scores(share(300))
    # Of the changed node: after on the GPU in use, and on the free one; before was known.
    assert scorer._memo.made[0] == 4


def test_the_bound_is_on_evaluations() -> None:
    found = cluster(*[(2, cpu) for cpu in range(10, 40)])
    scorer = Scorer(found, packs_measure([share(500), whole()]), most=6)
    scores, _ = scorer.scores(whole())
    assert (scores > kernels.NOT_THERE).sum() == 3  # before and after, of three nodes
    for _ in range(9):
        scores, _ = scorer.scores(whole())
    assert (scores > kernels.NOT_THERE).all()


def test_another_mix_makes_other_scores() -> None:
    found = cluster((1, 10))
    scorer = Scorer(found, packs_measure([share(500), share(500)]))
    assert scorer.scores(share(300))[0].tolist() == [-500]
    scorer.judge_by(packs_measure([whole(), whole()]))
    assert scorer.scores(share(300))[0].tolist() == [-1000]


def test_a_mix_of_more_kinds_than_the_nodes_is_refused() -> None:
    mix = Mix.of([(Need(1, 500, (1, 1)), 1.0)])
    with pytest.raises(ValueError, match="more kinds"):
        Scorer(cluster((1, 4)), packs_of(mix))


def test_rows_are_dropped_in_the_order_they_were_last_asked_for() -> None:
    scorer = Scorer(cluster((1, 4)), packs_measure([share(500)]))
    for cpu in range(1500):
        scorer.scores(share(500, cpu))
        scorer.scores(whole())
    assert len(scorer._rows) == 1024
    assert whole() in scorer._rows
    assert share(500, 0) not in scorer._rows
