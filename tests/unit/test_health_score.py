"""Health scores worked out by hand: each term below, at and above its threshold."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from cluster_samples import gpus, node
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.model.health import DriveHealth, GpuHealth, NodeHealth, NumaHealth
from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement.health import HealthScore, combine, score
from crater_slurm.placement.terms import Limits, Term

NOW = 1_700_000_000.0
#: Two sockets of 16 cores, four GPUs, 142 and 138.7 GB/s, a drive calibrated at 80 µs.
MACHINE = node()


def four(**last: Any) -> tuple[GpuHealth, ...]:
    """Four GPUs at 40 °C; the last as said."""
    cool = [GpuHealth(index=i, temperature_c=40) for i in range(4)]
    return (*cool[:3], dataclasses.replace(cool[3], **last))


def judge(
    machine: NodeProfile | None = MACHINE,
    *,
    age: float = 0,
    limits: Limits | None = None,
    **fields: Any,
) -> HealthScore:
    extra = {k: fields.pop(k) for k in ("slurm_gpus", "earlier") if k in fields}
    health = NodeHealth(node="n1", time=NOW - age, **fields)
    return score("n1", machine, health, NOW, limits or Limits(), **extra)


def term(found: HealthScore, name: str) -> Term:
    (only,) = [t for t in found.terms if t.name == name]
    return only


def names(found: HealthScore) -> set[str]:
    return {t.name for t in found.terms}


@pytest.mark.parametrize(
    ("celsius", "value"),
    [(20, 1), (79.9, 1), (80, 1), (83, 0.75), (86, 0.5), (89, 0.25), (92, 0), (110, 0)],
)
def test_heat_falls_on_a_line_between_two_limits(celsius: float, value: float) -> None:
    found = judge(gpus=four(temperature_c=celsius))
    assert term(found, "gpu_temperature").value == pytest.approx(value)
    assert found.value == pytest.approx(value)
    assert term(found, "gpu_temperature").fault is (value == 0)


def test_the_hottest_gpu_speaks_for_the_node() -> None:
    seen = term(judge(gpus=four(temperature_c=86)), "gpu_temperature")
    assert (seen.seen, seen.threshold) == ("GPU 3 at 86 °C", "falls from 80 °C, 0 at 92 °C")


@pytest.mark.parametrize(
    ("reasons", "value", "fault"),
    [
        ((), 1, False),
        (("power_cap",), 1, False),  # every busy GPU is held to its power
        (("thermal",), 0.5, False),
        (("hardware_thermal",), 0.3, True),
        (("power_brake",), 0.3, True),
        (("hardware_slowdown", "thermal"), 0.3, True),
        (("a reason of next year",), 1, False),
    ],
)
def test_only_reasons_that_are_faults_count(
    reasons: tuple[str, ...], value: float, fault: bool
) -> None:
    found = judge(gpus=four(throttled=reasons))
    assert found.value == pytest.approx(value)
    assert term(found, "gpu_throttled").fault is fault


@pytest.mark.parametrize(("errors", "value"), [(0, 1), (1, 0.2), (500, 0.2)])
def test_one_uncorrected_error_is_grave(errors: int, value: float) -> None:
    found = judge(gpus=four(ecc_uncorrected=errors))
    assert found.value == pytest.approx(value)
    assert term(found, "ecc_uncorrected").fault is (errors > 0)


@pytest.mark.parametrize(
    ("before", "now", "value"),
    [
        (0, 99, 1),
        (0, 100, 1),
        (50, 600, 0.5),  # 550 new ones: half way from 100 to 1000
        (0, 1000, 0),
        (0, 10**6, 0),
        (10**6, 550, 0.5),  # the driver was loaded anew: all 550 are new
    ],
)
def test_corrected_errors_count_mildly_by_the_hour(before: int, now: int, value: float) -> None:
    earlier = NodeHealth(node="n1", time=NOW - 3600, gpus=four(ecc_corrected=before))
    found = judge(gpus=four(ecc_corrected=now), earlier=earlier)
    assert term(found, "ecc_corrected").value == pytest.approx(value)
    assert found.value == pytest.approx(1 - 0.1 * (1 - value))


@pytest.mark.parametrize("seconds", [-1, 0, 5401])
def test_corrected_errors_need_a_report_of_the_last_hour_to_compare(seconds: float) -> None:
    earlier = NodeHealth(node="n1", time=NOW - seconds, gpus=four(ecc_corrected=0))
    assert "ecc_corrected" not in names(judge(gpus=four(ecc_corrected=9999), earlier=earlier))
    assert "ecc_corrected" not in names(judge(gpus=four(ecc_corrected=9999)))


@pytest.mark.parametrize(
    ("xid", "value"), [(0, 1), (13, 1), (31, 1), (48, 0.2), (79, 0.2), (119, 0.2)]
)
def test_the_driver_s_grave_errors_are_told_from_a_program_s(xid: int, value: float) -> None:
    assert judge(gpus=four(xid=xid)).value == pytest.approx(value)


def test_a_gpu_that_does_not_answer_is_lost() -> None:
    silent = (*four()[:3], GpuHealth(index=3))
    for found in (judge(gpus=silent), judge(gpus=four()[:3])):
        assert found.value == 0
        lost = term(found, "gpu_lost")
        assert (lost.seen, lost.fault) == ("3 of 4 GPUs answer; silent: 3", True)
    assert term(judge(gpus=four()), "gpu_lost").value == 1


def test_a_gpu_that_the_profile_has_forgotten_is_known_to_slurm() -> None:
    three = node(cards=gpus(0, 0, 1))
    assert judge(three, gpus=four()[:3]).value == 1
    assert judge(three, gpus=four()[:3], slurm_gpus=4).value == 0
    none = node(cards=())
    assert judge(none, slurm_gpus=4).value == 0
    assert judge(none).value == 1


def test_slurm_s_count_of_mig_instances_is_no_count_of_gpus() -> None:
    cut = dataclasses.replace(gpus(0)[0], mig_instances=("1g.5gb",) * 7)
    found = judge(node(cards=(cut,)), gpus=(GpuHealth(index=0, power_w=80),), slurm_gpus=7)
    assert found.value == 1


def test_gpus_of_which_nothing_is_known_are_not_lost() -> None:
    silent = judge(gpus=tuple(GpuHealth(index=i) for i in range(4)))
    assert (silent.value, silent.flags, silent.fresh) == (1, ("gpus_silent",), True)
    assert judge(load=1).flags == ()
    assert "gpu_lost" not in names(judge(load=1))


@pytest.mark.parametrize(
    ("bits", "value", "fault"),
    [
        (0, 1, False),
        (1, 0.5, False),
        (2, 0.5, False),
        (4, 0.2, True),
        (8, 0.2, True),
        (5, 0.2, True),
    ],
)
def test_a_drive_s_own_warnings(bits: int, value: float, fault: bool) -> None:
    found = judge(drives=(DriveHealth(name="nvme0n1", critical_warning=bits),))
    assert found.value == pytest.approx(value)
    assert term(found, "drive_warning").fault is fault


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1), (89, 1), (90, 0.5), (95, 0.25), (100, 0), (140, 0)]
)
def test_a_worn_drive_counts_from_ninety_percent(percent: int, value: float) -> None:
    found = judge(drives=(DriveHealth(name="nvme0n1", wear_percent=percent),))
    assert term(found, "drive_wear").value == pytest.approx(value)
    assert found.value == pytest.approx(1 - 0.1 * (1 - value))


@pytest.mark.parametrize(("latency_us", "value"), [(80, 1), (114.2, 1), (114.4, 0), (800, 0)])
def test_a_drive_is_slow_beyond_its_calibration_by_thirty_percent(
    latency_us: float, value: float
) -> None:
    # 80 / 0.7 = 114.29
    found = judge(drives=(DriveHealth(name="nvme0n1", latency_us=latency_us),))
    assert term(found, "drive_latency").value == value
    assert found.value == pytest.approx(1 - 0.2 * (1 - value))


@pytest.mark.parametrize(("gb_s", "value"), [(50, 1), (113.6, 1), (127.8, 0.5), (142, 0), (150, 0)])
def test_bandwidth_counts_against_what_was_measured(gb_s: float, value: float) -> None:
    # 80 %, 90 % and 100 % of 142 GB/s
    found = judge(numa_nodes=(NumaHealth(id=0, memory_bandwidth_gb_s=gb_s),))
    assert term(found, "memory_bandwidth").value == pytest.approx(value)


@pytest.mark.parametrize(("load", "value"), [(0, 1), (32, 1), (48, 0.5), (64, 0), (1000, 0)])
def test_load_counts_by_cpu(load: float, value: float) -> None:
    found = judge(load=load)
    assert term(found, "load").value == pytest.approx(value)
    assert found.value == pytest.approx(1 - 0.1 * (1 - value))


def test_a_node_that_is_only_busy_is_not_degraded() -> None:
    busy = tuple(NumaHealth(id=i, memory_bandwidth_gb_s=200) for i in range(2))
    assert judge(load=10_000, numa_nodes=busy).value == pytest.approx(0.8)


def test_grave_terms_multiply_and_mild_ones_take_their_share() -> None:
    # 86 °C: 0.5; soft thermal: 0.5; wear 95 %: 0.25 of 0.1; load 48 on 32: 0.5 of 0.1.
    found = judge(
        gpus=four(temperature_c=86, throttled=("thermal",)),
        drives=(DriveHealth(name="nvme0n1", wear_percent=95),),
        load=48,
    )
    assert found.value == pytest.approx(0.5 * 0.5 * (1 - 0.075 - 0.05))
    assert [t.name for t in found.worst()] == ["gpu_temperature", "gpu_throttled", "drive_wear"]


@pytest.mark.parametrize(("age", "flags"), [(0, ()), (180, ()), (180.1, ("stale",))])
def test_a_report_that_is_old_says_nothing(age: float, flags: tuple[str, ...]) -> None:
    found = judge(age=age, gpus=four(temperature_c=95))
    assert found.flags == flags
    assert (found.value, found.fresh) == ((1, False) if flags else (0, True))
    assert bool(found.terms) is not bool(flags)


def test_no_report_is_neutral_and_flagged() -> None:
    found = score("n1", MACHINE, None, NOW, Limits())
    assert (found.value, found.flags, found.fresh) == (1, ("no_report",), False)


def test_what_is_unknown_is_left_out() -> None:
    assert judge().terms == ()
    assert judge().value == 1
    # Without a profile there is nothing to compare with.
    alone = judge(
        None,
        load=1000,
        numa_nodes=(NumaHealth(id=0, memory_bandwidth_gb_s=900),),
        drives=(DriveHealth(name="nvme0n1", latency_us=9000),),
    )
    assert (alone.terms, alone.value) == ((), 1)
    other = judge(drives=(DriveHealth(name="nvme7n1", latency_us=9000),))
    assert other.value == 1


def test_a_site_s_limits_count() -> None:
    warm = Limits(gpu_warm_c=50, gpu_hot_c=60, stale_seconds=10)
    assert judge(limits=warm, gpus=four(temperature_c=55)).value == pytest.approx(0.5)
    assert judge(limits=warm, age=11).flags == ("stale",)


def test_no_terms_make_a_whole_score() -> None:
    assert combine(()) == 1


numbers = st.none() | st.floats(0, 1e12, allow_nan=False)
counts = st.none() | st.integers(0, 10**12)
some_gpus = st.builds(
    GpuHealth,
    index=st.integers(0, 9),
    temperature_c=numbers,
    ecc_uncorrected=counts,
    ecc_corrected=counts,
    xid=counts,
    throttled=st.lists(st.sampled_from(["thermal", "power_cap", "power_brake"])).map(tuple),
)
some_drives = st.builds(
    DriveHealth,
    name=st.sampled_from(["nvme0n1", "nvme1n1"]),
    latency_us=numbers,
    wear_percent=counts,
    critical_warning=counts,
)
some_numa = st.builds(NumaHealth, id=st.integers(0, 3), memory_bandwidth_gb_s=numbers)
some_health = st.builds(
    NodeHealth,
    node=st.just("n1"),
    time=st.floats(NOW - 300, NOW),
    load=numbers,
    gpus=st.lists(some_gpus, max_size=9).map(tuple),
    drives=st.lists(some_drives, max_size=3).map(tuple),
    numa_nodes=st.lists(some_numa, max_size=3).map(tuple),
)


@given(some_health, st.none() | some_health, st.integers(0, 9))
def test_any_report_has_a_score_between_nothing_and_one(
    health: NodeHealth, earlier: NodeHealth | None, slurm_gpus: int
) -> None:
    for machine in (MACHINE, None):
        found = score("n1", machine, health, NOW, Limits(), slurm_gpus=slurm_gpus, earlier=earlier)
        assert 0 <= found.value <= 1
        assert all(0 <= t.value <= 1 and t.seen and t.threshold for t in found.terms)
        assert len(names(found)) == len(found.terms)
        if any(t.fault for t in found.terms):
            assert found.value <= 0.3
