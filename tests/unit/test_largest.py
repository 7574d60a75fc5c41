"""Which nodes are the few largest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.placement.largest import AS_LARGE, FEW, largest

USUAL, FAT, CARDS = (4, 96, 512), (4, 96, 2048), (8, 96, 512)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([USUAL] * 19 + [FAT], [19]),
        ([USUAL] * 18 + [FAT, CARDS], [18, 19]),  # neither is as large as the other in everything
        ([USUAL] * 17 + [FAT] * 3, []),  # three of twenty are not few
        ([USUAL] * 20, []),
        ([USUAL] * 3 + [FAT], []),  # nor is one of four
        ([USUAL] * 19 + [(4, 96, 525)], []),  # memory that differs a little is as large
        ([], []),
    ],
)
def test_few_are_as_large(sizes: list[tuple[int, ...]], expected: list[int]) -> None:
    assert np.flatnonzero(largest(np.array(sizes).reshape(-1, 3))).tolist() == expected


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=60))
def test_they_are_those_that_a_look_at_every_pair_finds(sizes: list[tuple[int, ...]]) -> None:
    found = [
        sum(all(a >= AS_LARGE * b for a, b in zip(other, own, strict=True)) for other in sizes)
        <= FEW * len(sizes)
        for own in sizes
    ]
    assert largest(np.array(sizes)).tolist() == found


def test_memory_that_differs_from_node_to_node_makes_no_kinds() -> None:
    """Ten thousand nodes with a memory each, and one class of few that is larger."""
    memory = 515_000 + np.arange(10_000)
    sizes = np.column_stack([np.full(10_000, 8), np.full(10_000, 96), memory])
    sizes[:100, 1] = 128
    assert np.flatnonzero(largest(sizes)).tolist() == list(range(100))
