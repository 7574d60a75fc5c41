"""The table of models: its sizes agree with its counts, and names find their rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.catalogue.llms import (
    describe,
    model_named,
    models,
    size_in,
    slug,
    synthesised,
)
from crater_slurm.model.workload import Architecture, Workload

TRANSFORMERS = [name for name, a in models().items() if a.family != "diffusion"]


def test_there_are_at_least_sixty_models() -> None:
    assert len(TRANSFORMERS) >= 60


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_parameters_are_what_the_sizes_give(name: str) -> None:
    a = models()[name]
    assert a.counted_parameters == pytest.approx(a.parameters, rel=0.02)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_heads_share_the_query_width_evenly(name: str) -> None:
    a = models()[name]
    assert a.heads % a.kv_heads == 0
    assert a.head_size or a.hidden % a.heads == 0


def test_llama_3_8b_counted_by_hand() -> None:
    a = models()["llama-3-8b"]
    attention = 4096 * (4096 + 1024 + 1024 + 4096)
    mlp = 3 * 4096 * 14336
    assert a.counted_parameters == 32 * (attention + mlp) + 2 * 128256 * 4096 == 8_029_995_008


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("qwen-1_8b-chat", "qwen-1.8b"),
        ("Qwen/Qwen1.5-14B-Chat", "qwen-14b"),
        ("Qwen-7B base", "qwen-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3"),
        ("openbuddy-zephyr-7b-chat", "mistral-7b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("google/gemma-2b-it", "gemma-2b"),
        ("T0_3B", "flan-t5-xl"),
        ("bigscience/mt0-xxl", "mt5-xxl"),
        ("bloomz-7b1", "bloom-7b1"),
        ("stabilityai/stablelm-base-alpha-3b", "stablelm-alpha-3b"),
        ("CompVis/stable-diffusion-v1-4", "stable-diffusion-v1"),
    ],
)
def test_a_name_finds_its_row(name: str, row: str) -> None:
    assert model_named(name) == row


@pytest.mark.parametrize("name", ["", "gpt", "llama", "qwen-9b", "chat", "--", "/", "7b"])
def test_what_is_no_row_finds_none(name: str) -> None:
    assert model_named(name) is None


@given(st.text(max_size=400))
def test_any_text_is_looked_up_without_harm(text: str) -> None:
    found = model_named(text)
    assert found is None or found in models()
    assert isinstance(slug(text), str)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("foo-13b", 13e9),
        ("org/Foo-8x7B-chat", 56e9),
        ("foo-560m", 560e6),
        ("bar_1.5B_v2", 1.5e9),
        ("foo", None),
        ("foo-4bit", None),
        ("foo13bar", None),
    ],
)
def test_a_size_is_read_out_of_a_name(name: str, size: float | None) -> None:
    assert size_in(name) == size


def test_an_unknown_name_with_a_size_is_less_certain() -> None:
    known = describe(Workload(model="foo-13b"))
    assert known is not None
    assert known.certainty == "name"
    assert known.architecture.parameters == 13e9
    assert "not in the catalogue" in known.note


def test_a_stated_count_beats_the_size_in_a_name() -> None:
    known = describe(Workload(model="foo-13b", parameters=12.1e9))
    assert known is not None
    assert (known.certainty, known.architecture.parameters) == ("stated", 12.1e9)


def test_a_known_name_with_another_size_is_another_model() -> None:
    near = describe(Workload(model="Llama-3-8B", parameters=8e9))
    far = describe(Workload(model="Llama-3-8B", parameters=30e9))
    assert near is not None and near.certainty == "catalogue"
    assert far is not None and far.architecture.parameters == 30e9
    assert "another size" in far.note


def test_own_sizes_are_taken_as_they_are() -> None:
    own = Architecture(parameters=5, layers=1, hidden=1, intermediate=1, heads=1, kv_heads=1,
                       vocabulary=1)  # fmt: skip
    known = describe(Workload(model="Llama-3-8B", architecture=own))
    assert known is not None and known.architecture is own


def test_neither_name_nor_count_is_nothing() -> None:
    assert describe(Workload(model="mystery")) is None
    assert describe(Workload()) is None


@given(st.floats(3e8, 4e11))
def test_a_made_up_shape_has_about_the_parameters_that_were_asked_for(parameters: float) -> None:
    made = synthesised(parameters)
    assert made.parameters == parameters
    assert made.counted_parameters == pytest.approx(parameters, rel=0.25)
