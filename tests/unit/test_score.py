"""The score of a node: values worked out by hand, and which nodes a job is told to prefer."""

from __future__ import annotations

import dataclasses

import pytest
from cluster_samples import decider, gpus, message, node, plan, replan, view
from pydantic import ValidationError

from crater_slurm.config.settings import Settings
from crater_slurm.model import drives
from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement.need import Need
from crater_slurm.placement.rules import evaluate
from crater_slurm.placement.score import Ranked, Score, Weights, expression_of, preferred, score

GIB = 1024


def scored(profile: NodeProfile, need: Need, weights: Weights | None = None) -> Score:
    return score(profile, need, evaluate(profile, need), weights or Weights())


def test_a_score_by_hand() -> None:
    """Two of four GPUs, so half of 32 cores, of 280.7 GB/s and of 900,000 IOPS are its share."""
    need = Need(
        gpus=2, gpu_memory_mib=16 * GIB, cpus=8, memory_bandwidth_gb_s=140, ssd_iops=800_000
    )
    found = scored(node(), need)
    assert {t.name: round(t.value, 6) for t in found.terms} == {
        "gpu-memory": 0.4,  # 16 of 40 GiB
        "cpu-cores": 0.5,  # 8 of 16 cores
        "memory-bandwidth": round(140 / 140.35, 6),
        "ssd-iops": round(450_000 / 800_000, 6),  # takes more than its share
    }
    expected = 0.45 * 0.4 + 0.20 * 0.5 + 0.20 * 140 / 140.35 + 0.15 * 450 / 800
    assert found.value == pytest.approx(expected)


def test_what_is_not_asked_for_does_not_count() -> None:
    """Without GPUs the weights of cores and bandwidth are one half each, and all of it counts."""
    found = scored(node(), Need(cpus=8, memory_bandwidth_gb_s=140.35))
    assert [(t.name, t.weight) for t in found.terms] == [
        ("cpu-cores", 0.5),
        ("memory-bandwidth", 0.5),
    ]
    assert found.value == pytest.approx(0.5 * 8 / 32 + 0.5 * 0.5)
    assert scored(node(), Need(gpus=1)) == Score(1.0)


def test_a_weight_of_zero_leaves_the_amount_out() -> None:
    weights = Weights(gpu_memory=0, cpu_cores=1, memory_bandwidth=0, ssd_iops=0)
    found = scored(node(), Need(gpus=2, gpu_memory_mib=40 * GIB, cpus=8), weights)
    assert [t.name for t in found.terms] == ["cpu-cores"]
    assert found.value == 0.5


@pytest.mark.parametrize(
    ("ratio", "latency_us", "weight"),
    [
        (0.69, 80, 0.3),
        (0.70, 80, 1.0),
        (0.84, 80, 1.0),
        (0.85, 80, 1.0),
        (0.9, 200, 1.0),
        (0.9, 200.1, 0.3),
        (0.69, 300, 0.3),
        (None, None, 1.0),
    ],
)
def test_a_poor_drive_counts_three_tenths(
    ratio: float | None, latency_us: float | None, weight: float
) -> None:
    assert drives.weight(ratio, latency_us) == weight
    good = node(latency_us=latency_us)
    drive = dataclasses.replace(good.nvmes[0], iops_stability_ratio=ratio)
    found = scored(dataclasses.replace(good, nvmes=(drive,)), Need(ssd_iops=900_000))
    assert found.value == pytest.approx(weight)
    assert ("counted 0.3" in found.terms[0].why) == (weight == 0.3)


def test_the_smaller_card_suits_a_small_job_better() -> None:
    small = node("l1", cards=gpus(0, 1, model="l4", gres_type="l4", memory_mib=24 * GIB))
    planner = view(node("a1"), small, features={"l1": {"gpu_l4"}}).planner
    outcome = replan(planner, "gpus=1 gpu-memory=16GiB")
    assert [group.example for group in outcome.ranked] == ["l1", "a1"]
    assert outcome.prefer == "gpu_l4"


def test_equal_nodes_are_all_preferred_which_is_none() -> None:
    outcome = plan("gpus=1 gpu-memory=16GiB", node("a1"), node("a2"))
    assert (len(outcome.ranked), outcome.preferred, outcome.prefer) == (1, 0, "")


def group(nodes: int, value: float) -> Ranked:
    return Ranked(nodes, "n", Score(value))


def test_nodes_within_the_tolerance_are_preferred_with_the_best() -> None:
    ranked = [group(0b001, 0.90), group(0b010, 0.86), group(0b100, 0.84)]
    assert preferred(ranked, 0.05) == 0b011
    assert preferred(ranked, 0) == 0b001
    assert preferred(ranked, 1) == 0
    assert preferred([], 0.05) == 0


def test_a_feature_that_a_poorer_node_has_too_names_nothing() -> None:
    sets = [(frozenset({"both", "fast"}), 0b001), (frozenset({"both"}), 0b010)]
    assert expression_of(0b001, 0b011, sets) == "fast"
    assert expression_of(0b010, 0b011, sets) == ""


def test_features_outside_the_nodes_that_pass_do_not_matter() -> None:
    sets = [(frozenset({"fast"}), 0b101), (frozenset({"slow"}), 0b010)]
    assert expression_of(0b001, 0b011, sets) == "fast"


def test_several_features_cover_what_one_does_not() -> None:
    sets = [(frozenset({"a"}), 0b0011), (frozenset({"b"}), 0b0100), (frozenset({"c"}), 0b1000)]
    assert expression_of(0b0111, 0b1111, sets) == "a|b"


def test_two_features_name_what_no_single_one_does() -> None:
    """Fast drives are in other machines too, and so are these cards."""
    sets = [
        (frozenset({"a100", "fast"}), 0b0011),
        (frozenset({"a100"}), 0b0100),
        (frozenset({"h100", "fast"}), 0b1000),
    ]
    assert expression_of(0b0011, 0b1111, sets) == "a100&fast"
    assert expression_of(0b1011, 0b1111, sets) == "fast", "one feature says it all"
    assert expression_of(0b1100, 0b1111, sets) == "h100", "which is half of them"


def test_names_of_single_nodes_are_no_preference_for_a_thousand() -> None:
    sets = [(frozenset({f"host{i}"}), 1 << i) for i in range(32)]
    everything = (1 << 32) - 1
    assert expression_of((1 << 16) - 1, everything, sets) == "|".join(
        sorted(f"host{i}" for i in range(16))[:8]
    )
    assert expression_of((1 << 17) - 1, everything, sets) == ""


def test_the_filter_prefers_unless_the_user_named_features() -> None:
    small = node("l1", cards=gpus(0, 1, model="l4", gres_type="l4", memory_mib=24 * GIB))
    there = view(node("a1"), small, features={"l1": {"gpu_l4"}, "a1": {"gpu_a100"}})

    def asked(**fields: str) -> str | None:
        asking = message("gpus=1 gpu-memory=16GiB", **fields)
        return decider().decide(asking, there).fields.get("prefer")

    assert asked() == "gpu_l4"
    assert asked(prefer="gpu_a100") is None
    assert asked(features="gpu_a100|gpu_l4") is None


def test_weights_must_sum_to_one() -> None:
    assert Settings().score.weights.gpu_memory == 0.45
    with pytest.raises(ValidationError, match=r"sum to 0\.95, and must sum to 1"):
        Settings.model_validate({"score": {"weights": {"gpu_memory": 0.4}}})
    with pytest.raises(ValidationError):
        Settings.model_validate({"score": {"weights": {"gpu_memory": -0.1, "cpu_cores": 0.75}}})
    with pytest.raises(ValidationError):
        Settings.model_validate({"score": {"weights": {"network": 0.1}}})


@pytest.mark.parametrize(
    ("fields", "prefer"),
    [
        ({}, "gpu_l4"),
        ({"min_nodes": "2", "max_nodes": "2"}, "gpu_l4"),
        ({"min_nodes": "3", "max_nodes": "3"}, None),
        ({"exc_nodes": "l1"}, "gpu_l4"),
        ({"exc_nodes": "l1", "min_nodes": "2", "max_nodes": "2"}, None),
        ({"req_nodes": "l1"}, None),  # nothing else can run it
        ({"req_nodes": "a1,l1", "min_nodes": "2", "max_nodes": "2"}, None),
        ({"partition": "gpu,more"}, None),
        ({"tres_per_node": "gres/fpga:1"}, None),
    ],
)
def test_nothing_is_preferred_for_which_slurm_might_refuse_the_job(
    fields: dict[str, str], prefer: str | None
) -> None:
    """Seen on 22.05 to 26.05: preferred nodes that could never run it without others."""
    cards = gpus(0, 1, model="l4", gres_type="l4", memory_mib=24 * GIB)
    there = view(
        *(node("a1"), node("a2"), node("l1", cards=cards), node("l2", cards=cards)),
        node("a3"),
        features={"l1": {"gpu_l4"}, "l2": {"gpu_l4"}},
        partitions={"a3": "more"},
    )
    answer = decider().decide(message("gpus=1 gpu-memory=16GiB", **fields), there)
    assert not answer.reject
    assert answer.fields.get("prefer") == prefer


@pytest.mark.parametrize(
    ("cores", "memory_gib", "prefer"),
    [
        (14, 128, "gpu_l4"),  # 12 and an eighth, at least 2 more
        (13, 128, None),  # CoreSpecCount might keep what is over
        (16, 36, "gpu_l4"),  # 32 GiB and an eighth
        (16, 35, None),
        (None, 0, None),  # Slurm did not say
    ],
)
def test_where_cores_are_scarce_slurms_own_count_must_leave_some_over(
    cores: int | None, memory_gib: int, prefer: str | None
) -> None:
    cards = gpus(0, 1, model="l4", gres_type="l4", memory_mib=24 * GIB)
    there = view(
        *(node("a1"), node("l1", cards=cards), node("tiny", cores=2)),
        features={"l1": {"gpu_l4"}},
        sizes={} if cores is None else {"l1": (cores, memory_gib * 1024), "a1": (32, 128 * 1024)},
    )
    asking = message("gpus=1 gpu-memory=16GiB cpus=12", min_mem_per_node=f"{32 * 1024}")
    answer = decider().decide(asking, there)
    assert not answer.reject
    assert answer.fields.get("prefer") == prefer


@pytest.mark.parametrize(
    ("own", "refused"), [("small", True), ("big", False), ("big|small", False), ("[big*9]", False)]
)
def test_a_users_preference_for_nodes_that_can_t_run_it_is_told(own: str, refused: bool) -> None:
    cards = gpus(0, 1, model="l4", gres_type="l4", memory_mib=24 * GIB)
    there = view(*(node("a1"), node("l1", cards=cards)), features={"l1": {"small"}, "a1": {"big"}})
    answer = decider().decide(message("gpus=1 gpu-memory=30GiB", prefer=own), there)
    assert not answer.reject
    assert answer.fields["exc_nodes"] == "l1"
    told = "crater: Slurm refuses a job whose --prefer names too few nodes that can run it"
    assert (told in answer.messages) == refused


@pytest.mark.parametrize(
    "words", ["gpus=1 cpus=8 numa=strict gpu-memory=16GiB", "gpus=1 cpus=20 gpu-memory=16GiB"]
)
def test_nothing_is_preferred_where_slurm_may_count_a_node_tighter(words: str) -> None:
    """Kept on sockets, or with cores that some node lacks."""
    cards = gpus(0, 1, model="l4", gres_type="l4", memory_mib=24 * GIB)
    there = view(
        *(node("a1"), node("l1", cards=cards), node("c1", cores=8)), features={"l1": {"gpu_l4"}}
    )
    answer = decider().decide(message(words), there)
    assert not answer.reject
    assert "prefer" not in answer.fields
    usual = decider().decide(message("gpus=1 cpus=8 gpu-memory=16GiB"), there)
    assert usual.fields.get("prefer") == "gpu_l4"
    at_once = message("gpus=1 cpus=8 gpu-memory=16GiB", immediate="1")
    assert "prefer" not in decider().decide(at_once, there).fields
