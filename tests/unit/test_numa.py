"""Which NUMA nodes a strict job uses: figures worked out by hand for machines that exist."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from cluster_samples import GIB, gpus, node
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement import numa
from crater_slurm.placement.need import Need
from crater_slurm.placement.numa import Fit


def fit(profile: NodeProfile, cores: int | None = None, **need: Any) -> Fit:
    eligible = frozenset(g.index for g in profile.gpus)
    return numa.fit(profile, eligible, Need(strict=True, cpus=cores, **need), cores)


TWO = node()  # 2 x 16 cores, 2 GPUs beside each, 142 and 138.7 GB/s, 128 GiB each
#: Two EPYC with NPS4: 8 NUMA nodes of 16 cores, one GPU beside each, near ones in the package.
EPYC = dataclasses.replace(
    node(numa=8, cards=gpus(*range(8)), bandwidth=(50,), memory_gib=64),
    numa_nodes=tuple(
        dataclasses.replace(
            n,
            distances=tuple(
                10 if n.id == k else 12 if n.id // 4 == k // 4 else 32 for k in range(8)
            ),
        )
        for n in node(numa=8, bandwidth=(50,), memory_gib=64).numa_nodes
    ),
)


def test_two_gpus_and_eight_cores_fit_on_one_socket() -> None:
    found = fit(TWO, 8, gpus=2)
    assert (found.count, found.gpus_per_domain, found.everywhere) == (1, 2, True)
    assert found.have == "2 GPUs, 16 cores on 1 NUMA node"


@pytest.mark.parametrize(("cores", "ok"), [(15, True), (16, True), (17, False), (20, False)])
def test_the_cores_beside_two_gpus_end_at_sixteen(cores: int, ok: bool) -> None:
    found = fit(TWO, cores, gpus=2)
    assert found.ok is ok
    if not ok:
        assert found.reason == "one NUMA node has at most 16 cores beside 2 GPUs"
        assert found.have == "2 GPUs, 16 cores on 1 NUMA node"


def test_four_gpus_use_both_sockets_and_so_do_their_cores() -> None:
    found = fit(TWO, 20, gpus=4)
    assert (found.count, found.chosen, found.gpus_per_domain) == (2, (0, 1), 2)


def test_three_gpus_use_both_sockets_but_can_t_be_shared_evenly() -> None:
    found = fit(TWO, 20, gpus=3)
    assert (found.count, found.chosen, found.gpus_per_domain) == (2, (0, 1), 0)


def test_on_an_epyc_two_gpus_are_two_near_numa_nodes() -> None:
    found = fit(EPYC, 16, gpus=2)
    assert (found.count, found.gpus_per_domain, found.everywhere) == (2, 1, True)
    assert found.chosen == (0, 1)


@pytest.mark.parametrize(("cores", "ok"), [(32, True), (33, False)])
def test_on_an_epyc_two_gpus_have_thirty_two_cores(cores: int, ok: bool) -> None:
    found = fit(EPYC, cores, gpus=2)
    assert found.ok is ok
    assert found.reason == ("" if ok else "2 NUMA nodes have at most 32 cores beside 2 GPUs")


def test_on_an_epyc_eight_gpus_are_the_whole_machine() -> None:
    found = fit(EPYC, 128, gpus=8)
    assert (found.count, found.chosen, found.gpus_per_domain) == (8, tuple(range(8)), 1)
    assert not fit(EPYC, 129, gpus=8).ok
    assert not fit(EPYC, gpus=9).ok


def test_near_numa_nodes_are_chosen_before_far_ones() -> None:
    cards = gpus(0, 5, 6, 7)  # the only near pairs are in the second package
    found = fit(dataclasses.replace(EPYC, gpus=cards), gpus=2)
    assert found.chosen == (5, 6)


@pytest.mark.parametrize(
    ("bandwidth", "chosen", "everywhere"),
    [
        (138.7, (1,), True),  # both have it: the one with less left over is used
        (138.8, (0,), False),
        (140, (0,), False),
        (142, (0,), False),
        (142.1, (), True),
    ],
)
def test_140_gb_s_are_met_by_numa_node_0_only(
    bandwidth: float, chosen: tuple[int, ...], everywhere: bool
) -> None:
    found = fit(TWO, 8, gpus=2, memory_bandwidth_gb_s=bandwidth)
    assert found.chosen == chosen
    assert found.everywhere is everywhere


def test_too_little_bandwidth_says_how_much_there_is() -> None:
    found = fit(TWO, 8, gpus=4, memory_bandwidth_gb_s=300.0)
    assert found.reason == "2 NUMA nodes give 280.7 GB/s"
    assert found.have == "4 GPUs, 32 cores, 280.7 GB/s on 2 NUMA nodes"


@pytest.mark.parametrize(("mib", "ok"), [(128 * GIB, True), (128 * GIB + 1, False)])
def test_memory_of_a_gpu_job_is_the_memory_beside_its_gpus(mib: int, ok: bool) -> None:
    found = fit(TWO, gpus=2, memory_mib=mib)
    assert found.ok is ok
    assert found.reason == ("" if ok else "one NUMA node has 128 GiB of memory")


@pytest.mark.parametrize(
    ("need", "cores", "count"),
    [
        ({}, 16, 1),
        ({}, 17, 2),
        ({}, 32, 2),
        ({}, None, 1),
        ({"memory_mib": 129 * GIB}, 1, 2),
        ({"memory_bandwidth_gb_s": 142.0}, 1, 1),
        ({"memory_bandwidth_gb_s": 142.1}, 1, 2),
        ({}, 33, 0),
        ({"memory_bandwidth_gb_s": 281.0}, 1, 0),
    ],
)
def test_without_gpus_cores_memory_and_bandwidth_say_how_many(
    need: dict[str, Any], cores: int | None, count: int
) -> None:
    found = fit(TWO, cores, **need)
    assert found.count == count
    assert found.ok is bool(count)


def test_hyper_threads_are_no_cores() -> None:
    smt = node(threads=2)
    assert fit(smt, 16, gpus=2).ok
    assert not fit(smt, 17, gpus=2).ok


def test_numa_nodes_without_cpus_hold_no_job() -> None:
    """Grace's GPU memory, CXL memory: NUMA nodes for the kernel, not for a job."""
    extra = dataclasses.replace(TWO.numa_nodes[0], id=2, cpus=())
    profile = dataclasses.replace(TWO, numa_nodes=(*TWO.numa_nodes, extra), gpus=gpus(2, 2, 0))
    assert fit(profile, gpus=1).chosen == (0,)
    assert not fit(profile, gpus=2).ok


def test_on_a_machine_with_one_numa_node_every_gpu_is_near() -> None:
    profile = node(numa=1, sockets=1, cards=gpus(None, None))
    assert fit(profile, 16, gpus=2).chosen == (0,)


def test_a_machine_whose_numa_nodes_are_unknown_takes_no_strict_job() -> None:
    profile = dataclasses.replace(node(), numa_nodes=())
    assert not fit(profile, 1, gpus=1).ok
    assert not fit(profile, 1).ok


@pytest.mark.parametrize(
    ("profile", "need", "reason"),
    [
        (TWO, {"gpus": 5}, "too few GPUs"),
        (node(cards=()), {"gpus": 1}, "too few GPUs"),
        (
            node(cards=gpus(0, None)),
            {"gpus": 2},
            "only 1 of its GPUs are known to be beside a NUMA node with CPUs",
        ),
        (TWO, {"cores": 33}, "all its NUMA nodes together are too small"),
        (dataclasses.replace(TWO, numa_nodes=()), {"cores": 1}, "its NUMA nodes are unknown"),
    ],
)
def test_why_not_even_all_numa_nodes_are_enough_is_said(
    profile: NodeProfile, need: dict[str, Any], reason: str
) -> None:
    assert fit(profile, **need).reason == reason


def test_only_gpus_that_qualify_count() -> None:
    found = numa.fit(TWO, frozenset({0, 2}), Need(strict=True, gpus=2), None)
    assert (found.count, found.gpus_per_domain) == (2, 1)


def test_thirty_two_numa_nodes_are_no_problem_wherever_the_gpus_are() -> None:
    """Each L3 a NUMA node: choices are far more than are looked at."""
    profile = node(numa=32, cores=4, cards=gpus(28, 29, 30, 31), bandwidth=(20,))
    found = fit(profile, 16, gpus=4)
    assert found.chosen == (28, 29, 30, 31)
    assert fit(profile, 64).count == 16


@pytest.mark.parametrize(
    ("gpu_places", "gpus_asked", "cores", "most"),
    [
        ((0, 0, 1, 1), 2, 8, 142),
        ((1, 1), 2, 8, 138.7),  # NUMA node 0 has more and no GPU
        ((0, 0, 1, 1), 4, 8, 280.7),
        ((0, 0, 1, 1), 2, 17, None),
        ((0, 0, 1, 1), 0, 8, 280.7),
        ((0, 0, 1, 1), 5, 8, None),
    ],
)
def test_the_most_bandwidth_is_what_its_numa_nodes_give(
    gpu_places: tuple[int, ...], gpus_asked: int, cores: int, most: float | None
) -> None:
    profile = node(cards=gpus(*gpu_places))
    eligible = frozenset(g.index for g in profile.gpus)
    need = Need(strict=True, gpus=gpus_asked, cpus=cores, memory_bandwidth_gb_s=999.0)
    assert numa.most_bandwidth(profile, eligible, need, cores) == most


MACHINES = st.builds(
    lambda places, cores, bandwidth: node(
        numa=4, cores=cores, cards=gpus(*places), bandwidth=tuple(bandwidth)
    ),
    st.lists(st.integers(0, 3), max_size=8),
    st.integers(1, 6),
    st.lists(st.integers(10, 60), min_size=4, max_size=4),
)
NEEDS = st.builds(
    Need,
    strict=st.just(True),
    gpus=st.integers(0, 6),
    cpus=st.integers(1, 30),
    memory_mib=st.none() | st.integers(1, 600 * GIB),
    memory_bandwidth_gb_s=st.none() | st.integers(1, 250).map(float),
)


@settings(max_examples=200)
@given(MACHINES, NEEDS)
def test_the_choice_holds_everything_and_is_the_smallest_that_has_the_gpus(
    profile: NodeProfile, need: Need
) -> None:
    """Against all choices, written down in the plainest way."""
    found = numa.fit(profile, frozenset(g.index for g in profile.gpus), need, need.cpus)

    def holds(choice: tuple[int, ...]) -> bool:
        nodes = [profile.numa_nodes[i] for i in choice]
        return (
            sum(len(n.cpus) for n in nodes) >= (need.cpus or 0)
            and sum(n.memory_mib or 0 for n in nodes) >= (need.memory_mib or 0)
            and sum(n.memory_bandwidth_gb_s or 0 for n in nodes)
            >= (need.memory_bandwidth_gb_s or 0)
        )

    def has_gpus(choice: tuple[int, ...]) -> bool:
        return sum(g.numa_node in choice for g in profile.gpus) >= need.gpus

    every = [c for k in range(1, 5) for c in itertools.combinations(range(4), k)]
    enough = [c for c in every if (has_gpus(c) if need.gpus else holds(c))]
    fewest = min(map(len, enough), default=0)
    good = [c for c in enough if len(c) == fewest and holds(c)]
    assert found.ok is bool(good)
    if good:
        assert found.chosen in good
        assert found.count == fewest
        assert found.everywhere == all(holds(c) for c in every if len(c) == fewest and has_gpus(c))
        if found.gpus_per_domain:
            assert found.gpus_per_domain * found.count == need.gpus
