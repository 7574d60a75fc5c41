"""Seen peaks, what fits a card, the smallest change, and the host's needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.errors import UsageError
from crater_slurm.model.workload import Workload
from crater_slurm.placement.prediction import Peak, predict
from crater_slurm.placement.prediction.fit import fit, smallest_change
from crater_slurm.placement.prediction.host import HostNeed, host_needs

WORK = Workload(model="Llama-3-8B", method="lora", framework="torchtune", micro_batch=2,
                sequence_length=2048, precision="bf16")  # fmt: skip
A100_40, A100_80 = 40960, 81920


def changed(**changes: Any) -> Workload:
    return dataclasses.replace(WORK, **changes)


def test_seen_peaks_pull_the_prediction_and_narrow_it() -> None:
    formula = predict(WORK)
    assert formula.decided_by == "formula"
    seen = 1.2 * formula.expected
    once, often = (predict(WORK, peaks=[Peak(seen, WORK)] * n) for n in (1, 6))
    assert formula.expected < once.expected < often.expected < seen
    assert often.expected == pytest.approx(seen, rel=0.02)
    assert often.decided_by == "observed"
    assert often.upper - often.expected < once.upper - once.expected
    assert once.upper - once.expected < formula.upper - formula.expected
    assert often.terms[-1].name == "correction"
    assert sum(t.bytes for t in often.terms) == pytest.approx(often.expected)


def test_a_seen_peak_is_never_above_the_bound() -> None:
    peaks = [Peak(18e9, WORK)] * 9 + [Peak(33e9, WORK)]
    p = predict(WORK, peaks=peaks)
    assert p.upper >= 33e9
    assert p.needed >= 33e9


def test_far_settings_count_less_than_near_ones() -> None:
    near, far = changed(sequence_length=4096), changed(sequence_length=65536, micro_batch=16)
    pulls = [
        predict(WORK, peaks=[Peak(1.3 * predict(w).expected, w)]).expected for w in (near, far)
    ]
    assert pulls[0] > pulls[1] > predict(WORK).expected


@pytest.mark.parametrize(
    "peak",
    [
        Peak(30e9, Workload(model="Llama-2-7B", method="lora", framework="torchtune")),
        Peak(1e6, WORK),
        Peak(1e15, WORK),
        Peak(float("nan"), WORK),
        Peak(-3.0, WORK),
    ],
)
def test_peaks_of_other_work_or_beyond_belief_change_nothing(peak: Peak) -> None:
    assert predict(WORK, peaks=[peak]) == predict(WORK)


def test_a_traced_step_replaces_its_terms() -> None:
    p = predict(WORK, trace={"parameter": 16e9, "activation": 2e9, "temporary": 7e9, "who": 9e9})
    assert p.decided_by == "traced"
    assert {t.name: t.bytes for t in p.terms if t.why == "traced"} == {
        "parameter": 16e9,
        "activation": 2e9,
        "temporary": 7e9,
    }
    assert not {"weights", "logits", "kept activations"} & {t.name for t in p.terms}
    assert sum(t.bytes for t in p.terms) == pytest.approx(p.expected)
    formula = predict(WORK)
    assert p.upper - p.expected < formula.upper - formula.expected
    assert predict(WORK, trace={"who": 9e9}) == formula


def test_fits_by_the_bound_and_the_headroom() -> None:
    enough = fit(WORK, A100_80)
    assert enough.fits
    assert enough.needed_mib <= enough.usable_mib == A100_80
    edge = enough.needed_mib
    assert fit(WORK, edge + 1500).fits
    assert not fit(WORK, edge + 1500, headroom=0.2).fits
    assert not fit(WORK, 16384).fits  # 16.06 GB of weights alone


def test_without_need_no_change() -> None:
    found = smallest_change(WORK, A100_80)
    assert found is not None and found.directives == ()


def test_checkpointing_alone_is_the_first_way_out() -> None:
    heavy = changed(activation_checkpointing=False, micro_batch=1, sequence_length=4096)
    assert not fit(heavy, A100_40).fits
    found = smallest_change(heavy, A100_40)
    assert found is not None
    assert found.directives == ("activation-checkpointing=yes",)
    assert found.fit.fits


def test_full_training_on_a_small_card_shards_or_trains_adapters() -> None:
    full = changed(method="full")
    found = smallest_change(full, A100_40)
    assert found is not None and found.fit.needed_mib <= A100_40
    assert fit(found.workload, A100_40).fits
    assert any(word.startswith(("sharding=", "method=")) for word in found.directives)


def test_a_quantised_server_fits_where_bf16_does_not() -> None:
    serve = Workload(model="Llama-3-70B", method="inference", sequence_length=2048, micro_batch=1)
    found = smallest_change(serve, A100_80)
    assert found is not None and found.fit.fits
    assert found.directives[0].startswith(("quantization=", "tensor-parallel="))


def test_what_nothing_helps_has_no_change() -> None:
    assert smallest_change(Workload(model="Llama-3.1-405B", method="full"), 8192) is None


@settings(deadline=None)  # the machine may be busy
@given(
    st.sampled_from(["full", "lora", "qlora", "inference"]),
    st.sampled_from(["Llama-3-8B", "Qwen2-0.5B", "Llama-3-70B"]),
    st.sampled_from([15360, 24576, A100_40, A100_80]),
)
def test_a_change_that_is_told_makes_it_fit(method: str, model: str, memory: int) -> None:
    work = Workload(model=model, method=method, micro_batch=4, sequence_length=2048)
    found = smallest_change(work, memory)
    assert found is None or fit(found.workload, memory).fits


def needs(workload: Workload, **options: Any) -> dict[str, HostNeed]:
    return {need.name: need for need in host_needs(workload, **options)}


def test_checkpoint_of_a_mixed_full_training_is_14_bytes_per_parameter() -> None:
    found = needs(changed(method="full", framework="deepspeed"), checkpoint_interval_seconds=600)
    assert found["checkpoint"].expected == pytest.approx(14 * 8.03)
    assert found["SSD write"].expected == pytest.approx(14 * 8030 / 600)


def test_adapters_make_small_checkpoints_and_a_server_none() -> None:
    assert needs(WORK)["checkpoint"].expected < 0.1
    assert "checkpoint" not in needs(changed(method="inference"))


def test_the_optimiser_on_the_host_takes_16_bytes_per_parameter_there() -> None:
    full = changed(method="full", framework="deepspeed", sharding="zero2")
    plain = needs(full)["host memory"].expected
    offloaded = needs(dataclasses.replace(full, offload=frozenset({"optimizer"})))
    assert offloaded["host memory"].expected - plain == pytest.approx(1.1 * 16 * 8.03)


def test_reads_follow_step_time_and_pattern() -> None:
    # 4096 tokens of 4 bytes in a step of 8 x 8.03e9 x 4096 / 125e12 = 2.105 s
    random, in_order = needs(WORK), needs(WORK, io_pattern="sequential")
    assert random["SSD read"].expected == pytest.approx(4096 * 4 / 2.105 / 1e6, rel=1e-3)
    assert random["SSD read operations"].expected == pytest.approx(2 / 2.105, rel=1e-3)
    assert in_order["SSD read operations"].expected < random["SSD read operations"].expected
    assert needs(WORK, reached_tflop_s=250)["SSD read"].expected == pytest.approx(
        2 * random["SSD read"].expected
    )


def test_images_are_read_as_files() -> None:
    images = needs(Workload(model="stable-diffusion-v1-4", method="full", micro_batch=8))
    # 6 x 1.066e9 x 4096 operations for each of 8 samples, at 125 TFLOP/s
    step = 8 * 6 * 1.066e9 * 4096 / 125e12
    assert images["SSD read"].expected == pytest.approx(8 * 0.110 / step)
    assert images["SSD read operations"].expected == pytest.approx(8 / step)


@pytest.mark.parametrize("method", ["full", "lora", "inference", "rlhf"])
def test_every_need_lies_in_its_interval(method: str) -> None:
    for need in host_needs(changed(method=method)):
        assert 0 <= need.lower <= need.expected <= need.upper
        assert need.why


def test_the_host_of_an_unknown_model_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"'mystery' is unknown; say model-params"):
        host_needs(Workload(model="mystery"))
