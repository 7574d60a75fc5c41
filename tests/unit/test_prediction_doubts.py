"""GPU memory: what is kept for adapters, what nobody said, and figures that never fall."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_prediction import LLAMA, PARAMETERS, of, term

from crater_slurm.model.workload import Workload
from crater_slurm.placement.prediction import predict
from crater_slurm.placement.prediction.recipes import RECIPES


def test_unsaid_attention_raises_the_bound_and_nothing_else() -> None:
    asked: dict[str, Any] = {"method": "lora", "framework": "swift", "sequence_length": 8192}
    flash, unsaid, eager = (of(**asked, attention=word) for word in ("flash", None, "eager"))
    assert unsaid.expected == flash.expected < eager.expected < unsaid.upper
    assert unsaid.lower == flash.lower
    assert unsaid.needed == flash.needed
    assert flash.upper < unsaid.upper


def test_a_framework_with_its_own_attention_leaves_no_doubt_of_it() -> None:
    asked: dict[str, Any] = {"method": "lora", "framework": "torchtune", "sequence_length": 8192}
    assert of(**asked, attention="flash").upper == of(**asked).upper


def test_an_adapter_s_dropout_keeps_its_input_and_a_mask() -> None:
    asked: dict[str, Any] = {"method": "lora", "framework": "litgpt", "sequence_length": 1000}
    narrow, wide = of(**asked, lora_targets="qv"), of(**asked, lora_targets="all")
    more = 3 * (4096 + 2 * 4096 + 14336) * 32 * 1000  # 16 bit and a byte of mask per element
    assert term(wide, "kept activations") - term(narrow, "kept activations") == more


def test_a_quantised_matrix_keeps_its_input_where_nothing_is_computed_again() -> None:
    asked: dict[str, Any] = {"framework": "litgpt", "sequence_length": 1000, "lora_rank": 8}
    plain, quantised = of(**asked, method="lora"), of(**asked, method="qlora")
    kept = term(quantised, "kept activations") - term(plain, "kept activations")
    assert kept == pytest.approx(4.8 * (2 * 4096 + 14336) * 32 * 1000)


def test_litgpt_gives_a_tied_model_a_head_of_its_own() -> None:
    tied = of(model="gemma-2b", method="lora", framework="torchtune")
    untied = of(model="gemma-2b", method="lora", framework="litgpt")
    assert term(untied, "weights") - term(tied, "weights") == 2 * 256000 * 2048


def test_a_trainer_computes_layers_again_only_over_a_quantised_base() -> None:
    assert "activation-checkpointing=no" in of(method="lora", framework="transformers").assumed
    assert "activation-checkpointing=yes" in of(method="qlora", framework="transformers").assumed


def test_gradients_of_an_offloaded_run_lie_on_the_host() -> None:
    asked: dict[str, Any] = {"method": "full", "sharding": "fsdp", "gpus": 2}
    there = of(**asked, offload=frozenset({"parameters"}))
    assert term(of(**asked), "gradients") == PARAMETERS  # 16 bit, half of them
    assert term(there, "gradients") < 0.5e9


def test_an_unsaid_precision_may_be_twice_as_much() -> None:
    p = predict(Workload(model="Llama-3-8B", method="lora", micro_batch=1, sequence_length=1024))
    assert p.upper > 2 * term(p, "weights")


@pytest.mark.parametrize("framework", [recipe.name for recipe in RECIPES] + ["unheard-of"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora", "dpo"])
@pytest.mark.parametrize("card", [None, 80 * 2.0**30])
def test_no_figure_falls_where_the_highest_point_changes(
    framework: str, method: str, card: float | None
) -> None:
    last = (0.0, 0.0, 0.0)
    for length in (128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192):
        asked = dataclasses.replace(
            LLAMA, method=method, framework=framework, sequence_length=length
        )
        p = predict(asked, card_bytes=card)
        figures = (p.expected, p.upper, p.needed)
        assert all(now >= then * (1 - 1e-9) for now, then in zip(figures, last, strict=True))
        last = figures
