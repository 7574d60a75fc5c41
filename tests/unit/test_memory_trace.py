"""The reader of memory traces refuses whatever trace_memory would not have written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.errors import UsageError
from crater_slurm.model.memory_trace import (
    BYTES_LIMIT,
    CATEGORIES,
    PHASES,
    TEXT_LIMIT,
    MemoryTrace,
    read_memory_trace,
)


def record(**changes: object) -> dict[str, Any]:
    return {
        "version": 1,
        "peak_bytes": 700,
        "by_category": dict.fromkeys(CATEGORIES, 0) | {"parameters": 400, "gradients": 300},
        "by_phase": {"forward": 500, "backward": 700, "optimizer": 0},
        "torch": "2.13.0",
        "precision": "bf16",
        "device": "cuda",
        "steps": 2,
    } | changes


def read(**changes: object) -> MemoryTrace:
    return read_memory_trace(json.dumps(record(**changes)))


def test_a_good_record_is_read_field_by_field() -> None:
    assert read() == MemoryTrace(
        peak_bytes=700,
        by_category=dict.fromkeys(CATEGORIES, 0) | {"parameters": 400, "gradients": 300},
        by_phase={"forward": 500, "backward": 700, "optimizer": 0},
        torch="2.13.0",
        precision="bf16",
        device="cuda",
        steps=2,
    )


CATEGORY_SIZES = record()["by_category"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version is 2, this crater reads 1; trace again"),
        ({"version": True}, "version is True"),
        ({"version": 1.0}, "version is 1.0"),
        ({"version": None}, "version is None"),
        ({"peak_bytes": 0}, "peak_bytes: 0 is not a whole number from 1 to"),
        ({"peak_bytes": -700}, "peak_bytes: -700"),
        ({"peak_bytes": 700.0}, "peak_bytes: 700.0"),
        ({"peak_bytes": "700"}, "peak_bytes: '700'"),
        ({"peak_bytes": True}, "peak_bytes: True"),
        ({"peak_bytes": BYTES_LIMIT + 1}, "peak_bytes: 1125899906842625"),
        ({"peak_bytes": 10**4000}, "peak_bytes: a number far too large"),
        ({"peak_bytes": 701}, "by_category adds up to 700, but peak_bytes is 701"),
        ({"by_category": []}, r"by_category is \[\], not a JSON object"),
        ({"by_category": CATEGORY_SIZES | {"inputs": -1}}, "by_category.inputs: -1"),
        ({"by_category": CATEGORY_SIZES | {"parametres": 1}}, "'parametres'; parameters is near"),
        ({"by_category": {"parameters": 700}}, "by_category lacks gradients, optimizer"),
        ({"by_phase": {"forward": 700, "backward": 0}}, "by_phase lacks optimizer"),
        ({"by_phase": dict.fromkeys(PHASES, 699)}, "by_phase's highest is 699"),
        ({"by_phase": dict.fromkeys(PHASES, 701)}, "by_phase's highest is 701"),
        ({"torch": "2.13.0; rm -rf /"}, "torch: .* is not a word"),
        ({"torch": "2" * 33}, "torch: .* is not a word of at most 32"),
        ({"torch": 2.13}, "torch: 2.13"),
        ({"precision": "bf16\n"}, "precision: "),
        ({"precision": ""}, "precision: ''"),
        ({"device": "tpu"}, "device: 'tpu' is none of cuda, cpu"),
        ({"device": ["cuda"]}, "device: "),
        ({"steps": 0}, "steps: 0"),
        ({"steps": 101}, "steps: 101"),
        ({"gpu": 1}, "unknown key 'gpu'"),
        ({"x" * 5000: 1}, "unknown key 'xxx"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_wrong(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        read(**changes)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize("key", sorted(record().keys() - {"version"}))
def test_every_key_is_needed(key: str) -> None:
    left = {name: value for name, value in record().items() if name != key}
    with pytest.raises(UsageError, match=f"lacks {key}"):
        read_memory_trace(json.dumps(left))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null x",
        "\ufeff{}",
        '{"version": NaN}',
        '{"version": Infinity}',
        '{"version": 1, "version": 1}',
        "[" * 8000,
        '{"a":' * 1500,
        '{"version": ' + "9" * 8000 + "}",
    ],
)
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no valid JSON"):
        read_memory_trace(text)


@pytest.mark.parametrize("text", ["null", "7", '"x"', "[]"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a JSON object"):
        read_memory_trace(text)


def test_a_long_text_is_refused_unread() -> None:
    with pytest.raises(UsageError, match=f"{TEXT_LIMIT + 1} characters"):
        read_memory_trace("{" + " " * TEXT_LIMIT)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)


@given(key=st.sampled_from(sorted(record())), value=JSON)
def test_no_value_anywhere_does_more_than_be_refused(key: str, value: object) -> None:
    try:
        found = read(**{key: value})
    except UsageError:
        return
    assert sum(found.by_category.values()) == found.peak_bytes == max(found.by_phase.values())
