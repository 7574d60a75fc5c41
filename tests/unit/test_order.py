"""The node that Slurm takes, worked out by hand; tests/slurm/test_order.py asks Slurm itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.model.cluster import natural
from crater_slurm.placement import order

RELEASES = ((22, 5), (24, 11), (26, 5))


def taken(
    able: list[int],
    free: list[int],
    *,
    asked: int = 2,
    gpus: int = 0,
    weights: list[int] | None = None,
    release: tuple[int, int] = (24, 11),
) -> int:
    weighing = np.array(weights or [1] * len(able))
    return order.taken(np.array(able), weighing, np.array(free), asked, gpus, release)


def test_the_shortest_row_of_neighbours_is_taken_from_and_not_the_first_node() -> None:
    assert taken([0, 1, 2, 4, 5, 7], [8] * 6) == 7
    assert taken([0, 1, 2, 4, 5], [8] * 5) == 4
    assert taken([0, 1, 2], [8] * 3) == 0
    assert taken([0, 1, 2, 4, 5, 7], [8] * 6, release=(26, 5)) == 0


def test_a_row_is_as_long_as_the_cpus_that_the_job_could_have_there() -> None:
    """Two nodes of four against one of sixteen."""
    assert taken([0, 2, 3], [16, 4, 4]) == 2
    assert taken([0, 2, 3], [16, 4, 4], gpus=1) == 0  # beside a GPU each counts what is asked


def test_within_a_row_the_node_with_the_fewest_cpus_is_taken() -> None:
    assert taken([3, 4, 5], [8, 4, 6]) == 4
    assert taken([3, 4, 5], [8, 4, 6], gpus=1) == 3


def test_free_cpus_count_as_whole_tasks_since_24_11() -> None:
    """Three tasks of five fit on 17 and on 15."""
    assert taken([0, 1], [17, 15], asked=5) == 0
    assert taken([0, 1], [17, 15], asked=5, release=(22, 5)) == 1


@pytest.mark.parametrize("release", RELEASES)
def test_a_lower_weight_comes_first_and_parts_neighbours(release: tuple[int, int]) -> None:
    assert taken([0, 1, 2], [8, 8, 2], weights=[2, 2, 1], release=release) == 2
    weights = [1, 1, 2, 1]  # rows of two, and of one
    assert taken([0, 1, 2, 3], [8] * 4, weights=weights, release=release) == (
        0 if release == (26, 5) else 3
    )


@given(
    st.sets(st.integers(0, 30), min_size=1),
    st.data(),
    st.integers(0, 9),
    st.integers(0, 2),
    st.sampled_from(RELEASES),
)
def test_it_is_one_of_the_lightest_that_have_room(
    able: set[int], data: st.DataObject, asked: int, gpus: int, release: tuple[int, int]
) -> None:
    nodes = sorted(able)
    some = st.lists(st.integers(1, 3), min_size=len(nodes), max_size=len(nodes))
    weights = data.draw(some)
    free = [asked + more for more in data.draw(some)]
    found = taken(nodes, free, asked=asked, gpus=gpus, weights=weights, release=release)
    assert weights[nodes.index(found)] == min(weights)


@pytest.mark.parametrize(
    "names", [["n2", "n10"], ["9", "10", "a"], ["n1-b9", "n1-b10", "n2"], ["a", "a1", "b"]]
)
def test_names_sort_as_people_count(names: list[str]) -> None:
    backwards = names[::-1]
    assert sorted(backwards, key=natural) == names
