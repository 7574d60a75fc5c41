"""Gres and TRES strings as Slurm 22.05 to 26.05 and its users write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.slurm.gres import Gres, format_request, parse, totals


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("(null)", []),
        ("gpu", [Gres("gpu", None, 1)]),
        ("gpu:2", [Gres("gpu", None, 2)]),
        ("gpu:a100", [Gres("gpu", "a100", 1)]),
        ("gpu:a100:2", [Gres("gpu", "a100", 2)]),
        ("gpu:a100=2", [Gres("gpu", "a100", 2)]),
        ("gres:gpu:2", [Gres("gpu", None, 2)]),  # 22.05
        ("gres/gpu:2", [Gres("gpu", None, 2)]),  # 23.02 and later
        ("gres/gpu:a100=4", [Gres("gpu", "a100", 4)]),
        ("gpu:a100:4(S:0-1)", [Gres("gpu", "a100", 4)]),
        ("gpu:a100:4(S:0,2-3),shard:8(S:0)", [Gres("gpu", "a100", 4), Gres("shard", None, 8)]),
        ("gpu:(null):4(IDX:0-3)", [Gres("gpu", None, 4)]),
        ("gpu:0", [Gres("gpu", None, 0)]),
        ("membw:142,nviops:900K", [Gres("membw", None, 142), Gres("nviops", None, 921_600)]),
        ("nvme:2M", [Gres("nvme", None, 2_097_152)]),
        (" gpu:1 , membw:2 ", [Gres("gpu", None, 1), Gres("membw", None, 2)]),
        ("cpu:4,gres/gpu:1", [Gres("gpu", None, 1)]),  # --tres-per-task
        ("cpu=4,mem=16G,license/matlab:1,gres/gpu:h100:2", [Gres("gpu", "h100", 2)]),
        ("gpu:nvidia_a100_1g.5gb:3", [Gres("gpu", "nvidia_a100_1g.5gb", 3)]),
    ],
)
def test_a_string_gives_its_gres(text: str, found: list[Gres]) -> None:
    assert parse(text) == found


@pytest.mark.parametrize("text", ["gpu:a:b:2", ":2", "gpu::2", "gpu:a100:", "2:3:4:5", "="])
def test_what_is_no_gres_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"write name\[:type\]\[:count\]"):
        parse(text)


def test_types_are_added_up() -> None:
    assert totals("gpu:a100:2,gpu:h100:1,membw:3") == {"gpu": 3, "membw": 3}


def test_a_request_is_written_without_the_versions_prefix() -> None:
    entries = [Gres("gpu", "a100", 2), Gres("membw", None, 140)]
    assert format_request(entries) == "gpu:a100:2,membw:140"


@pytest.mark.parametrize("text", ["(" * 10**6, "gpu:1," * 10**5, "gpu:" + "a:" * 10**5])
def test_a_string_longer_than_any_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match="more than 16384") as raised:
        parse(text)
    assert len(str(raised.value)) < 200


NAMES = st.from_regex(r"[a-z][a-z0-9_.]{0,8}[a-z]", fullmatch=True).filter(
    lambda n: n not in {"null", "cpu", "mem", "node", "billing", "energy", "license", "bb", "fs"}
)
ENTRIES = st.builds(Gres, NAMES, st.none() | NAMES, st.integers(0, 10**6))


@settings(max_examples=150)
@given(st.lists(ENTRIES, max_size=6))
def test_what_was_written_is_read_again(entries: list[Gres]) -> None:
    assert parse(format_request(entries)) == entries


@settings(max_examples=200)
@given(st.text(max_size=60) | st.text(alphabet="gpu:=/,()0129kM ", max_size=40))
def test_any_text_is_gres_or_a_value_error(text: str) -> None:
    try:
        found = parse(text)
    except ValueError:
        return
    assert all(g.name and g.count >= 0 for g in found)
