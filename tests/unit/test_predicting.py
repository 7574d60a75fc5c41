"""What a submission's prediction does: to the plan, to the record, to what its user is told."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from cluster_samples import GIB, decider, gpus, message, node, view

from crater_slurm.model.directives import parse_script
from crater_slurm.model.job import Job
from crater_slurm.model.observation import Observation
from crater_slurm.model.plan import Decision
from crater_slurm.model.workload import Workload, stated, workload_of
from crater_slurm.placement.need import Expected
from crater_slurm.placement.prediction.memory import predict
from crater_slurm.scheduler.answers import Answer
from crater_slurm.scheduler.predicting import NOTHING, Predictor, expected_of
from crater_slurm.scheduler.replan import wanted
from crater_slurm.store.decisions import decision_from_dict, decision_to_dict

LORA = "model=Llama-3-8B method=lora framework=torchtune micro-batch=2 sequence-length=2048"
SMALL = gpus(0, 1, model="t4", gres_type="t4", memory_mib=15 * GIB)


def seen(mib: int, words: str = LORA, **fields: Any) -> Observation:
    workload = workload_of(parse_script(f"#CRATER {words}").request, 1)
    assert workload is not None
    base = Observation(
        job_id=1, plan_id="p0", node="n1", time=1.0, seconds=900.0, ended=True, samples=9,
        key=workload.key, workload=stated(workload), gpu_memory_peak_mib=mib,
    )  # fmt: skip
    return dataclasses.replace(base, **fields)


def predictor(*peaks: Observation, require: bool = True) -> Predictor:
    def of(workload: Workload) -> tuple[Observation, ...]:
        return tuple(one for one in peaks if one.key == workload.key)

    return Predictor(of, require=require)


def decided(words: str, predict: Predictor, *profiles: Any, **fields: str) -> Answer:
    made = dataclasses.replace(decider(), predict=predict)
    return made.decide(message(words, **fields), view(*profiles))


def mib(words: str, part: str) -> int:
    workload = workload_of(parse_script(f"#CRATER {words}").request, 1)
    assert workload is not None
    found = predict(workload)
    return found.mib(getattr(found, part))


def test_cards_that_cannot_hold_the_work_are_left_out() -> None:
    """Weights of 8.03 B parameters alone are 15,317 MiB in bf16: a T4's 15,360 will not do."""
    assert mib(LORA, "lower") > 15 * GIB
    answer = decided(f"gpus=1 {LORA}", predictor(), node("a1"), node("t1", cards=SMALL))
    assert answer.decision is not None
    assert answer.decision.passed_nodes == "a1"
    assert any("predicted for each GPU: " in line for line in answer.messages)
    told = decided(f"gpus=1 {LORA}", predictor(require=False), node("a1"), node("t1", cards=SMALL))
    assert told.decision is not None
    assert told.decision.passed_nodes == "a1,t1"


def test_a_job_that_fits_no_card_is_refused_with_the_prediction() -> None:
    answer = decided(f"gpus=1 {LORA}", predictor(), node("t1", cards=SMALL))
    assert answer.reject
    text = "\n".join(answer.messages)
    assert "gpu-memory: needs" in text
    assert "by the formula for llama-3-8b with torchtune" in text


@pytest.mark.parametrize(
    "words",
    [
        "model=Llama-3-8B",  # trained how?
        "model=Llama-3-8B method=full",  # by what?
        "model=Llama-3-8B method=full framework=homemade",
        "model=Llama-3-8B method=full framework=deepspeed sharding=zero3",  # kept on the host?
        "model=Llama-3-8B method=full framework=torchtune gpus=2",  # shared out?
    ],
)
def test_a_guess_about_what_nobody_said_leaves_no_card_out(words: str) -> None:
    words = words if "gpus=" in words else f"gpus=1 {words}"
    answer = decided(words, predictor(), node("t1", cards=SMALL))
    assert not answer.reject
    assert answer.decision is not None
    assert answer.decision.prediction["least_mib"] == 0
    assert any("predicted for each GPU" in line for line in answer.messages)


def test_without_a_model_nothing_is_predicted() -> None:
    request = parse_script("#CRATER gpus=1 gpu-memory=16GiB method=lora").request
    assert predictor()(request, Job(user_id=1)) is NOTHING


def test_a_model_of_unknown_size_is_told_and_asks_for_nothing() -> None:
    answer = decided("gpus=1 model=mystery", predictor(), node("a1"))
    assert not answer.reject
    (line,) = [m for m in answer.messages if "no prediction" in m]
    assert "'mystery'" in line
    assert "model-params=8.03B" in line


@pytest.mark.parametrize(("own", "told"), [("gpu-memory=16GiB", True), ("gpu-memory=70GiB", False)])
def test_who_asks_for_less_than_expected_is_told(own: str, told: bool) -> None:
    big = node("h1", cards=gpus(0, 1, memory_mib=80 * GIB))
    answer = decided(f"gpus=1 {own} {LORA}", predictor(), big)
    assert any("may be too little" in line for line in answer.messages) is told


def test_what_such_jobs_took_before_corrects_the_formula() -> None:
    formula = mib(LORA, "expected")
    half_more = formula * 3 // 2
    found = predictor(*[seen(half_more)] * 4)(
        parse_script(f"#CRATER gpus=1 {LORA}").request, Job(user_id=1)
    )
    assert found.record["decided_by"] == "observed"
    assert formula * 1.3 < found.record["expected_mib"] < half_more  # type: ignore[operator]
    assert found.record["wanted_mib"] >= 1.02 * half_more - 1  # type: ignore[operator]
    assert "by what such jobs took" in found.notes[0]


def test_a_new_peak_is_heard_of_at_the_next_submission() -> None:
    peaks: list[Observation] = []
    predict_job = Predictor(lambda workload: tuple(peaks))
    request = parse_script(f"#CRATER gpus=1 {LORA}").request
    first = predict_job(request, Job(user_id=1))
    assert predict_job(request, Job(user_id=1)) is first, "alike, and worked out once"
    peaks.append(seen(40_000))
    assert predict_job(request, Job(user_id=1)).record["peaks"] == 1


def test_several_nodes_share_what_is_sharded() -> None:
    words = "gpus=4 model=Llama-3-8B method=full sharding=zero3 micro-batch=1 sequence-length=512"
    request = parse_script(f"#CRATER {words}").request
    one = predictor()(request, Job(user_id=1)).record["expected_mib"]
    four = predictor()(request, Job(user_id=1, min_nodes=4)).record["expected_mib"]
    assert four < one  # type: ignore[operator]


def test_a_shared_gpu_is_asked_for_as_much_as_is_expected() -> None:
    request = parse_script("#CRATER gpus=1 gpu-sharing=yes").request
    assert Expected(4000, 6000).refine(request).gpu_memory_mib == 6000
    own = parse_script("#CRATER gpus=1 gpu-sharing=yes gpu-memory=2GiB").request
    assert Expected(4000, 6000).refine(own).gpu_memory_mib == 4000


def test_the_record_has_it_all_and_plans_alike_again() -> None:
    there = (node("a1"), node("t1", cards=SMALL))
    answer = decided(f"gpus=1 {LORA}", predictor(), *there)
    assert answer.decision is not None
    kept = decision_from_dict(json.loads(json.dumps(decision_to_dict(answer.decision))))
    assert isinstance(kept, Decision)
    assert {"weights", "CUDA context"} <= {t["name"] for t in kept.prediction["terms"]}  # type: ignore[attr-defined]
    assert expected_of(kept.prediction) == Expected(mib(LORA, "lower"), mib(LORA, "needed"))
    again = wanted(kept, view(*there), {"membw", "nviops", "nvme"})
    assert again is not None
    assert (again.excluded, again.same) == ({"t1"}, True)


def test_a_traced_step_counts_more_than_the_formula() -> None:
    """30 GiB of tensors, and the context that no trace sees."""
    request = parse_script(f"#CRATER gpus=1 traced-memory=30GiB {LORA}").request
    found = predictor()(request, Job(user_id=1))
    assert found.record["decided_by"] == "traced"
    terms = {t["name"]: t["mib"] for t in found.record["terms"]}  # type: ignore[attr-defined]
    assert terms["step"] == 30 * GIB
    assert "weights" not in terms
    assert 30 * GIB + 500 < found.record["expected_mib"] < 34 * GIB  # type: ignore[operator]
    assert "by a traced step" in found.notes[0]
