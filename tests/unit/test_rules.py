"""Stage 1: each condition at its limit, all together, and nothing unknown."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from cluster_samples import AMPERE, AVX2, AVX512, GIB, TURING, gpus, mixed, node

from crater_slurm.model.profile import Method, NodeProfile
from crater_slurm.placement import inventory, rules
from crater_slurm.placement.need import Need


def check(profile: NodeProfile, name: str, **need: Any) -> rules.Check:
    found = [c for c in rules.evaluate(profile, Need(**need)).checks if c.name == name]
    assert len(found) == 1
    return found[0]


def passes(profile: NodeProfile, **need: Any) -> bool:
    return rules.evaluate(profile, Need(**need)).ok


#: Condition: a need, and what to change so that the machine just lacks it.
MAIN = {
    "gpus": ({"gpus": 4}, {"cards": gpus(0, 0, 1)}),
    "cpus": ({"cpus": 32, "avx": "avx512"}, {"avx": AVX2}),
    "memory-bandwidth": ({"memory_bandwidth_gb_s": 280.7}, {"bandwidth": (142, 138.6)}),
    "ssd": ({"ssd_iops": 900_000}, {"iops": 899_999}),
}


@pytest.mark.parametrize(
    "lacking",
    list(itertools.product([False, True], repeat=4)),
    ids=lambda t: "".join("01"[b] for b in t),
)
def test_all_four_main_conditions_hold_together_or_the_node_fails(lacking: tuple[bool]) -> None:
    need: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    for (asked, change), lacks in zip(MAIN.values(), lacking, strict=True):
        need |= asked
        machine |= change if lacks else {}
    result = rules.evaluate(node(**machine), Need(**need))
    assert result.ok is not any(lacking)
    failed = {c.name for c in result.checks if not c.ok}
    names = ("gpus", "avx", "memory-bandwidth", "ssd-iops")
    assert failed == {name for name, lacks in zip(names, lacking, strict=True) if lacks}


@pytest.mark.parametrize(
    ("machine", "need", "value", "step"),
    [
        ({}, "gpus", 4, 1),
        ({}, "cpus", 32, 1),
        ({}, "memory_mib", 256 * GIB, 1),
        ({}, "memory_bandwidth_gb_s", 280.7, 0.001),
        ({}, "ssd_iops", 900_000, 1),
        ({}, "cache_gb", 3000, 1),
    ],
)
def test_a_minimum_is_met_below_and_at_what_is_there_and_not_above(
    machine: dict[str, Any], need: str, value: float, step: float
) -> None:
    profile = node(**machine)
    assert passes(profile, **{need: value - step})
    assert passes(profile, **{need: value})
    assert not passes(profile, **{need: value + step})


def test_gpu_memory_is_met_below_and_at_what_is_there_and_not_above() -> None:
    for memory, ok in ((40 * GIB - 1, True), (40 * GIB, True), (40 * GIB + 1, False)):
        assert passes(node(), gpus=1, gpu_memory_mib=memory) is ok


def test_a_latency_is_a_maximum() -> None:
    for latency, ok in ((79.9, False), (80.0, True), (80.1, True)):
        assert passes(node(), ssd_latency_us=latency) is ok


@pytest.mark.parametrize(
    ("has", "wanted"),
    [
        (set(), set()),
        ({"avx"}, {"avx"}),
        ({"avx", "avx2"}, {"avx", "avx2"}),
        ({"avx", "avx2", "avx512f"}, {"avx", "avx2", "avx512"}),
        ({"avx", "avx2", "avx512"}, {"avx", "avx2"}),  # no such flag; the kernel writes avx512f
    ],
)
def test_avx_is_read_from_the_processor_s_flags(has: set[str], wanted: set[str]) -> None:
    profile = node(avx=frozenset(has))
    assert {w for w in ("avx", "avx2", "avx512") if passes(profile, avx=w)} == wanted


UNKNOWN = {
    "gpu memory": ({"gpus": 1, "gpu_memory_mib": 1}, {"cards": gpus(0, memory_mib=None)}),
    "precision": ({"gpus": 1, "precision": "fp32"}, {"cards": gpus(0, precisions=None)}),
    "avx": ({"avx": "avx"}, {"avx": None}),
    "memory": ({"memory_mib": 1}, {"memory_gib": None}),
    "bandwidth": ({"memory_bandwidth_gb_s": 1.0}, {"bandwidth": ()}),
    "one bandwidth": ({"memory_bandwidth_gb_s": 1.0}, {"bandwidth": (142, None)}),
    "iops": ({"ssd_iops": 1}, {"iops": None}),
    "latency": ({"ssd_latency_us": 1e9}, {"latency_us": None}),
    "nvme": ({"ssd_iops": 1}, {"nvme": False}),
    "cache": ({"cache_gb": 1}, {"cache_gb": None}),
    "strict memory": ({"strict": True, "memory_mib": 1}, {"memory_gib": None}),
    "strict bandwidth": ({"strict": True, "memory_bandwidth_gb_s": 1.0}, {"bandwidth": (None, 9)}),
    "gpu's place": ({"strict": True, "gpus": 1}, {"cards": gpus(None)}),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_unknown_never_matches_however_little_is_asked(what: str) -> None:
    need, machine = UNKNOWN[what]
    assert not passes(node(**machine), **need)
    assert passes(node(), **need), "the same need on a machine that is known"


DECLARED = [
    {"memory_bandwidth_gb_s": 100.0},
    {"ssd_iops": 1},
    {"ssd_latency_us": 1000.0},
]


@pytest.mark.parametrize("need", DECLARED, ids=lambda n: next(iter(n)))
@pytest.mark.parametrize("method", list(Method))
def test_declared_measurements_count_only_where_a_site_allows_them(
    need: dict[str, Any], method: Method
) -> None:
    declared = node(method=method)
    for allowed in (True, False):
        seen = inventory.trusted(declared, allow_declared=allowed)
        assert passes(seen, **need) is (allowed or method is not Method.DECLARED)


def test_declared_facts_that_nobody_measures_count_in_any_case() -> None:
    seen = inventory.trusted(node(method=Method.DECLARED), allow_declared=False)
    need = {"gpus": 4, "gpu_memory_mib": 40 * GIB, "cpus": 32, "avx": "avx512", "cache_gb": 3000}
    assert passes(seen, **need)


@pytest.mark.parametrize(
    ("wanted", "ok"),
    [
        ("a100", True),
        ("a100-pcie-40gb", True),
        ("a100-pcie", True),
        ("a10", False),  # an A10 is another card
        ("a100-pcie-40", False),
        ("h100", False),
    ],
)
def test_a_gpu_type_is_the_gres_type_the_model_or_its_beginning(wanted: str, ok: bool) -> None:
    assert passes(node(), gpus=1, gpu_type=wanted) is ok


def test_a_type_in_slurm_s_option_is_the_gres_type_to_the_letter() -> None:
    assert passes(node(), gpus=1, gpu_type="a100", gres_type="a100")
    assert not passes(node(), gpus=1, gpu_type="a100-pcie", gres_type="a100-pcie")
    assert not passes(node(), gpus=1, gpu_type="a100", gres_type="A100")


@pytest.mark.parametrize(("precision", "ok"), [("fp16", True), ("bf16", False), ("fp8", False)])
def test_a_precision_must_be_one_that_the_gpus_compute_in(precision: str, ok: bool) -> None:
    turing = node(cards=gpus(0, 0, precisions=TURING))
    assert passes(turing, gpus=2, precision=precision) is ok


def test_every_gpu_of_the_job_must_qualify_not_just_one() -> None:
    assert passes(mixed(), gpus=2, gpu_memory_mib=20 * GIB)
    assert not passes(mixed(), gpus=3, gpu_memory_mib=20 * GIB)


def test_the_same_gpus_must_meet_all_gpu_conditions() -> None:
    """Two with the memory and two with the precision are not two with both."""
    cards = gpus(0, 0, memory_mib=80 * GIB, precisions=TURING) + gpus(1, 1, first=2)
    need = Need(gpus=2, gpu_memory_mib=60 * GIB, precision="bf16")
    result = rules.evaluate(node(cards=cards), need)
    assert not result.ok
    (together,) = [c for c in result.checks if not c.ok]
    assert together.reason == "only 0 of its 4 GPUs meet all conditions at once"


def test_options_count_threads_and_directives_count_cores() -> None:
    smt = node(threads=2)  # 32 cores, 64 threads
    assert passes(smt, cpus=32)
    assert not passes(smt, cpus=33)
    assert passes(smt, cpus=64, cpus_are_threads=True)
    assert not passes(smt, cpus=65, cpus_are_threads=True)
    assert check(smt, "cpus", cpus=65, cpus_are_threads=True).need == "33 cores"


@pytest.mark.parametrize(
    ("name", "machine", "need", "needs", "has", "reason"),
    [
        ("gpus", {}, {"gpus": 8}, "8", "4", "has 4 GPUs"),
        ("gpus", {"cards": gpus(0)}, {"gpus": 2}, "2", "1", "has 1 GPU"),
        ("gpus", {"cards": ()}, {"gpus": 2}, "2", "0", "has no GPU"),
        (
            "gpu-type",
            {},
            {"gpus": 1, "gpu_type": "h100"},
            "h100",
            "a100-pcie-40gb",
            "has a100-pcie-40gb",
        ),
        (
            "gpu-memory",
            {},
            {"gpus": 1, "gpu_memory_mib": 81920},
            "80 GiB",
            "40 GiB",
            "GPU memory is 40 GiB",
        ),
        ("cpus", {}, {"cpus": 40}, "40 cores", "32 cores", "has 32 cores"),
        (
            "avx",
            {"avx": AVX2},
            {"avx": "avx512"},
            "avx512",
            "avx, avx2",
            "its CPU's vector instructions are avx, avx2",
        ),
        (
            "memory-bandwidth",
            {},
            {"memory_bandwidth_gb_s": 300.0},
            "300 GB/s",
            "280.7 GB/s",
            "memory bandwidth is 280.7 GB/s",
        ),
        (
            "ssd-iops",
            {},
            {"ssd_iops": 10**6},
            "1,000,000 IOPS",
            "900,000 IOPS",
            "random-read IOPS are 900,000 IOPS",
        ),
        ("ssd-latency", {}, {"ssd_latency_us": 50.0}, "50 µs", "80 µs", "read latency is 80 µs"),
        ("cache", {}, {"cache_gb": 4000}, "4,000 GB", "3,000 GB", "its NVMe cache is 3,000 GB"),
        ("cache", {"cache_gb": None}, {"cache_gb": 1}, "1 GB", "no cache", "has no NVMe cache"),
        ("memory", {}, {"memory_mib": 2**20}, "1 TiB", "256 GiB", "memory is 256 GiB"),
    ],
)
def test_a_failure_says_need_and_have_with_units(
    name: str, machine: dict[str, Any], need: dict[str, Any], needs: str, has: str, reason: str
) -> None:
    found = check(node(**machine), name, **need)
    assert not found.ok
    assert (found.need, found.have, found.reason) == (needs, has, reason)


def test_too_few_gpus_of_a_mixed_machine_are_counted() -> None:
    found = check(mixed(), "gpu-memory", gpus=3, gpu_memory_mib=20 * GIB)
    assert (found.ok, found.reason) == (False, "only 2 of its 4 GPUs have 20 GiB")
    found = check(mixed(), "precision", gpus=3, precision="bf16")
    assert (found.ok, found.reason) == (False, "only 2 of its 4 GPUs compute in bf16")
    found = check(mixed(), "gpu-type", gpus=3, gpu_type="t4")
    assert (found.ok, found.reason) == (False, "only 2 of its 4 GPUs are t4")


def test_too_few_gpus_in_all_are_one_failure_and_not_four() -> None:
    need = Need(gpus=8, gpu_type="a100", gpu_memory_mib=20 * GIB, precision="bf16")
    assert [c.name for c in rules.evaluate(node(), need).checks if not c.ok] == ["gpus"]


def test_a_need_that_is_not_stated_is_not_checked() -> None:
    assert rules.evaluate(node(), Need()).checks == ()
    bare = dataclasses.replace(node(cards=(), nvme=False, avx=None, bandwidth=()), memory_mib=None)
    assert passes(bare)


def test_the_best_drive_counts() -> None:
    slow = dataclasses.replace(node().nvmes[0], random_read_iops=10, read_latency_us=900.0)
    both = dataclasses.replace(node(), nvmes=(slow, node().nvmes[0]))
    assert passes(both, ssd_iops=900_000, ssd_latency_us=80.0)


def test_only_what_is_asked_for_is_checked_in_the_order_of_the_rules() -> None:
    need = Need(gpus=2, cpus=8, ssd_iops=10**6, cache_gb=1, strict=True)
    checks = rules.evaluate(node(), need).checks
    assert [c.name for c in checks] == ["gpus", "cpus", "numa", "ssd-iops", "cache"]
    assert {"bf16"} < AMPERE
    assert AVX512 > AVX2
