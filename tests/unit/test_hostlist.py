"""Slurm host lists, in and out."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.errors import UsageError
from crater_slurm.slurm.hostlist import MAX_NAMES, compress, expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1-2,7],login", ["n1", "n2", "n7", "login"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[098-100]", ["n098", "n099", "n100"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("a[1-2]b,c", ["a1b", "a2b", "c"]),
        (" n1 , n2 ", ["n1", "n2"]),
        ("n2,n1,n2", ["n2", "n1", "n2"]),
        ("gpu-a[1-2]b[0-1]", ["gpu-a1b0", "gpu-a1b1", "gpu-a2b0", "gpu-a2b1"]),
    ],
)
def test_a_host_list_gives_its_names_in_the_order_written(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "n[1-2",
        "n1]",
        "n[1[2]]",
        "n[]",
        "n[1-]",
        "n[a-b]",
        "n[3-1]",
        "n[1-2,]",
        "n[²-³]",
        "n[" + "9" * 5000 + "]",
        "n[" + "0" * 5000 + "1-2]",
    ],
)
def test_a_malformed_list_is_a_usage_error_and_shown_short(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        expand(text)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    "text",
    [
        "n[0-999999999]",
        "n[0-999][0-999]",
        "n[1-150000],m[1-150000]",
        "n" * (1 << 19),
        "[1]" * 99999,
    ],
)
def test_a_list_of_more_names_than_any_cluster_has_is_refused_at_once(text: str) -> None:
    begin = time.process_time()
    with pytest.raises(UsageError, match="more than|too long"):
        expand(text)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["n1"], "n1"),
        (["n3", "n1", "n2"], "n[1-3]"),
        (["n1", "n2", "n5"], "n[1-2,5]"),
        (["n01", "n02", "n1", "n2"], "n[1-2],n[01-02]"),
        (["login", "n1"], "login,n1"),
        (["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1"),
        (["n007"], "n007"),
        (["n0", "n00"], "n0,n00"),
        (["n1", "n1"], "n1"),
    ],
)
def test_names_are_folded_on_their_last_number(names: list[str], text: str) -> None:
    assert compress(names) == text


NAMES = st.from_regex(r"[a-z]{0,3}-?[a-z][0-9]{0,4}[a-z]?[0-9]{0,5}", fullmatch=True)


@settings(max_examples=200)
@given(st.sets(NAMES, max_size=40))
def test_every_set_of_names_survives_being_written_and_read(names: set[str]) -> None:
    found = expand(compress(names))
    assert set(found) == names
    assert len(found) == len(names)


@settings(max_examples=200)
@given(st.text(max_size=40) | st.text(alphabet="n[]-,0129 ", max_size=30))
def test_any_text_is_a_list_or_a_usage_error(text: str) -> None:
    try:
        names = expand(text)
    except UsageError:
        return
    assert len(names) <= MAX_NAMES


def test_ten_thousand_names_are_one_short_word_and_come_back() -> None:
    names = [f"n{i:05d}" for i in range(10_000)]
    assert compress(names) == "n[00000-09999]"
    assert expand("n[00000-09999]") == names


def test_ten_thousand_scattered_names_come_back() -> None:
    names = {f"rack{i % 40}-n{i * 7919 % 10_007}" for i in range(10_000)}
    begin = time.process_time()
    assert set(expand(compress(names))) == names
    assert time.process_time() - begin < 2
