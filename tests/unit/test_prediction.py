"""GPU memory: terms that someone worked out by hand, and what must hold for any workload."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.catalogue.llms import models
from crater_slurm.errors import UsageError
from crater_slurm.model.workload import Workload
from crater_slurm.placement.prediction import Prediction, predict
from crater_slurm.placement.prediction.recipes import FITTED, GENERIC, RECIPES, recipe_for

LLAMA = Workload(model="Llama-3-8B", micro_batch=1, sequence_length=1024, precision="bf16")
PARAMETERS = 8030e6


def of(**changes: Any) -> Prediction:
    return predict(dataclasses.replace(LLAMA, **changes))


def term(prediction: Prediction, name: str) -> float:
    return sum(t.bytes for t in prediction.terms if t.name == name)


def test_weights_of_llama_3_8b_in_bf16_are_16_06_gb() -> None:
    assert term(of(method="lora"), "weights") == 16.06e9


def test_mixed_full_training_takes_16_bytes_per_parameter() -> None:
    p = of(method="full", framework="deepspeed")
    states = sum(term(p, name) for name in ("weights", "gradients", "optimiser state"))
    assert states == 16 * PARAMETERS


def test_pure_bf16_full_training_takes_8_bytes_and_a_copy_in_the_step() -> None:
    p = of(method="full", framework="torchtune")
    states = sum(term(p, name) for name in ("weights", "gradients", "optimiser state"))
    assert states == 8 * PARAMETERS
    assert term(p, "optimiser step") == 2 * PARAMETERS
    assert p.point == "the optimiser's step"


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"),
    [("adamw", 4.0), ("adamw_8bit", 2.04), ("sgd", 2.0), ("lion", 2.0), ("adafactor", 0.04)],
)
def test_optimiser_state(optimizer: str, bytes_per_parameter: float) -> None:
    p = of(method="full", framework="torchtune", optimizer=optimizer)
    assert term(p, "optimiser state") == pytest.approx(bytes_per_parameter * PARAMETERS)


@pytest.mark.parametrize(
    ("stage", "bytes_per_parameter"),
    [(None, 16.0), ("zero1", 4 + 12 / 8), ("zero2", 2 + 14 / 8), ("zero3", 16 / 8)],
)
def test_zero_divides_as_its_paper_says(stage: str | None, bytes_per_parameter: float) -> None:
    p = of(method="full", framework="deepspeed", sharding=stage, gpus=8)
    states = sum(term(p, name) for name in ("weights", "gradients", "optimiser state"))
    assert states == pytest.approx(bytes_per_parameter * PARAMETERS)


def test_zero_3_gathers_at_most_a_thousand_million_parameters_and_the_embeddings() -> None:
    p = of(method="full", framework="deepspeed", sharding="zero3", gpus=8)
    assert term(p, "gathered weights") == 1e9 * 2 + 2 * 128256 * 4096 * 2


def test_tensor_and_pipeline_parallelism_divide_the_states() -> None:
    p = of(method="full", framework="megatron", tensor_parallel=4, pipeline_parallel=2, gpus=8)
    assert term(p, "weights") == 2 * PARAMETERS / 8
    assert term(p, "optimiser state") == 12 * PARAMETERS / 8


def test_lora_parameters_of_q_and_v() -> None:
    p = of(method="lora", framework="torchtune", lora_rank=8)
    # per layer 8 x (4096 + 4096) for q and 8 x (4096 + 1024) for v; 32 layers; 2 bytes each
    assert term(p, "adapters") == 2 * 32 * 8 * (8192 + 5120)


def test_lora_rank_hardly_matters() -> None:
    small = of(method="lora", framework="torchtune", lora_rank=8).expected
    large = of(method="lora", framework="torchtune", lora_rank=64).expected
    assert 1.0 < large / small < 1.03


def test_nf4_quantises_all_but_embeddings_and_head() -> None:
    outside = 2 * 128256 * 4096
    p = of(method="qlora", framework="unsloth")
    assert term(p, "embeddings and head") == 2 * outside
    assert term(p, "weights") == pytest.approx((PARAMETERS - outside) * 0.5625)
    p = of(method="qlora", framework="trl")  # peft raises what is not quantised to fp32
    assert term(p, "embeddings and head") == 4 * outside
    p = of(method="qlora", framework="trl", quantization="gptq")  # but not over GPTQ
    assert term(p, "embeddings and head") == 2 * outside


def test_kv_cache_of_llama_3_8b() -> None:
    p = of(method="inference", micro_batch=4, sequence_length=8192)
    # 2 (key, value) x 32 layers x 8 heads x 128 x 2 bytes = 131,072 bytes per token
    assert term(p, "KV cache") == 131_072 * 4 * 8192
    assert term(p, "gradients") == 0


def test_checkpointed_activations_are_one_input_per_layer() -> None:
    p = of(method="lora", activation_checkpointing=True)
    assert term(p, "kept activations") == 32 * 4096 * 2 * 1024


def test_logits_of_a_large_vocabulary_dominate_a_small_model() -> None:
    small = dataclasses.replace(LLAMA, model="Qwen2-0.5B", method="lora", sequence_length=4096)
    p = predict(small)
    assert p.point == "the loss"
    assert term(p, "logits") == 16 * 151936 * 4096
    assert term(p, "logits") > term(p, "weights")
    fused = predict(dataclasses.replace(small, fused_loss=True))
    assert term(fused, "logits") < 0.05 * term(p, "logits")


def test_eager_attention_grows_with_the_square_of_the_length() -> None:
    def scores(length: int) -> float:
        p = of(method="lora", attention="eager", activation_checkpointing=False, fused_loss=True,
               sequence_length=length)  # fmt: skip
        return term(p, "attention scores")

    assert scores(2048) == 32 * 32 * 5 * 2048**2  # layers x heads x 5 bytes per score
    assert scores(4096) == 4 * scores(2048)


def test_a_preference_pair_is_two_samples_and_a_reference() -> None:
    p = of(method="dpo", framework="torchtune", activation_checkpointing=True, sequence_length=8192)
    assert term(p, "reference model") == 2 * PARAMETERS
    lora = of(method="dpo", lora_rank=8, sequence_length=8192, activation_checkpointing=True)
    assert term(lora, "reference model") == 0
    assert term(lora, "kept activations") == 32 * 4096 * 2 * 2 * 8192


def test_ppo_holds_four_models() -> None:
    p = of(method="rlhf", framework="deepspeed")
    assert term(p, "frozen models") == 2 * 2 * PARAMETERS
    assert term(p, "value model") == 2 * PARAMETERS
    assert term(p, "optimiser state") == 2 * 12 * PARAMETERS


def test_the_step_inside_backward_keeps_one_layer_s_gradients() -> None:
    p = of(method="full", framework="torchtune", optimizer_in_backward=True)
    assert term(p, "gradients") == 2 * models()["llama-3-8b"].layer_parameters
    assert term(p, "optimiser step") == 0


def test_offloaded_states_leave_the_gpu() -> None:
    p = of(method="full", framework="deepspeed", sharding="zero2", gpus=4,
           offload=frozenset({"optimizer"}))  # fmt: skip
    assert term(p, "optimiser state") == 0
    assert of(method="lora", offload=frozenset({"parameters"})).expected < 16.06e9


def test_a_server_takes_its_share_of_the_card() -> None:
    card = 80 * 2**30
    p = predict(dataclasses.replace(LLAMA, framework="vllm"), card_bytes=card)
    assert p.expected == pytest.approx(0.9 * card)
    assert p.needed < 40e9


def test_meters_count_less_and_less() -> None:
    work = dataclasses.replace(LLAMA, method="lora", framework="ms-swift")
    driver, reserved, allocated = (
        predict(work, meter=meter).expected for meter in ("driver", "reserved", "allocated")
    )
    assert driver - reserved == pytest.approx(0.55e9)
    assert allocated < reserved


def test_a_card_s_limit_takes_the_cache_back() -> None:
    work = dataclasses.replace(LLAMA, method="lora", framework="ms-swift", sequence_length=8192)
    free = predict(work)
    card = free.expected - 5e9
    assert predict(work, card_bytes=card).expected <= card


def test_the_terms_add_up() -> None:
    for framework in ("torchtune", "swift", "trl", "deepspeed", None):
        p = of(method="full", framework=framework)
        assert sum(t.bytes for t in p.terms) == pytest.approx(p.expected)
        assert all(t.why for t in p.terms)


def test_what_was_not_said_is_told() -> None:
    p = predict(Workload(model="Llama-3-8B"))
    assert "method=full" in p.assumed
    assert "precision=bf16" in p.assumed
    assert any("no framework" in sentence for sentence in p.assumed)


def test_a_model_of_no_known_size_is_an_error_with_the_nearest_names() -> None:
    with pytest.raises(UsageError, match=r"'lama-thing' is unknown; near to it are llama-.*8\.03B"):
        predict(Workload(model="lama-thing"))


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("pytorch/torchtune 0.4", "torchtune"),
        ("ms-swift LLM Benchmark", "ms-swift"),
        ("HF PEFT README", "peft"),
        ("LLaMA-Factory", "llama-factory"),
        ("LLaMA-Factory on Qwen", "llama-factory"),
        ("Lightning-AI/litgpt", "litgpt"),
        ("trl", "transformers"),
        ("Qwen finetune.py", "qwen"),
        ("my own loop", "generic"),
        (None, "generic"),
    ],
)
def test_a_framework_s_name_finds_its_recipe(name: str | None, recipe: str) -> None:
    assert recipe_for(name).name == recipe


def test_an_unknown_framework_has_the_widest_interval() -> None:
    assert FITTED.keys() <= {recipe.name for recipe in RECIPES}
    for recipe in RECIPES:
        assert recipe.spread_dynamic <= GENERIC.spread_dynamic
    known, unknown = of(method="lora", framework="axolotl"), of(method="lora", framework="mine")
    assert unknown.upper / unknown.expected > known.upper / known.expected


def test_guessed_sizes_widen_the_interval() -> None:
    stated = of(model="foo", parameters=8e9, method="lora")
    named = of(model="foo-8b", method="lora")
    relative = [p.upper / p.expected for p in (of(method="lora"), stated, named)]
    assert relative == sorted(relative)
    assert relative[0] < relative[2]


FRAMEWORKS = st.sampled_from([None, *(recipe.name for recipe in RECIPES)])
WORKLOADS = st.builds(
    Workload,
    model=st.sampled_from(list(models())),
    method=st.sampled_from([None, "full", "lora", "qlora", "rlhf", "dpo", "pretrain", "inference"]),
    framework=FRAMEWORKS,
    precision=st.sampled_from([None, "fp32", "fp16", "bf16", "fp8", "int8", "int4"]),
    quantization=st.sampled_from([None, "none", "int8", "int4", "nf4", "gptq", "awq"]),
    optimizer=st.sampled_from(
        [None, "adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd"]
    ),
    lora_rank=st.none() | st.integers(1, 65536),
    micro_batch=st.none() | st.integers(1, 1048576),
    sequence_length=st.none() | st.integers(1, 16777216),
    activation_checkpointing=st.none() | st.booleans(),
    sharding=st.sampled_from([None, "none", "ddp", "fsdp", "zero1", "zero2", "zero3"]),
    tensor_parallel=st.integers(1, 1024),
    pipeline_parallel=st.integers(1, 1024),
    gpus=st.integers(1, 4096),
)


@settings(deadline=None)  # the machine may be busy
@given(WORKLOADS)
def test_the_interval_holds_the_expected_value(workload: Workload) -> None:
    p = predict(workload)
    assert 0 <= p.lower <= p.expected <= p.upper < float("inf")
    assert p.needed <= p.upper * (1 + 1e-9)
    assert all(t.bytes >= 0 for t in p.terms)


@settings(deadline=None)  # the machine may be busy
@given(WORKLOADS, st.integers(1, 1000), st.integers(1, 10000), st.integers(2, 8))
def test_more_work_never_needs_less(
    workload: Workload, batch: int, length: int, times: int
) -> None:
    small = dataclasses.replace(workload, micro_batch=batch, sequence_length=length)
    for larger in (
        dataclasses.replace(small, micro_batch=batch * times),
        dataclasses.replace(small, sequence_length=length * times),
    ):
        assert predict(larger).expected >= predict(small).expected * (1 - 1e-9)


@settings(deadline=None)  # the machine may be busy
@given(WORKLOADS)
def test_checkpointing_never_needs_more_where_a_model_has_layers(workload: Workload) -> None:
    on, off = (
        predict(dataclasses.replace(workload, activation_checkpointing=value), meter="allocated")
        for value in (True, False)
    )
    assert on.expected <= off.expected * (1 + 1e-9)
