"""The decision: which nodes pass, what is asked for there, and what must hold for any cluster."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from cluster_samples import (
    AVX2,
    GIB,
    TURING,
    cluster,
    gpus,
    mixed,
    node,
    option,
    plan,
    replan,
    view,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.model.directives import parse_script
from crater_slurm.model.job import GpuScope, Job
from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement import inventory, rules
from crater_slurm.placement.need import Expected, join
from crater_slurm.placement.planner import Outcome, Planner, Scope

SMALL = gpus(0, 0, 1, 1, model="t4", gres_type="t4", memory_mib=15 * GIB, precisions=TURING)


def names(outcome: Outcome, planner: Planner) -> list[str]:
    return planner.inventory.names_of(outcome.passed)


def test_two_gpus_and_eight_cores_are_planned_on_one_of_two_sockets() -> None:
    outcome = plan("gpus=2 cpus=8 numa=strict", node())
    assert outcome.feasible
    assert outcome.plan is not None
    assert (outcome.plan.gpus, outcome.plan.cpus) == (2, 8)
    assert (outcome.plan.numa, outcome.plan.domains) == ("strict", 1)
    assert outcome.placement is not None
    assert (outcome.placement.domains, outcome.placement.domain_gpus) == (1, 2)


def test_two_gpus_and_twenty_cores_are_refused_with_the_maximum_and_both_ways_out() -> None:
    outcome = plan("gpus=2 cpus=20 numa=strict", node())
    assert not outcome.feasible
    assert outcome.plan is None
    assert outcome.nearest_node == "n1"
    assert outcome.nearest_have == (
        "numa: needs 2 GPUs, 20 cores together (strict), "
        "one NUMA node has at most 16 cores beside 2 GPUs",
    )
    assert outcome.smallest_change == ("cpus=16", "numa=best_effort")


def test_two_gpus_and_twenty_cores_pass_where_they_need_not_be_together() -> None:
    outcome = plan("gpus=2 cpus=20 numa=best_effort", node())
    assert outcome.feasible
    assert outcome.placement is not None
    assert outcome.placement.domains == 0
    assert plan("gpus=2 cpus=20", node()).feasible


def test_on_an_epyc_two_gpus_are_two_numa_nodes_and_eight_are_all() -> None:
    epyc = node(numa=8, cards=gpus(*range(8)))
    two = plan("gpus=2 cpus=32 numa=strict", epyc)
    assert two.plan is not None
    assert two.plan.domains == 2
    assert two.placement is not None
    assert (two.placement.domains, two.placement.domain_gpus) == (2, 1)
    eight = plan("gpus=8 cpus=128 numa=strict", epyc)
    assert eight.plan is not None
    assert eight.plan.domains == 8
    assert eight.placement is not None
    assert eight.placement.domains == 0, "the whole machine: nothing to keep together"
    refused = plan("gpus=2 cpus=33 numa=strict", epyc)
    assert refused.smallest_change == ("cpus=32", "numa=best_effort")


def test_140_gb_s_pass_with_a_note_that_names_numa_node_0() -> None:
    outcome = plan("gpus=2 cpus=8 memory-bandwidth=140 numa=strict", node("a1"))
    assert outcome.feasible
    assert outcome.notes == (
        "on a1 only NUMA node 0 meets the need and Slurm can't be told which one to use; "
        "crater explain shows which one the job got",
    )
    assert plan("gpus=2 cpus=8 memory-bandwidth=138.7 numa=strict", node()).notes == ()


def test_a_strict_job_without_gpus_stays_on_one_socket_while_it_fits() -> None:
    one = plan("cpus=16 numa=strict", node())
    assert one.placement is not None
    assert (one.placement.gpus, one.placement.cores, one.placement.domains) == (0, 16, 1)
    both = plan("cpus=17 numa=strict", node())
    assert both.plan is not None
    assert both.plan.domains == 2
    assert not plan("cpus=33 numa=strict", node()).feasible


def test_what_is_consumed_is_counted_up() -> None:
    outcome = plan("memory-bandwidth=138.2 ssd-iops=1000 cache=7", node())
    assert outcome.placement is not None
    assert outcome.placement.consume == {"membw": 139, "nviops": 1000, "nvme": 7}


def test_a_machine_of_two_kinds_of_gpus_is_asked_for_by_type() -> None:
    outcome = plan("gpus=2 gpu-memory=20GiB", mixed())
    assert outcome.feasible
    assert outcome.plan is not None
    assert outcome.plan.gpu_type == "a100"
    assert outcome.placement is not None
    assert outcome.placement.gpu_type == "a100"


def test_equal_gpus_are_asked_for_without_a_type() -> None:
    outcome = plan("gpus=2 gpu-memory=20GiB", node())
    assert outcome.placement is not None
    assert outcome.placement.gpu_type is None


def test_any_gpu_of_a_mixed_machine_will_do_when_all_qualify() -> None:
    outcome = plan("gpus=3 gpu-memory=8GiB", mixed())
    assert outcome.placement is not None
    assert outcome.placement.gpu_type is None


def test_a_mixed_machine_never_costs_the_nodes_that_need_no_type() -> None:
    """Two pure nodes, of which Slurm knows no type, stay two when a mixed one comes."""
    pure = [node(n, cards=gpus(0, 0, 1, 1, gres_type=None)) for n in ("n1", "n2")]
    both = plan("gpus=2 gpu-memory=20GiB", *pure, min_nodes=2)
    assert both.feasible
    assert plan("gpus=2 gpu-memory=20GiB", *pure, mixed(), min_nodes=2).feasible


def test_the_type_that_serves_the_most_nodes_is_asked_for() -> None:
    planner = view(mixed("m1"), mixed("m2"), node("n1"), node("n2", cards=SMALL)).planner
    outcome = replan(planner, "gpus=2 gpu-memory=20GiB")
    assert names(outcome, planner) == ["m1", "m2", "n1"]
    assert outcome.placement is not None
    assert outcome.placement.gpu_type == "a100"


def test_gpus_of_a_mixed_machine_without_types_can_t_be_asked_for() -> None:
    cards = gpus(0, 0, gres_type=None) + gpus(1, 1, gres_type=None, memory_mib=15 * GIB, first=2)
    outcome = plan("gpus=2 gpu-memory=20GiB", node(cards=cards))
    assert not outcome.feasible
    assert outcome.nearest_node == "n1"
    assert outcome.nearest_have == ("has no GPU type that can be asked for alone",)


def test_too_few_gpus_of_each_type_can_t_be_asked_for_though_there_are_enough_in_all() -> None:
    cards = gpus(0) + gpus(0, model="h100", gres_type="h100", memory_mib=80 * GIB, first=1)
    outcome = plan("gpus=2 gpu-memory=20GiB", node(cards=cards + SMALL[:1]))
    assert not outcome.feasible
    assert outcome.nearest_have == ("has no GPU type that can be asked for alone",)


def test_a_gpu_of_which_the_memory_is_unknown_is_none_of_those_asked_for() -> None:
    cards = gpus(0) + gpus(0, memory_mib=None, first=1)
    assert plan("gpus=1", node(cards=cards)).feasible
    assert not plan("gpus=1 gpu-memory=1GiB", node(cards=cards)).feasible


def test_gpus_of_a_type_that_are_not_known_to_be_near_are_not_asked_for_strictly() -> None:
    """NUMA node 0 has two that qualify, but of two types; of the second A100 nobody knows."""
    h100 = gpus(0, model="h100", gres_type="h100", memory_mib=80 * GIB, first=2)
    cards = gpus(0, None) + h100 + SMALL[3:]
    assert not plan("gpus=2 gpu-memory=20GiB numa=strict", node(cards=cards)).feasible
    assert plan("gpus=2 gpu-memory=20GiB", node(cards=cards)).feasible


def test_the_numa_choice_is_that_of_the_gpus_of_the_type() -> None:
    """One A100 and one H100 share NUMA node 0: two A100s need two nodes all the same."""
    cards = (
        gpus(0)
        + gpus(0, model="h100-pcie", gres_type="h100", memory_mib=80 * GIB, first=1)
        + gpus(1, first=2)
        + gpus(1, model="t4", gres_type="t4", memory_mib=15 * GIB, first=3)
    )
    outcome = plan("gpus=2 gpu-memory=20GiB cpus=4 numa=strict", node(cards=cards))
    assert outcome.plan is not None
    assert (outcome.plan.gpu_type, outcome.plan.domains) == ("a100", 2)


def test_a_user_s_option_without_a_type_avoids_mixed_machines_while_others_do() -> None:
    planner = view(mixed("m1"), node("n1")).planner
    outcome = replan(planner, "gpu-memory=20GiB", gpus=(option(2),))
    assert names(outcome, planner) == ["n1"]
    assert outcome.notes == ()


def test_a_user_s_option_without_a_type_on_mixed_machines_alone_is_warned_of() -> None:
    outcome = plan("gpu-memory=20GiB", mixed("m1"), gpus=(option(2),))
    assert outcome.feasible
    assert outcome.notes == (
        "m1 has GPUs that do not meet the need (a100, t4) and your own option names no type: "
        "Slurm may give any of them",
    )


def test_a_user_s_option_with_a_type_takes_that_type_from_mixed_machines() -> None:
    planner = view(mixed("m1"), node("n1"), node("n2", cards=SMALL)).planner
    outcome = replan(planner, "gpu-memory=20GiB", gpus=(option(2, "a100"),))
    assert names(outcome, planner) == ["m1", "n1"]
    assert outcome.notes == ()


def test_a_job_of_more_nodes_than_can_run_it_is_told_how_many_can() -> None:
    outcome = plan("gpus=2", node("n1"), node("n2"), node("c1", cards=()), min_nodes=3)
    assert not outcome.feasible
    assert outcome.passed.bit_count() == 2
    assert outcome.smallest_change == ("--nodes=2",)


def test_a_change_that_gains_too_few_nodes_is_not_proposed() -> None:
    """Four are needed, two can, and with fewer GPUs a third could: that is no way out."""
    outcome = plan("gpus=4", node("n1"), node("n2"), node("n3", cards=gpus(0)), min_nodes=4)
    assert outcome.smallest_change == ("--nodes=2",)


def test_every_node_that_the_user_names_must_pass() -> None:
    profiles = (node("n1"), node("n2", cards=gpus(0)))
    assert not plan("gpus=2", *profiles, scope=Scope(only=("n1", "n2"))).feasible
    assert plan("gpus=2", *profiles, scope=Scope(only=("n1",))).feasible
    assert plan("gpus=1", *profiles, scope=Scope(only=("n1", "n2"))).feasible


@pytest.mark.parametrize(
    ("scope", "passed"),
    [
        (Scope(), ["n1", "n2"]),
        (Scope(partitions=("gpu",)), ["n1", "n2"]),
        (Scope(partitions=("other",)), ["n3"]),
        (Scope(partitions=("gpu", "other")), ["n1", "n2", "n3"]),
        (Scope(without=("n1", "nowhere")), ["n2"]),
        (Scope(only=("n2",)), ["n2"]),
        (Scope(features=lambda f: "fast" in f), ["n2"]),
        (Scope(partitions=("gpu", "other"), features=lambda f: "fast" in f), ["n2", "n3"]),
    ],
)
def test_only_nodes_that_the_options_leave_are_looked_at(scope: Scope, passed: list[str]) -> None:
    planner = view(
        node("n1"),
        node("n2"),
        node("n3"),
        partitions={"n3": "other"},
        features={"n2": {"fast"}, "n3": {"fast"}},
    ).planner
    assert names(replan(planner, "gpus=2", scope=scope), planner) == passed


@pytest.mark.parametrize(
    "scope",
    [Scope(partitions=("none",)), Scope(only=("u1",)), Scope(features=lambda f: False)],
)
def test_where_nothing_is_known_crater_has_no_say(scope: Scope) -> None:
    planner = view(node("n1"), names=("u1",)).planner
    outcome = replan(planner, "gpus=99", scope=scope)
    assert outcome.feasible
    assert not outcome.known
    assert outcome.plan is None


def test_a_node_without_a_profile_never_passes_and_is_counted() -> None:
    planner = view(node("n1"), names=("u1", "u2")).planner
    outcome = replan(planner, "gpus=2")
    assert names(outcome, planner) == ["n1"]
    assert outcome.excluded == (("u1", 2, "has no profile in the store"),)


def test_nodes_that_are_down_are_planned_for_with_a_note() -> None:
    planner = view(node("n1"), node("n2"), states={"n1": "down", "n2": "drained"}).planner
    outcome = replan(planner, "gpus=2")
    assert outcome.feasible
    assert outcome.notes == ("all 2 nodes that can run this job are down or drained now",)


def test_every_reason_is_counted_with_an_example() -> None:
    profiles = [node("n1"), node("n2", cards=()), node("n3", cards=()), node("n4", avx=AVX2)]
    outcome = plan("gpus=2 avx=avx512", *profiles)
    assert outcome.excluded == (
        ("n2", 2, "has no GPU"),
        ("n4", 1, "its CPU's vector instructions are avx, avx2"),
    )
    gpus_line, avx_line = outcome.conditions
    assert (gpus_line.name, gpus_line.passed_nodes, gpus_line.failed_nodes) == ("gpus", 2, 2)
    assert (avx_line.name, avx_line.passed_nodes, avx_line.failed_nodes) == ("avx", 3, 1)
    assert avx_line.failed_examples == ("n4: its CPU's vector instructions are avx, avx2",)


def test_strict_jobs_go_where_they_use_the_fewest_numa_nodes() -> None:
    """Slurm can be told one number only: two GPUs are one socket here and two nodes there."""
    planner = view(node("n1"), node("n2"), node("e1", numa=8, cards=gpus(*range(8)))).planner
    outcome = replan(planner, "gpus=2 cpus=8 numa=strict")
    assert names(outcome, planner) == ["n1", "n2"]
    assert outcome.excluded == (
        ("e1", 1, "the job would use 2 NUMA nodes, unlike on the nodes chosen"),
    )


def test_nodes_that_the_user_names_are_all_kept_however_many_numa_nodes_the_job_uses() -> None:
    machines = (node("n1"), node("e1", numa=8, cards=gpus(*range(8))))
    outcome = plan("gpus=2 cpus=8 numa=strict", *machines, scope=Scope(only=("n1", "e1")))
    assert outcome.feasible
    assert outcome.passed.bit_count() == 2
    assert outcome.placement is not None
    assert outcome.placement.domain_gpus == 0, "Slurm can't be told two numbers"


def test_equal_needs_are_decided_once() -> None:
    planner = view(node()).planner
    first = replan(planner, "gpus=2 task=inference")
    second = replan(planner, "gpus=2 model=x precision=fp16")
    third = replan(planner, "gpus=2 cpus=1")
    assert first.conditions is replan(planner, "gpus=2 max-wait=30m").conditions
    assert second.conditions is not first.conditions
    assert third.conditions is not first.conditions


def test_what_is_expected_of_a_job_joins_what_its_user_asked() -> None:
    """A card below the lower bound is left out; the upper one is what a card is preferred for."""
    small = node("l1", cards=gpus(0, 1, model="l4", gres_type="l4", memory_mib=24 * GIB))
    planner = view(node("a1"), small).planner

    def planned(least_gib: int, wanted_gib: int, words: str = "gpus=1") -> Outcome:
        request = parse_script(f"#CRATER {words}").request
        expected = Expected(least_gib * GIB, wanted_gib * GIB)
        return planner.plan("p1", request, Job(user_id=1), Scope(), expected)

    assert names(planned(25, 30), planner) == ["a1"]
    may_be = planned(20, 30)
    assert names(may_be, planner) == ["a1", "l1"]
    ranked = [(group.example, group.score.value) for group in may_be.ranked]
    assert ranked == [("a1", 0.75), ("l1", 0.0)]
    refused = planned(41, 50)
    assert not refused.feasible
    assert refused.nearest_have == ("gpu-memory: needs 41 GiB, GPU memory is 40 GiB",)
    assert refused.smallest_change == (), "to ask for less changes nothing about the work"
    assert names(planned(99, 99, "cpus=2"), planner) == ["a1", "l1"], "it asks for no GPU"


# --- What must hold for any cluster and any request -------------------------------------------

CARDS = st.sampled_from(
    [
        (),
        gpus(0, 0, 1, 1),
        gpus(0, 1),
        gpus(0, 0, 0, 1, 1, 1),
        gpus(0, None),
        gpus(0, 1, gres_type=None),
        SMALL,
        mixed().gpus,
        gpus(0, 0, model="h100", gres_type="h100", memory_mib=80 * GIB),
    ]
)
MACHINES = st.builds(
    lambda cards, cores, threads, bandwidth, avx, iops, cache: node(
        cards=cards,
        cores=cores,
        threads=threads,
        bandwidth=bandwidth,
        avx=avx,
        iops=iops,
        cache_gb=cache,
    ),
    CARDS,
    st.sampled_from([4, 16]),
    st.sampled_from([1, 2]),
    st.sampled_from([(142, 138.7), (142.123456, 99.999), (), (50, None)]),
    st.sampled_from([None, AVX2, frozenset({"avx", "avx2", "avx512f"})]),
    st.sampled_from([None, 500_000, 900_000]),
    st.sampled_from([None, 100, 3000]),
)
CLUSTERS = st.lists(MACHINES, min_size=1, max_size=5).map(
    lambda ms: [dataclasses.replace(m, name=f"n{i}") for i, m in enumerate(ms)]
)
WORDS = st.lists(
    st.sampled_from(
        [
            *("gpus=1", "gpus=2", "gpus=3", "gpus=4", "gpus=8", "gpu-memory=20GiB"),
            *("gpu-memory=60GiB", "gpu-type=a100", "gpu-type=t4", "precision=bf16"),
            *("cpus=4", "cpus=8", "cpus=20", "cpus=40", "avx=avx512", "memory-bandwidth=100"),
            *("memory-bandwidth=140", "memory-bandwidth=250", "memory-bandwidth=300"),
            *("ssd-iops=800k", "ssd-iops=2M", "ssd-latency=50us", "ssd-latency=100us"),
            *("cache=200", "cache=9999", "numa=strict", "numa=best_effort"),
        ]
    ),
    max_size=6,
    unique_by=lambda w: w.partition("=")[0],
).map(" ".join)
OPTIONS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        *({}, {}, {"min_nodes": 2}, {"min_nodes": 3}, {"tasks": 3, "min_nodes": 1}),
        *({"cpus_per_task": 6}, {"cpus_per_task": 40}, {"tasks_per_node": 4}),
        *({"gpus": (option(2),)}, {"gpus": (option(3, "a100"),)}, {"gpus": (option(8),)}),
        {"gpus": (option(16, scope=GpuScope.JOB),), "min_nodes": 2},
        {"gpus": (option(6, scope=GpuScope.TASK),), "tasks": 1},
        {"gpus": (option(2),), "cpus_per_gpu": 12},
        *({"memory_per_node_mib": 200 * GIB}, {"memory_per_node_mib": 999 * GIB}),
        {"memory_per_cpu_mib": 64 * GIB},
        {"exclusive": True},
    ]
)
some = settings(max_examples=120)


@some
@given(CLUSTERS, WORDS, OPTIONS)
def test_a_plan_never_breaks_a_stated_need_on_any_node_that_passed(
    machines: list[NodeProfile], words: str, options: dict[str, Any]
) -> None:
    planner = view(*machines).planner
    outcome = replan(planner, words, **options)
    need = outcome.need
    by_name = {m.name: m for m in machines}
    for name in names(outcome, planner) if outcome.feasible else ():
        machine = by_name[name]
        assert rules.evaluate(machine, need).ok
        granted = [g for g in machine.gpus if outcome.placement is None or _asked(g, outcome)]
        assert len(granted) >= need.gpus
        if need.gpus and not need.untyped:
            assert all((g.memory_mib or 0) >= (need.gpu_memory_mib or 0) for g in granted)
            assert all(need.precision is None or need.precision in g.precisions for g in granted)  # type: ignore[operator]


def _asked(gpu: Any, outcome: Outcome) -> bool:
    """Whether Slurm could give this GPU for what is asked."""
    assert outcome.placement is not None
    asked = outcome.placement.gpu_type or outcome.need.gres_type
    return asked is None or gpu.gres_type in (asked, None)


@some
@given(CLUSTERS, MACHINES, WORDS, OPTIONS)
def test_another_node_never_makes_a_feasible_job_infeasible(
    machines: list[NodeProfile], more: NodeProfile, words: str, options: dict[str, Any]
) -> None:
    before = plan(words, *machines, **options)
    after = plan(words, *machines, dataclasses.replace(more, name="n9"), **options)
    assert after.feasible or not before.feasible


@some
@given(CLUSTERS, WORDS, OPTIONS, st.integers(0, 10**6))
def test_the_order_of_nodes_and_profiles_never_changes_the_answer(
    machines: list[NodeProfile], words: str, options: dict[str, Any], seed: int
) -> None:
    shuffled = list(machines)
    random.Random(seed).shuffle(shuffled)
    there = cluster(shuffled)
    random.Random(seed + 1).shuffle(shuffled)
    other = Planner(inventory.build(there, shuffled))
    assert plan(words, *machines, **options) == replan(other, words, **options)


@some
@given(CLUSTERS, WORDS, OPTIONS)
def test_the_same_input_gives_the_same_plan_on_a_planner_old_or_new(
    machines: list[NodeProfile], words: str, options: dict[str, Any]
) -> None:
    planner = view(*machines).planner
    replan(planner, "gpus=1")
    first = replan(planner, words, **options)
    assert replan(planner, words, **options) == first
    assert plan(words, *machines, **options) == first


@some
@given(CLUSTERS, WORDS, OPTIONS)
def test_a_refusal_says_what_failed_and_a_condition_line_has_all_nodes(
    machines: list[NodeProfile], words: str, options: dict[str, Any]
) -> None:
    outcome = plan(words, *machines, **options)
    for condition in outcome.conditions:
        assert condition.passed_nodes + condition.failed_nodes == len(machines)
    if not outcome.feasible:
        assert outcome.plan is None
        assert outcome.smallest_change or outcome.nearest_node
        if not outcome.passed:
            assert outcome.nearest_have
            assert sum(count for _, count, _ in outcome.excluded) == len(machines)


#: Options as they come back from the words of a way out.
READERS = {
    "--nodes": lambda job, text: {"min_nodes": int(text)},
    "--cpus-per-task": lambda job, text: {"cpus_per_task": int(text)},
    "--cpus-per-gpu": lambda job, text: {"cpus_per_gpu": int(text)},
    "--ntasks-per-node": lambda job, text: {"tasks_per_node": int(text)},
    "--ntasks": lambda job, text: {"tasks": int(text)},
    "--mem": lambda job, text: {"memory_per_node_mib": int(text.removesuffix("M"))},
    "--mem-per-cpu": lambda job, text: {"memory_per_cpu_mib": int(text.removesuffix("M"))},
    "--gpus-per-node": lambda job, text: {"gpus": (gpu_option(text, GpuScope.NODE),)},
    "--gpus": lambda job, text: {"gpus": (gpu_option(text, GpuScope.JOB),)},
    "--gpus-per-task": lambda job, text: {"gpus": (gpu_option(text, GpuScope.TASK),)},
}


def gpu_option(text: str, scope: GpuScope) -> Any:
    kind, _, count = text.rpartition(":")
    return option(int(count), kind or None, scope)


@settings(max_examples=300)
@given(CLUSTERS, WORDS, OPTIONS)
def test_whatever_is_proposed_really_fits_on_the_nearest_node(
    machines: list[NodeProfile], words: str, options: dict[str, Any]
) -> None:
    """Each way out, put into the script and the command line as it was told."""
    planner = view(*machines).planner
    outcome = replan(planner, words, **options)
    for way in outcome.smallest_change:
        keys = {w.partition("=")[0] for w in way.split()}
        script = " ".join(w for w in words.split() if w.partition("=")[0] not in keys)
        job = Job(user_id=1000, **options)
        for word in way.split():
            key, _, value = word.partition("=")
            if key.startswith("--"):
                job = dataclasses.replace(job, **READERS[key](job, value))
            else:
                script += f" {word}"
        request = parse_script(f"#CRATER {script}").request
        changed = planner.plan("p2", request, job, Scope())
        assert changed.feasible, (way, changed.conditions)
        if way != f"--nodes={outcome.passed.bit_count()}":
            assert outcome.nearest_node in names(changed, planner) or _set_apart(
                changed, outcome.nearest_node
            )
            assert rules.evaluate(
                next(m for m in machines if m.name == outcome.nearest_node),
                join(request, job).need,
            ).ok


def _set_apart(outcome: Outcome, name: str) -> bool:
    """A node that could, left out because elsewhere the job uses fewer NUMA nodes."""
    return any(name == who and "NUMA nodes, unlike" in why for who, _, why in outcome.excluded)


def test_physical_cores_say_how_many_cpus_a_machine_has_for_the_job() -> None:
    smt = node(threads=2)  # 32 cores, 64 threads
    for words, options, feasible in (
        ("cpus=32", {}, True),
        ("cpus=33", {}, False),
        ("cpus=64 physical-cores=no", {}, True),
        ("cpus=65 physical-cores=no", {}, False),
        ("gpus=1", {"cpus_per_task": 64}, True),
        ("gpus=1 physical-cores=yes", {"cpus_per_task": 64}, False),
        ("gpus=1 physical-cores=yes", {"cpus_per_task": 32}, True),
    ):
        assert plan(words, smt, **options).feasible is feasible, (words, options)
    threads = plan("cpus=20 physical-cores=no numa=strict", smt)
    assert threads.placement is not None
    assert (threads.placement.cores, threads.placement.cores_are_threads) == (20, True)
    assert threads.placement.domains == 1, "20 threads are 10 cores of 16"
    refused = plan("cpus=65 physical-cores=no", smt)
    assert refused.smallest_change == ("cpus=64",)
    options = plan("physical-cores=yes", smt, cpus_per_task=40)
    assert options.smallest_change == ("--cpus-per-task=32",)


def test_machines_of_one_numa_node_are_asked_for_apart_from_others() -> None:
    """Slurm takes GPUs per socket with enforce-binding for impossible on a single socket."""
    single = node("s1", numa=1, sockets=1, cores=32, cards=gpus(0, 0, 0, 0), bandwidth=(280,))
    planner = view(node("a1"), node("a2"), single).planner
    outcome = replan(planner, "gpus=2 cpus=8 numa=strict")
    assert names(outcome, planner) == ["a1", "a2"]
    assert outcome.excluded == (
        ("s1", 1, "the machine is one NUMA node, and Slurm can't be asked for both kinds at once"),
    )
    alone = replan(planner, "gpus=2 cpus=8 numa=strict", scope=Scope(only=("s1",)))
    assert names(alone, planner) == ["s1"]
    assert alone.placement is not None
    assert alone.placement.domains == 0, "together anyway: no lever is needed"
    without = replan(planner, "cpus=8 numa=strict")
    assert names(without, planner) == ["a1", "a2", "s1"], "cores alone Slurm keeps on any socket"
    more = view(node("a1"), single, dataclasses.replace(single, name="s2")).planner
    assert names(replan(more, "gpus=2 cpus=8 numa=strict"), more) == ["s1", "s2"]
