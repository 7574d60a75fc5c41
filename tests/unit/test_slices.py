"""The granularity rule: every card's slices in all three roundings, worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.model.slices import Rounding, share_text, slicing

#: Driver MiB; then by ceil the slice, the whole ones and the remainder; by floor and by nominal size
#: the slice, the usable ones and the remainder.
CARDS = {
    "P100-12": (12288, (512, 24, 0), (512, 23, 0), (512, 23, 0)),
    "T4": (15360, (512, 30, 0), (512, 29, 0), (512, 29, 0)),
    "V100-16": (16384, (512, 32, 0), (512, 31, 0), (512, 31, 0)),
    "A30": (24576, (768, 32, 0), (768, 31, 0), (768, 31, 0)),
    "V100-32": (32768, (1024, 32, 0), (1024, 31, 0), (1024, 31, 0)),
    "A100-40": (40960, (1280, 32, 0), (1280, 31, 0), (1280, 31, 0)),
    "A100-80": (81920, (2560, 32, 0), (2560, 31, 0), (2560, 31, 0)),
    "A10": (23028, (720, 31, 708), (719, 31, 20), (736, 31, 212)),
    "L4": (23034, (720, 31, 714), (719, 31, 26), (736, 31, 218)),
    "L40S": (46068, (1440, 31, 1428), (1439, 31, 20), (1440, 31, 1428)),
    "H100": (81559, (2549, 31, 2540), (2548, 31, 23), (2560, 31, 2199)),
    "H100 NVL": (95830, (2995, 31, 2985), (2994, 31, 22), (3008, 31, 2582)),
    "H200": (143771, (4493, 31, 4488), (4492, 31, 27), (4512, 31, 3899)),
    "B200": (183359, (5730, 31, 5729), (5729, 31, 31), (5760, 31, 4799)),
}
ROUNDINGS: tuple[Rounding, ...] = ("ceil", "floor", "nominal")
every_card = pytest.mark.parametrize("card", CARDS)


@every_card
def test_rounded_up_one_slice_is_kept_back_and_the_rest_told(card: str) -> None:
    memory, (size, whole, waste), _, _ = CARDS[card]
    cut = slicing(memory)
    assert (cut.slice_mib, cut.slices, cut.waste_mib) == (size, whole, waste)
    assert (cut.usable, cut.reserve_mib) == (whole - 1, size)


@every_card
@pytest.mark.parametrize(("rounding", "column"), [("floor", 2), ("nominal", 3)])
def test_the_other_roundings_give_every_card_all_it_can(
    card: str, rounding: Rounding, column: int
) -> None:
    memory, size, usable, waste = CARDS[card][0], *CARDS[card][column]  # type: ignore[misc]
    cut = slicing(memory, 1, rounding)
    assert (cut.slice_mib, cut.usable, cut.waste_mib) == (size, usable, waste)
    assert cut.usable * size >= slicing(memory).usable * slicing(memory).slice_mib


def test_the_reserve_of_the_first_description_is_one_slice() -> None:
    """40 GB in slices of 1,024 MiB were 39, and of 256 MiB 159: one less than there are."""
    assert 40960 // 1024 - 1 == 39
    assert slicing(32768).slice_mib == 1024
    assert (slicing(32768, 0).usable, slicing(32768, 1).usable, slicing(32768, 5).usable) == (
        *(32, 31, 27),
    )
    assert slicing(32768, 40).usable == 0


def test_by_nominal_size_what_the_driver_holds_back_is_a_reserve_already() -> None:
    assert slicing(81559, 1, "nominal").reserve == 0
    assert slicing(81559, 2, "nominal").usable == 30
    assert slicing(81920, 2, "nominal").usable == 30


@given(
    memory=st.integers(512, 1 << 20),
    reserve=st.integers(0, 31),
    rounding=st.sampled_from(ROUNDINGS),
)
def test_no_card_ever_gives_more_than_it_has(memory: int, reserve: int, rounding: Rounding) -> None:
    cut = slicing(memory, reserve, rounding)
    assert cut.slice_mib >= 512
    assert cut.usable <= 32
    assert cut.usable * cut.slice_mib + cut.reserve_mib + cut.waste_mib == memory
    if rounding == "floor" and memory >= 32 * 512:
        assert cut.waste_mib < 32


def test_the_arithmetic_is_told_in_words() -> None:
    assert slicing(81559).sentence() == (
        "81559 MiB = 31 slices of 2549 MiB, 1 kept back (2549 MiB, 3.1 %), 30 usable; "
        "2540 MiB, 3.1 % lost to rounding"
    )


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ("l4", "3 of 31 slices of an L4 (2,160 MiB), shared, not isolated"),
        ("t4", "3 of 31 slices of a T4 (2,160 MiB), shared, not isolated"),
        (None, "3 slices of a GPU (at least 2,160 MiB), shared, not isolated"),
    ],
)
def test_a_share_is_told_in_words(card: str | None, words: str) -> None:
    assert share_text(3, 31, 2160, card) == words


def test_one_slice_is_told_as_one() -> None:
    assert share_text(1, 31, 1280, None).startswith("1 slice of a GPU (at least 1,280 MiB)")
