"""Parts of a GPU: the number of slices, the nodes on which it is right, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from cluster_samples import (
    KEY,
    TURING,
    decide,
    decider,
    gpus,
    message,
    node,
    option,
    replan,
    view,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.model import token
from crater_slurm.model.job import GpuOption, GpuScope
from crater_slurm.model.plan import Mode, Verdict
from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement.outcome import Outcome, Scope
from crater_slurm.placement.sharing import Card, Policy, cards
from crater_slurm.scheduler.decide import Answer
from crater_slurm.scheduler.state import View

L4, H100, A100, A100_80, T4 = 23034, 81559, 40960, 81920, 15360
POLICY = Policy()
SMALL = "gpus=1 gpu-memory=2GiB gpu-sharing=yes"


def machine(name: str, *models: tuple[str, int], **options: Any) -> NodeProfile:
    """A node with one card of each of these models, the first half beside NUMA node 0."""
    found = []
    for i, (model, memory) in enumerate(models):
        (card,) = gpus(2 * i // len(models), model=model, gres_type=model, memory_mib=memory)
        found.append(dataclasses.replace(card, index=i))
    return node(name, cards=tuple(found), **options)


def l4(name: str = "l1") -> NodeProfile:
    return machine(name, *[("l4", L4)] * 4)


def h100(name: str = "h1") -> NodeProfile:
    return machine(name, *[("h100", H100)] * 4)


def shared(
    words: str, *machines: NodeProfile, shards: dict[str, int], scope: Scope | None = None,
    policy: Policy | None = POLICY, **job: Any,
) -> tuple[Outcome, list[str]]:  # fmt: skip
    """Outcome on machines with so many shards, and the names of the nodes that are left."""
    planner = view(*machines, shards=shards, policy=policy).planner
    outcome = replan(planner, words, scope=scope, **job)
    return outcome, planner.inventory.names_of(outcome.passed)


def own(count: int, scope: GpuScope = GpuScope.NODE) -> tuple[GpuOption, ...]:
    return (GpuOption(scope, count, None, shards=True),)


# --- the number of slices


@pytest.mark.parametrize(
    ("memory", "shards"),
    [("1MiB", 1), ("720MiB", 1), ("721MiB", 2), ("2GiB", 3), ("21600MiB", 30)],
)
def test_the_number_of_slices_is_the_memory_rounded_up(memory: str, shards: int) -> None:
    words = f"gpus=1 gpu-memory={memory} gpu-sharing=yes"
    outcome, names = shared(words, l4(), shards={"l1": 120})
    assert outcome.placement is not None
    assert (outcome.placement.shards, names) == (shards, ["l1"])
    assert outcome.plan is not None
    assert (outcome.plan.shards, outcome.plan.slices, outcome.plan.card) == (shards, 31, "l4")
    assert outcome.plan.gpu_memory_mib == 720 * shards


def test_16384_mb_of_an_a100_are_13_slices() -> None:
    words = "gpus=1 gpu-memory=16384MiB gpu-sharing=yes"
    outcome, _ = shared(words, machine("a1", *[("a100", A100)] * 8), shards={"a1": 248})
    assert outcome.share is not None
    assert (outcome.share.shards, outcome.share.memory_mib) == (13, 16640)


@pytest.mark.parametrize(
    ("policy", "count", "shards"),
    [
        (Policy(rounding="floor"), 124, 3),
        (Policy(rounding="nominal"), 124, 3),
        (Policy(reserve=3), 112, 3),
        (POLICY, 4 * 8, 1),  # the site's own eight a card, of 2,879 MiB
    ],
)
def test_cards_are_known_as_they_are_cut(policy: Policy, count: int, shards: int) -> None:
    outcome, _ = shared(SMALL, l4(), shards={"l1": count}, policy=policy)
    assert outcome.share is not None
    assert outcome.share.shards == shards
    assert outcome.share.memory_mib >= 2048


def test_a_site_s_own_even_cut_is_a_part_of_the_whole_card() -> None:
    assert cards(l4(), 32, POLICY)[0] == Card(0, "l4", 2879, 8, 8)
    assert cards(l4(), 120, POLICY)[3] == Card(3, "l4", 720, 30, 31)


def test_a_cut_that_can_not_be_told_card_by_card_is_none() -> None:
    mixed = machine("m1", ("l4", L4), ("a100", A100))
    assert [card.shards for card in cards(mixed, 61, POLICY)] == [30, 31]
    assert cards(mixed, 60, POLICY) == ()
    assert cards(l4(), 33, POLICY) == ()  # Slurm gives one card more, nobody knows which
    assert cards(l4(), 0, POLICY) == ()
    unknown = machine("u1", ("l4", L4), ("l4", L4))
    (first, second) = unknown.gpus
    for other in (
        dataclasses.replace(second, memory_mib=None),
        dataclasses.replace(second, mig_instances=("1g.5gb",)),
    ):
        assert cards(dataclasses.replace(unknown, gpus=(first, other)), 60, POLICY) == ()


# --- which nodes


def test_small_and_big_slices_are_not_mixed_where_big_ones_would_be_wasted() -> None:
    """2 GiB are 3 slices of an L4, and would be 7,647 MiB of an H100."""
    shards = {"l1": 120, "h1": 120}
    outcome, names = shared(SMALL, l4(), h100(), shards=shards)
    assert outcome.placement is not None
    assert (outcome.placement.shards, names) == (3, ["l1"])
    assert ("h1", 1, "with slices of 2,549 MiB it is kept for jobs that need more") in (
        outcome.excluded
    )


def test_big_slices_serve_where_only_they_can() -> None:
    shards = {"l1": 120, "h1": 120}
    outcome, names = shared("gpus=1 gpu-memory=30GiB gpu-sharing=yes", l4(), h100(), shards=shards)
    assert (outcome.share and outcome.share.shards, names) == (13, ["h1"])
    outcome, names = shared(SMALL, l4(), h100(), shards=shards, scope=Scope(only=("h1",)))
    assert (outcome.share and outcome.share.shards, names) == (1, ["h1"])


def test_what_serves_most_nodes_is_asked_for() -> None:
    shards = {"l1": 120, "h1": 120, "h2": 120}
    outcome, names = shared(SMALL, l4(), h100(), h100("h2"), shards=shards)
    assert (outcome.share and outcome.share.shards, names) == (1, ["h1", "h2"])


def test_nodes_that_are_down_do_not_count_for_it() -> None:
    shards = {"l1": 120, "h1": 120, "h2": 120}
    planner = view(
        l4(), h100(), h100("h2"), shards=shards, policy=POLICY,
        states={"h1": "down", "h2": "drain"},
    ).planner  # fmt: skip
    outcome = replan(planner, SMALL)
    assert planner.inventory.names_of(outcome.passed) == ["l1"]


def test_two_named_nodes_of_different_cards_take_the_number_that_is_right_on_both() -> None:
    """Of a big card that is more than needed, but the user wants it so."""
    shards = {"l1": 120, "h1": 120}
    outcome, names = shared(
        SMALL, l4(), h100(), shards=shards, scope=Scope(only=("h1", "l1")), min_nodes=2
    )
    assert outcome.share is not None
    assert (outcome.share.shards, names) == (3, ["h1", "l1"])
    assert (outcome.share.memory_mib, outcome.share.card) == (2160, None)


def test_cards_of_nearly_the_same_slices_serve_together() -> None:
    l40s = machine("s1", *[("l40s", 46068)] * 4)
    a100 = machine("a1", *[("a100", A100)] * 4)
    outcome, names = shared(
        "gpus=1 gpu-memory=8GiB gpu-sharing=yes", l40s, a100, shards={"s1": 120, "a1": 124}
    )
    assert outcome.share is not None
    # 7 slices of 1,280 MiB; of 1,440 MiB 6 would do.
    assert (outcome.share.shards, names) == (7, ["a1", "s1"])
    assert (outcome.share.memory_mib, outcome.share.card) == (8960, None)


def test_a_node_where_slurm_could_choose_the_wrong_card_is_left_out() -> None:
    """3 slices fit both cards of m1, and only one of them computes in bf16."""
    t4 = dataclasses.replace(
        gpus(1, model="t4", gres_type="t4", memory_mib=T4, precisions=TURING)[0], index=1
    )
    mixed = node("m1", cards=(*gpus(0, memory_mib=A100), t4))
    shards = {"m1": 60}
    plain, names = shared(SMALL, mixed, shards=shards)
    # 4 slices of 512 MiB; 2 of the A100's would do, and are too few on the T4.
    assert (plain.share and plain.share.shards, names) == (4, ["m1"])
    outcome, names = shared(f"{SMALL} precision=bf16", mixed, shards=shards)
    assert outcome.share is None
    assert outcome.placement is not None
    assert (outcome.placement.gpus, outcome.placement.gpu_type) == (1, "a100")


def test_more_slices_than_the_wrong_card_has_make_the_choice_safe() -> None:
    """31 slices are more than a T4 has, so Slurm can only take the A100."""
    t4 = dataclasses.replace(
        gpus(1, model="t4", gres_type="t4", memory_mib=T4, precisions=TURING)[0], index=1
    )
    mixed = node("m1", cards=(*gpus(0, memory_mib=A100), t4))
    outcome, _ = shared(
        "gpus=1 gpu-memory=39000MiB precision=bf16 gpu-sharing=yes", mixed, shards={"m1": 60}
    )
    assert outcome.share is not None
    assert (outcome.share.shards, outcome.share.card) == (31, "a100-pcie-40gb")


def test_strict_jobs_share_too_and_stay_beside_their_gpu() -> None:
    outcome, _ = shared(f"{SMALL} cpus=4 numa=strict", l4(), shards={"l1": 120})
    assert outcome.placement is not None
    assert (outcome.placement.shards, outcome.placement.domains) == (3, 1)


AMOUNTS = st.integers(1, 90_000)
MACHINES = st.lists(
    st.lists(st.sampled_from([L4, H100, A100, A100_80, T4]), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150)
@given(MACHINES, AMOUNTS, st.sampled_from(["ceil", "floor", "nominal"]), st.integers(1, 3))
def test_on_every_node_chosen_whatever_card_slurm_takes_is_enough(
    machines: list[list[int]], memory: int, rounding: Any, nodes: int
) -> None:
    policy = Policy(rounding=rounding)
    profiles = [
        machine(f"n{i}", *[(f"m{size}", size) for size in sizes])
        for i, sizes in enumerate(machines)
    ]
    from crater_slurm.model.slices import slicing

    counts = {
        p.name: sum(slicing(g.memory_mib or 0, 1, rounding).usable for g in p.gpus)
        for p in profiles
    }
    words = f"gpus=1 gpu-memory={memory}MiB gpu-sharing=yes"
    outcome, names = shared(words, *profiles, shards=counts, policy=policy, min_nodes=nodes)
    if outcome.share is None:
        return
    shards = outcome.share.shards
    assert len(names) >= nodes
    for profile in profiles:
        if profile.name in names:
            fitting = [
                c for c in cards(profile, counts[profile.name], policy) if c.shards >= shards
            ]
            assert fitting
            assert all(card.slice_mib * shards >= memory for card in fitting)
            assert all(card.slice_mib * shards >= outcome.share.memory_mib for card in fitting)


# --- whole GPUs, and why


@pytest.mark.parametrize(
    ("words", "job", "why"),
    [
        ("gpus=2 gpu-memory=2GiB", {}, "it is for jobs of one GPU, and this one has 2"),
        ("gpus=1", {}, "without gpu-memory nobody knows how much of a GPU to give"),
        ("gpus=1 gpu-memory=2GiB", {"gpus": (option(1),)}, "wins over it"),
        ("gpus=1 gpu-memory=2GiB", {"exclusive": True}, "--exclusive wins over it"),
        ("gpus=1 gpu-memory=2GiB", {"per_gpu": ("--mem-per-gpu",)}, "Slurm takes --mem-per-gpu"),
    ],
)
def test_a_whole_gpu_where_a_part_will_not_do_and_why(
    words: str, job: dict[str, Any], why: str
) -> None:
    outcome, _ = shared(f"{words} gpu-sharing=yes", l4(), shards={"l1": 120}, **job)
    assert outcome.placement is not None
    assert outcome.placement.shards == 0
    assert outcome.placement.gpus >= 1
    assert any(why in note for note in outcome.notes), outcome.notes


def test_whole_gpus_unless_site_and_job_say_otherwise() -> None:
    for words, policy in (("gpus=1 gpu-memory=2GiB", POLICY), (SMALL, None)):
        outcome, _ = shared(words, l4(), shards={"l1": 120}, policy=policy)
        assert outcome.placement is not None
        assert (outcome.placement.gpus, outcome.placement.shards) == (1, 0)
    assert outcome.notes[0] == "gpu-sharing=yes shares nothing: this cluster gives whole GPUs"


@pytest.mark.parametrize(
    ("memory", "shards"), [("2GiB", {}), ("22GiB", {"l1": 120}), ("2GiB", {"l1": 0})]
)
def test_a_whole_gpu_where_no_card_has_slices_for_it(memory: str, shards: dict[str, int]) -> None:
    words = f"gpus=1 gpu-memory={memory} gpu-sharing=yes"
    outcome, names = shared(words, l4(), shards=shards)
    assert outcome.placement is not None
    assert (outcome.placement.gpus, outcome.placement.shards, names) == (1, 0, ["l1"])
    assert "so the GPU is a whole one" in outcome.notes[0]


def test_more_than_any_card_has_is_refused_with_what_there_is() -> None:
    outcome, _ = shared("gpus=1 gpu-memory=30GiB gpu-sharing=yes", l4(), shards={"l1": 120})
    assert not outcome.feasible
    assert outcome.nearest_have == ("gpu-memory: needs 30 GiB, GPU memory is 22.5 GiB",)
    assert outcome.smallest_change == ("gpu-memory=23034MiB",)


# --- the user's own shards


def test_own_shards_that_fit_one_card_are_planned_and_nothing_is_added() -> None:
    outcome, names = shared("cpus=2", l4(), shards={"l1": 120}, gpus=own(30))
    assert outcome.placement is not None
    assert (outcome.placement.shards, outcome.placement.gpus, names) == (0, 0, ["l1"])
    assert outcome.plan is not None
    assert (outcome.plan.shards, outcome.plan.gpu_memory_mib) == (30, 21600)


@pytest.mark.parametrize("kind", ["own", "planned"])
def test_of_the_cores_a_part_of_a_card_has_its_part(kind: str) -> None:
    """15 of the 31 slices of one of four cards."""
    words = "cpus=2" if kind == "own" else "gpus=1 cpus=2 gpu-memory=10800MiB gpu-sharing=yes"
    asked = {"gpus": own(15)} if kind == "own" else {}
    outcome, _ = shared(words, l4(), shards={"l1": 120}, **asked)
    (term,) = [t for t in outcome.ranked[0].score.terms if t.name == "cpu-cores"]
    assert term.value == pytest.approx(2 / (32 / 4 * 15 / 31))
    assert term.why == "asks 2 of the 3.87 cores that are its share"


def test_own_shards_are_kept_off_nodes_whose_cards_have_fewer() -> None:
    shards = {"l1": 120, "a1": 248}
    a100 = machine("a1", *[("a100", A100)] * 8)
    _, names = shared("cpus=2", l4(), a100, shards=shards, gpus=own(31))
    assert names == ["a1"]


def test_own_shards_over_the_largest_card_are_refused_with_the_way_out() -> None:
    for scope in (GpuScope.NODE, GpuScope.TASK):
        outcome, _ = shared("cpus=2", l4(), shards={"l1": 120}, gpus=own(31, scope))
        assert not outcome.feasible
        assert outcome.nearest_have == (
            "gpu-slices: needs 31 slices of one GPU, one GPU has 30 slices of 720 MiB for jobs",
        )
        assert outcome.smallest_change == ("--gres=shard:30",)


def test_own_shards_are_nobodys_business_where_the_site_does_not_share() -> None:
    outcome, _ = shared("cpus=2", l4(), shards={"l1": 120}, policy=None, gpus=own(31))
    assert outcome.feasible
    assert outcome.notes == ()


def test_own_shards_that_hold_less_than_the_directive_says_are_told() -> None:
    outcome, _ = shared("gpu-memory=4GiB", l4(), shards={"l1": 120}, gpus=own(3))
    assert outcome.feasible
    assert "3 slices are 2,160 MiB of a GPU's memory, less than gpu-memory says" in outcome.notes


# --- the answer


def answer(words: str | None, mode: Mode = Mode.ENFORCE, **fields: str) -> Answer:
    return decider(mode).decide(message(words, **fields), site())


def site(policy: Policy | None = POLICY, names: tuple[str, ...] = (), **shards: int) -> View:
    """One node with four L4, and ``names`` of which nobody knows the hardware."""
    return view(l4(), names=names, shards={"l1": 120} | shards, policy=policy)


def test_the_job_asks_slurm_for_shards_and_its_user_is_told_what_that_is() -> None:
    found = answer(SMALL)
    assert found.fields["gres"] == "shard:3"
    assert found.messages[:2] == [
        "crater: planned 3 of 31 slices of an L4 (2,160 MiB), shared, not isolated; "
        "1 of 1 nodes can run it (crater explain p1)",
        "crater: the job shares its GPU with others; nothing on the GPU keeps its memory for it: "
        "a neighbour can take it, and only MPS or MIG would limit that",
    ]
    signed = token.verify(found.fields["comment"], [KEY], 1000, "test")
    assert signed is not None
    assert (signed.plan.gpus, signed.plan.shards, signed.plan.gpu_memory_mib) == (1, 3, 2160)


def test_strict_is_told_to_slurm_as_cores_beside_the_gpu() -> None:
    found = answer(f"{SMALL} cpus=4 numa=strict")
    assert found.fields["gres"] == "shard:3"
    assert found.flags == ["GRES_ENFORCE_BIND"]
    assert (found.fields["num_tasks"], found.fields["cpus_per_task"]) == ("1", "4")
    assert "tres_per_socket" not in found.fields
    assert "on one NUMA node" in found.messages[0]


def test_other_gres_of_the_user_stay_beside_the_shards() -> None:
    assert answer(SMALL, tres_per_node="gres/membw:20").fields["gres"] == "membw:20,shard:3"


def test_what_slurm_refuses_beside_shards_makes_the_gpu_a_whole_one() -> None:
    for field, value, name in (
        ("mem_per_tres", "gres/gpu:1024", "--mem-per-gpu"),
        ("cpus_per_tres", "gres/gpu:2", "--cpus-per-gpu"),
        ("ntasks_per_gpu", "2", "--ntasks-per-gpu"),
        ("tres_bind", "gres/gpu:closest", "--gpu-bind"),
    ):
        found = answer(SMALL, **{field: value})
        assert found.fields["gres"] == "gpu:1"
        assert any(f"Slurm takes {name} for whole GPUs only" in text for text in found.messages)


def test_with_mps_the_user_is_told_who_limits_the_memory() -> None:
    found = decider().decide(message(SMALL), site(policy=Policy(mps=True)))
    assert "its memory is limited by CUDA MPS" in found.messages[1]


@pytest.mark.parametrize("words", [None, "mode=off cpus=1", "mode=advise cpus=1", "cpus=1"])
def test_shards_that_no_card_has_are_refused_whatever_the_job_says_of_crater(
    words: str | None,
) -> None:
    found = answer(words, tres_per_node="gres/shard:31")
    assert found.reject
    assert found.messages[:3] == [
        "crater: refused: none of the 1 nodes that its options allow can run this job",
        "crater:   nearest is l1: gpu-slices: needs 31 slices of one GPU, "
        "one GPU has 30 slices of 720 MiB for jobs",
        "crater:   it would fit with --gres=shard:30",
    ]
    assert found.decision is not None
    assert found.decision.verdict is Verdict.REFUSED


def test_without_directives_a_job_is_refused_for_its_shards_only() -> None:
    """Its 9,999 CPUs are Slurm's to judge, and shards that fit are none of ours."""
    for fields in (
        {"tres_per_node": "gres/shard:30", "cpus_per_task": "9999"},
        {"tres_per_node": "gres/shard:30", "partition": "nowhere"},
        {"tres_per_node": "gres/gpu:99"},
        {"tres_per_node": "gres/shard:x"},
        {"tres_per_node": "gres/shard:99", "req_nodes": "["},
    ):
        found = answer(None, **fields)
        assert not found.reject
        assert found.pairs() == [("verdict", "accept")]


def test_shards_are_only_refused_where_crater_may_and_where_it_knows_all_nodes() -> None:
    for mode in (Mode.OFF, Mode.OBSERVE, Mode.ADVISE):
        assert not answer(None, mode, tres_per_node="gres/shard:31").reject
    asked = message(None, tres_per_node="gres/shard:31")
    assert not decider().decide(asked, site(policy=None)).reject
    # A node without a profile matters if Slurm counts shards there.
    assert not decider().decide(asked, site(names=("x1",), x1=124)).reject
    assert decider().decide(asked, site(names=("x1",))).reject
    assert decider().decide(asked, site()).reject


def test_a_cluster_without_shards_is_as_before() -> None:
    assert decide(SMALL, l4()).fields["gres"] == "gpu:1"
