"""Kernel CPU lists, in and out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.model.cpuset import format_cpulist, parse_cpulist


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", ()),
        ("\n", ()),
        ("5", (5,)),
        ("0-3", (0, 1, 2, 3)),
        ("0-1,64-65", (0, 1, 64, 65)),
        ("3,1,2,2", (1, 2, 3)),
        (" 0 , 2-3 ", (0, 2, 3)),
        ("0-7:1/2", (0, 2, 4, 6)),
        ("0-9:2/5", (0, 1, 5, 6)),
        ("65535", (65535,)),
    ],
)
def test_a_kernel_list_gives_its_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_cpulist(text) == numbers


@pytest.mark.parametrize(
    "text", ["3-1", "a", "1-", "-1", "0-65536", "1 2", "0-7:0/2", "0-7:3/2", "0x3", "9" * 5000]
)
def test_what_the_kernel_would_not_write_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_cpulist(text)


@pytest.mark.parametrize("text", ["f" * 4096, "9-" + "1" * 4000, "0-63:9/" + "1" * 4000 + "x"])
def test_what_is_wrong_is_not_said_at_length(text: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_cpulist(text)
    assert len(str(raised.value)) < 200


def test_the_list_is_as_short_as_it_can_be() -> None:
    assert format_cpulist([9, 1, 0, 2, 64, 65, 9]) == "0-2,9,64-65"
    assert format_cpulist([]) == ""


@given(st.sets(st.integers(0, 65535), max_size=200))
def test_every_set_survives_being_written_and_read(numbers: set[int]) -> None:
    assert parse_cpulist(format_cpulist(numbers)) == tuple(sorted(numbers))
