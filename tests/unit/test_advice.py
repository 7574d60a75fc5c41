"""The way out of a refusal: the nearest node, and changes in the words in which the user asked."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_samples import AVX2, GIB, TURING, gpus, mixed, node, option, plan

from crater_slurm.model.job import GpuScope
from crater_slurm.placement import advice


def ways(words: str, *profiles: Any, **options: Any) -> tuple[str, ...]:
    outcome = plan(words, *profiles, **options)
    assert not outcome.feasible
    return outcome.smallest_change


@pytest.mark.parametrize(
    ("words", "machine", "change"),
    [
        ("gpus=8", {}, "gpus=4"),
        ("gpus=2 gpu-memory=80GiB", {}, "gpu-memory=40960MiB"),
        ("gpus=2 gpu-type=h100", {}, "gpu-type=a100"),
        ("gpus=2 precision=bf16", {"cards": gpus(0, 0, precisions=TURING)}, "precision=fp16"),
        ("cpus=40", {}, "cpus=32"),
        ("avx=avx512", {"avx": AVX2}, "avx=avx2"),
        ("memory-bandwidth=300", {}, "memory-bandwidth=280.7GB/s"),
        # Rounded so that it still fits: down for a minimum, up for a maximum.
        (
            "memory-bandwidth=300",
            {"bandwidth": (99.999, 99.999)},
            "memory-bandwidth=199.99GB/s",
        ),
        ("ssd-iops=2M", {}, "ssd-iops=900000"),
        ("ssd-latency=50us", {"latency_us": 87.23456}, "ssd-latency=87.3us"),
        ("cache=9999", {}, "cache=3000GB"),
    ],
)
def test_each_amount_is_lowered_to_what_the_machine_has(
    words: str, machine: dict[str, Any], change: str
) -> None:
    assert ways(words, node(**machine)) == (change,)


@pytest.mark.parametrize(
    ("words", "machine"),
    [
        ("gpus=2", {"cards": ()}),  # no GPU at all is no way out for a GPU job
        ("ssd-iops=1", {"iops": None}),
        ("cache=1", {"cache_gb": None}),
        ("avx=avx", {"avx": None}),
        ("memory-bandwidth=1", {"bandwidth": ()}),
        ("memory-bandwidth=2", {"bandwidth": (0.2, 0.3)}),  # below what a directive can ask
    ],
)
def test_what_is_not_there_or_not_known_has_no_smaller_amount(
    words: str, machine: dict[str, Any]
) -> None:
    assert ways(words, node(**machine)) == ()


def test_several_ways_are_told_each_on_its_own() -> None:
    assert ways("gpus=2 cpus=20 numa=strict", node()) == ("cpus=16", "numa=best_effort")


def test_strict_bandwidth_is_lowered_to_what_is_beside_the_gpus() -> None:
    found = ways("gpus=2 cpus=8 memory-bandwidth=141 numa=strict", node(cards=gpus(1, 1)))
    assert found == ("memory-bandwidth=138.7GB/s", "numa=best_effort")


def test_when_no_single_change_is_enough_the_whole_combination_is_told() -> None:
    assert ways("gpus=8 cpus=40 cache=9999", node()) == ("gpus=4 cpus=32 cache=3000GB",)


def test_a_strict_combination_stays_strict_if_it_can() -> None:
    assert ways("gpus=2 cpus=20 cache=9999 numa=strict", node()) == ("cpus=16 cache=3000GB",)


def test_a_combination_lowers_together_what_is_bound_together() -> None:
    found = ways("gpus=2 cpus=20 memory-bandwidth=200 cache=9999 numa=strict", node())
    assert found == ("cpus=16 memory-bandwidth=142GB/s cache=3000GB",)


def test_of_mixed_gpus_the_number_that_qualifies_is_told_first() -> None:
    assert ways("gpus=3 gpu-memory=20GiB", mixed()) == ("gpus=2", "gpu-memory=15360MiB")


def test_a_model_with_spaces_is_quoted_so_that_it_can_be_copied() -> None:
    cards = gpus(0, model="Radeon Pro W7900", gres_type=None)
    assert ways("gpus=1 gpu-type=a100", node(cards=cards)) == ("gpu-type='Radeon Pro W7900'",)


@pytest.mark.parametrize(
    ("words", "options", "change"),
    [
        ("", {"gpus": (option(8),)}, "--gpus-per-node=4"),
        ("gpus=2", {"gpus": (option(8),)}, "--gpus-per-node=4"),
        ("", {"gpus": (option(8, "a100"),)}, "--gpus-per-node=a100:4"),
        ("", {"gpus": (option(2, "h100"),)}, "--gpus-per-node=a100:2"),
        ("", {"gpus": (option(8, "h100"),)}, "--gpus-per-node=a100:4"),
        ("", {"gpus": (option(8, scope=GpuScope.JOB),)}, "--gpus=4"),
        ("", {"gpus": (option(3, scope=GpuScope.TASK),), "tasks": 2}, "--gpus-per-task=2"),
        (
            "",
            {"gpus": (option(3, scope=GpuScope.SOCKET),), "sockets_per_node": 2},
            "--gpus-per-socket=2",
        ),
        ("", {"cpus_per_task": 40}, "--cpus-per-task=32"),
        ("cpus=8", {"cpus_per_task": 40}, "--cpus-per-task=32"),
        ("", {"tasks_per_node": 3, "cpus_per_task": 20}, "--cpus-per-task=10"),
        ("", {"tasks_per_node": 40}, "--ntasks-per-node=32"),
        ("", {"tasks": 40, "min_nodes": 1}, "--ntasks=32"),
        ("", {"gpus": (option(2),), "cpus_per_gpu": 20}, "--cpus-per-gpu=16"),
        ("", {"memory_per_node_mib": 300 * GIB}, "--mem=262144M"),
        ("cpus=8", {"memory_per_cpu_mib": 40 * GIB}, "--mem-per-cpu=32768M"),
    ],
)
def test_an_option_that_won_is_what_must_be_changed(
    words: str, options: dict[str, Any], change: str
) -> None:
    """``cpus=16`` would be no way out for a user who wrote -c 40."""
    found = ways(words, node(), **options)
    assert found[0] == change


def test_hyper_threads_are_counted_as_the_option_counts_them() -> None:
    assert ways("", node(threads=2), cpus_per_task=80) == ("--cpus-per-task=64",)
    assert ways("cpus=80", node(threads=2)) == ("cpus=32",)


def test_cores_for_several_tasks_are_a_multiple_of_them() -> None:
    assert ways("cpus=40", node(), tasks=3, min_nodes=1) == ("cpus=30",)


def test_gpus_of_two_options_are_left_to_their_user() -> None:
    assert ways("", node(), gpus=(option(4, "a100"), option(4, "t4"))) == ()


def test_the_nearest_node_fails_the_fewest_conditions_and_then_by_the_least() -> None:
    far = node("far", cards=gpus(0), cache_gb=1)
    near = node("near", cards=gpus(0, 0, 0, 0, 0, 0))
    middle = node("middle", cards=gpus(0, 0))
    outcome = plan("gpus=8 cache=100", far, middle, near)
    assert outcome.nearest_node == "near"
    assert outcome.nearest_have == ("gpus: needs 8, has 6 GPUs",)
    assert outcome.smallest_change == ("gpus=6",)


def test_of_equally_near_nodes_the_first_by_name_is_told() -> None:
    assert plan("gpus=8", node("b"), node("a")).nearest_node == "a"


def test_nothing_is_near_where_nothing_is() -> None:
    assert advice.nearest([]) is None
