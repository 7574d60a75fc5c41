"""Nodes that a need finds alike: decided once, and exactly as if each were looked at alone."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import pytest
from cluster_samples import GIB, cluster, gpus, node
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement import inventory, rules
from crater_slurm.placement.need import Need

#: Around the thresholds of the needs below, and unknown.
BANDWIDTH = st.sampled_from([None, 45.0, 69.9, 70.0, 100.0, 139.9, 140.0, 140.1])
IOPS = st.sampled_from([None, 0, 799_999, 800_000, 800_001])
LATENCY = st.sampled_from([None, 99.0, 100.0, 100.1])
CACHE = st.sampled_from([None, 999, 1000, 3000])


@st.composite
def machines(draw: st.DrawFn) -> NodeProfile:
    domains = draw(st.sampled_from([1, 2, 4]))
    cards = draw(st.sampled_from([(), (0, 0), tuple(range(domains))]))
    return node(
        numa=domains,
        sockets=1,
        cores=4,
        cards=gpus(*cards),
        bandwidth=[draw(BANDWIDTH) for _ in range(domains)],
        memory_gib=draw(st.sampled_from([None, 16, 64])),
        iops=draw(IOPS),
        latency_us=draw(LATENCY),
        nvme=draw(st.booleans()),
        cache_gb=draw(CACHE),
    )


NEEDS = st.builds(
    Need,
    gpus=st.sampled_from([0, 1, 2, 4]),
    cpus=st.sampled_from([None, 4, 8]),
    memory_mib=st.sampled_from([None, 16 * GIB, 100 * GIB]),
    memory_bandwidth_gb_s=st.sampled_from([None, 70.0, 140.0, 210.0]),
    ssd_iops=st.sampled_from([None, 800_000]),
    ssd_latency_us=st.sampled_from([None, 100.0]),
    cache_gb=st.sampled_from([None, 1000]),
    strict=st.booleans(),
)


def made(profiles: list[NodeProfile], **options: Any) -> inventory.Inventory:
    named = [dataclasses.replace(p, name=f"n{i:03d}") for i, p in enumerate(profiles)]
    return inventory.build(cluster(named), named, **options)


@settings(max_examples=120)
@given(st.lists(machines(), min_size=1, max_size=12), NEEDS)
def test_every_class_is_decided_as_each_of_its_nodes_alone(
    profiles: list[NodeProfile], need: Need
) -> None:
    found = made(profiles)
    seen = 0
    for one in found.classes(need):
        together = rules.evaluate(one.profile, need)
        assert not seen & one.nodes, "no node is in two classes"
        seen |= one.nodes
        for name in found.names_of(one.nodes):
            alone = rules.evaluate(profiles[int(name[1:])], need)
            assert alone.ok == together.ok, (name, alone, together)
            assert [(c.name, c.ok) for c in alone.checks] == [
                (c.name, c.ok) for c in together.checks
            ]
            assert alone.eligible == together.eligible
            kinds = [r.fit and (r.fit.count, r.fit.gpus_per_domain, r.fit.everywhere)
                     for r in (alone, together)]  # fmt: skip
            assert kinds[0] == kinds[1]
    assert seen == found.everything


def test_a_thousand_measured_nodes_are_one_class_for_a_need_that_all_meet() -> None:
    chance = random.Random(1)
    profiles = [
        node(
            bandwidth=(140 + 4 * chance.random(), 138 + 4 * chance.random()),
            iops=chance.randint(850_000, 950_000),
            latency_us=75 + 10 * chance.random(),
        )
        for _ in range(1000)
    ]
    found = made(profiles)
    assert found.makes == 1
    assert len(found.classes(Need(gpus=2, cpus=8, strict=True))) == 1
    assert len(found.classes(Need(memory_bandwidth_gb_s=100, ssd_iops=800_000, strict=True))) == 1
    assert len(found.classes(Need(ssd_iops=900_000))) == 2


def test_the_node_that_comes_nearest_stands_for_its_class() -> None:
    profiles = [node(bandwidth=(low, low)) for low in (40.0, 60.0, 50.0)]
    (one,) = made(profiles).classes(Need(memory_bandwidth_gb_s=200.0))
    assert one.example == "n001"
    assert one.profile.memory_bandwidth_gb_s == 120.0


def test_values_that_do_not_count_are_unknown() -> None:
    from crater_slurm.model.profile import Method

    profiles = [node(), node(method=Method.DECLARED)]
    need = Need(memory_bandwidth_gb_s=100.0)
    assert len(made(profiles).classes(need)) == 1
    strict = made(profiles, allow_declared=False)
    assert [rules.evaluate(c.profile, need).ok for c in strict.classes(need)] == [True, False]


def test_machines_with_many_numa_nodes_are_told_apart_by_their_values() -> None:
    wide = [
        node(numa=16, sockets=1, cores=2, cards=(), bandwidth=[10.0] * 15 + [last])
        for last in (10.0, 11.0, 10.0)
    ]
    need = Need(memory_bandwidth_gb_s=51.0, strict=True)
    sizes = sorted(c.nodes.bit_count() for c in made(wide).classes(need))
    assert sizes == [1, 2]


def test_an_empty_cluster_has_no_class() -> None:
    assert inventory.build(cluster([]), []).classes(Need(gpus=1)) == []


@pytest.mark.parametrize("strict", [False, True])
def test_ten_thousand_different_nodes_are_grouped_in_little_time(strict: bool) -> None:
    """No assertion on time: only that the classes stay few, which is what the time depends on."""
    chance = random.Random(2)
    profiles = [
        node(bandwidth=(chance.gauss(142, 2), chance.gauss(139, 2)), iops=chance.randint(1, 10**6))
        for _ in range(2000)
    ]
    found = made(profiles)
    begin = time.perf_counter()
    classes = found.classes(
        Need(gpus=2, memory_bandwidth_gb_s=140.0, ssd_iops=500_000, strict=strict)
    )
    assert len(classes) <= (16 if strict else 2)
    assert time.perf_counter() > begin
