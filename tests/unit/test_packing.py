"""The state of a packed cluster: nothing oversubscribed, all undone, measures as defined."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_samples import (
    cluster,
    clusters,
    fragments_measure,
    needs,
    packs_measure,
    plain,
    share,
    whole,
)

from crater_slurm.placement.packing import kernels
from crater_slurm.placement.packing.score import fragmented, fragments_of, packs_of
from crater_slurm.placement.packing.state import Cluster, Mix, Need, Placed


def frozen(found: Cluster) -> tuple[bytes, bytes]:
    return found.gpus.tobytes(), found.rest.tobytes()


def some_gpu(found: Cluster, need: Need, node: int, turn: int) -> int | None:
    """A GPU that a share may take, or None."""
    able = np.flatnonzero(found.gpus[node] >= need.milli)
    return int(able[turn % len(able)]) if need.count == 1 and need.milli < 1000 and turn else None


@given(clusters(), st.lists(st.tuples(needs(), st.integers(0, 3), st.integers(0, 4))))
def test_nothing_is_ever_negative_or_given_twice(
    found: Cluster, steps: list[tuple[Need, int, int]]
) -> None:
    full = found.gpus.copy()
    placed: list[tuple[Need, Placed]] = []
    for need, at, turn in steps:
        node = at % found.nodes
        if found.fitting(need)[node]:
            placed.append((need, found.place(need, node, some_gpu(found, need, node, turn))))
        elif placed:
            found.release(*placed.pop(turn % len(placed)))
        held = sum(need.gpu for need, _ in placed)
        assert found.gpus.min() >= 0
        assert (found.gpus <= full).all()
        assert found.rest.min() >= 0
        assert found.total - found.gpus.sum() == held
        for kind in range(2):
            taken = sum(need.take[kind] for need, _ in placed)
            assert (found.capacity - found.rest)[:, kind].sum() == taken


@given(clusters(), st.lists(st.tuples(needs(), st.integers(0, 3))), st.randoms())
def test_releases_in_any_order_undo_all_placements(
    found: Cluster, steps: list[tuple[Need, int]], order: object
) -> None:
    before = frozen(found)
    placed = [
        (need, found.place(need, at % found.nodes))
        for need, at in steps
        if found.fitting(need)[at % found.nodes]
    ]
    order.shuffle(placed)  # type: ignore[attr-defined]
    for need, where in placed:
        found.release(need, where)
    assert frozen(found) == before


@given(clusters(), needs())
def test_a_need_is_placed_where_it_fits_and_nowhere_else(found: Cluster, need: Need) -> None:
    for node, fits in enumerate(found.fitting(need)):
        before = frozen(found)
        may_model = not need.count or (need.allowed >> int(found.models[node])) & 1
        if fits:
            found.release(need, found.place(need, node))
        elif may_model:
            with pytest.raises(ValueError, match="has no"):
                found.place(need, node)
        assert frozen(found) == before


@given(clusters(), needs(), needs())
def test_needs_on_two_nodes_come_in_any_order(found: Cluster, one: Need, two: Need) -> None:
    if found.nodes < 2 or not found.fitting(one)[0] or not found.fitting(two)[1]:
        return
    first, second = found.place(one, 0), found.place(two, 1)
    state = frozen(found)
    found.release(one, first)
    found.release(two, second)
    assert (found.place(two, 1), found.place(one, 0)) == (second, first)
    assert frozen(found) == state


def test_what_was_never_taken_is_not_given_back() -> None:
    found = cluster((1, 4))
    with pytest.raises(ValueError, match="gets back more than it has"):
        found.release(whole(), Placed(0, (0,)))
    with pytest.raises(ValueError, match="gets back more than it has"):
        found.release(plain(1), Placed(0, ()))


def test_a_need_of_other_kinds_is_refused() -> None:
    with pytest.raises(ValueError, match="nodes count 1 kinds"):
        cluster((1, 4)).fitting(Need(1, 500, (1, 1)))


def test_a_share_goes_to_the_tightest_gpu_and_whole_ones_in_order() -> None:
    found = cluster((4, 9))
    found.place(share(500), 0, 1)
    found.place(share(300), 0, 2)
    assert found.place(share(500), 0).gpus == (1,)
    assert found.place(whole(2), 0).gpus == (0, 3)
    assert found.place(share(190), 0).gpus == (2,)
    assert found.gpus[0].tolist() == [0, 0, 510, 0]


# Fragments, by hand after the definition: a rest of 1000 and 400 milli, and 4 CPU.
REST = np.array([1000, 400]), np.array([4])


@pytest.mark.parametrize(
    ("need", "lost"),
    [
        (share(500, 2), 400),  # fits on the first; the second is too small for it
        (share(300, 4), 0),  # fits on both
        (share(300, 5), 1400),  # no CPU for it
        (whole(2, 1), 1400),  # there is one whole GPU
        (whole(1, 1), 400),
        (plain(1), 1400),  # asks for no GPU
        (share(500, 2, allowed=0b10), 1400),  # another model
    ],
)
def test_fragments_for_one_task(need: Need, lost: int) -> None:
    assert kernels.fragments(*REST, 0, fragments_measure([need], 1.0)) == lost


def test_fragments_are_the_mean_over_the_mix() -> None:
    mix = fragments_measure([share(500, 2), whole(2, 1), plain(1)], 0.5, 0.3, 0.2)
    assert kernels.fragments(*REST, 0, mix) == pytest.approx(0.5 * 400 + 0.5 * 1400)


def test_the_fragmented_share_of_a_cluster() -> None:
    found = cluster((2, 4), (1, 0), (1, 1))
    found.place(share(600, 0), 0, 1)
    # For a share of 500: 400 on the first node, all 1000 on the second, nothing on the third.
    mix = Mix.of([(share(500), 1.0)])
    assert fragmented(found, mix) == pytest.approx(1400 / 3400)
    for node in (0, 1, 2):
        found.gpus[node] = 0
    assert fragmented(found, mix) == 0


def test_packs_by_hand() -> None:
    gpus, rest = np.array([1000, 300]), np.array([5])
    # 300 to the tighter one, then the whole one: 1300. The share of 500 finds nothing.
    first = [share(300, 1), whole(1, 1), share(500, 1)]
    assert kernels.packs(gpus, rest, 0, packs_measure(first)) == 1300
    # 500 leaves 500 and 1 CPU, 300 takes the last of it: 800.
    second = [share(500, 4), share(300, 1), whole(1, 1)]
    assert kernels.packs(gpus, rest, 0, packs_measure(second)) == 800
    assert kernels.packs(gpus, rest, 0, packs_measure(first, second)) == 1050
    assert (gpus.tolist(), rest.tolist()) == ([1000, 300], [5])


def slow_packs(gpus: list[int], rest: tuple[int, ...], model: int, stream: list[Need]) -> int:
    """The definition, a line at a time."""
    left, room, placed = list(gpus), list(rest), 0
    for need in stream:
        able = sorted((g for g in range(len(left)) if left[g] >= need.milli), key=left.__getitem__)
        if any(a < b for a, b in zip(room, need.take, strict=True)):
            continue
        if not (need.allowed >> model) & 1 or len(able) < need.count or not need.count:
            continue
        for g in able[: need.count]:
            left[g] -= need.milli
        room = [a - b for a, b in zip(room, need.take, strict=True)]
        placed += need.gpu
    return placed


STATES = st.tuples(
    st.lists(st.integers(0, 1000), min_size=4, max_size=4),
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
    st.integers(0, 1),
)


@given(STATES, st.lists(needs().filter(lambda n: n.count > 0), min_size=6, max_size=6))
def test_packs_as_the_slow_definition(
    state: tuple[list[int], tuple[int, ...], int], stream: list[Need]
) -> None:
    gpus, rest, model = state
    fast = kernels.packs(np.array(gpus), np.array(rest), model, packs_measure(stream))
    assert fast == slow_packs(gpus, rest, model, stream)


@given(STATES, st.lists(needs(), min_size=1, max_size=5))
def test_fragments_as_the_slow_definition(
    state: tuple[list[int], tuple[int, ...], int], mix: list[Need]
) -> None:
    gpus, rest, model = state
    expected = 0.0
    for need in mix:
        able = [g for g in gpus if g >= need.milli]
        hosts = (
            need.count
            and len(able) >= need.count
            and (need.allowed >> model) & 1
            and all(a >= b for a, b in zip(rest, need.take, strict=True))
        )
        expected += (sum(gpus) - sum(able) if hosts else sum(gpus)) / len(mix)
    weighed = fragments_measure(mix, *[1 / len(mix)] * len(mix))
    fast = kernels.fragments(np.array(gpus), np.array(rest), model, weighed)
    assert fast == pytest.approx(expected)


def test_the_target_mix_has_the_most_frequent_needs() -> None:
    seen = {share(500): 60, whole(): 36, plain(3): 4}
    mix = Mix.target(seen)
    assert mix.needs == (share(500), whole())
    assert mix.weights == pytest.approx([60 / 96, 36 / 96])


def test_needs_that_differ_in_memory_alone_are_one_in_the_mix() -> None:
    small, large = Need(1, 500, (1, 10)), Need(1, 500, (1, 99))
    assert Mix.target({small: 1, large: 2}).needs == (Need(1, 500, (1,)),)
    assert Mix.target({small: 1, large: 2}, kinds=None).needs == (large, small)


def test_the_target_mix_does_not_depend_on_the_order_seen() -> None:
    seen = {share(milli, cpu): 1 for milli in (300, 500) for cpu in range(5)}
    assert Mix.target(seen).needs == Mix.target(dict(reversed(seen.items()))).needs


def test_streams_hold_each_need_by_frequency_and_gpus() -> None:
    mix = Mix.of([(share(500), 4.0), (whole(4), 1.0), (plain(1), 9.0)])
    made = packs_of(mix, streams=4, length=8)
    # 4 x 1 GPU to 1 x 4 GPUs: half and half of 32; what asks for no GPU is not drawn.
    kinds, often = np.unique(made.counts, return_counts=True)
    assert (kinds.tolist(), often.tolist()) == ([1, 4], [16, 16])
    assert (made.least_milli, made.least_take.tolist()) == (500, [1])


@pytest.mark.parametrize("needs_seen", [(), ((plain(1), 1.0),)])
def test_a_mix_without_gpus_judges_nothing(needs_seen: tuple[tuple[Need, float], ...]) -> None:
    mix = Mix.of(needs_seen)
    state = np.array([1000, 500]), np.array([9]), 0
    assert kernels.packs(*state, packs_of(mix)) == 0
    assert kernels.fragments(*state, fragments_of(mix)) == (1500 if mix.needs else 0)
