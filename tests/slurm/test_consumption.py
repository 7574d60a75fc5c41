"""Memory bandwidth, SSD IOPS and cache are used up by jobs: what is gone must be waited for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers import (
    accepted,
    all_well,
    cancel,
    inventory,
    patient_lab,
    profile,
    running,
    shares,
    submit,
    waits,
)

from crater_slurm.lab import Lab


@pytest.fixture(scope="module")
def cluster(lab_factory: Any, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """b1: one package with 142 GB/s, 850,000 IOPS and 3,500 GB of cache; four GPUs."""
    one = profile("a100-pcie-40gb")
    one["cpu"]["sockets"] = 1
    one["numa_nodes"] = [one["numa_nodes"][0] | {"distances": [10]}]
    one["gpus"] = one["gpus"][:4]
    one["memory_mib"] = 257536
    file = inventory(tmp_path_factory.mktemp("consumption"), ("b1", one))
    return patient_lab(lab_factory, inventory=file)


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    yield cluster
    cancel(cluster)


@pytest.mark.parametrize(
    ("asked", "gres", "amount"),
    [
        ("memory-bandwidth=140", "membw", 140),
        ("memory-bandwidth=140 numa=strict", "membw", 140),
        ("memory-bandwidth=71.5", "membw", 72),  # never less than was asked
        ("ssd-iops=500k", "nviops", 500_000),
        ("cache=2TB", "nvme", 2000),
    ],
)
def test_the_second_waits_until_the_first_has_ended(
    lab: Lab, asked: str, gres: str, amount: int
) -> None:
    first = accepted(submit(lab, crater=f"gpus=1 cpus=2 {asked}"))
    running(lab, first)
    assert shares(lab, first)[0].counts[gres] == amount
    second = accepted(submit(lab, crater=f"gpus=1 cpus=2 {asked}", user="bob"))
    waits(lab, second)
    cancel(lab, first)
    running(lab, second)
    assert shares(lab, second)[0].counts[gres] == amount


def test_what_fits_together_runs_together(lab: Lab) -> None:
    for _ in range(2):
        job = accepted(submit(lab, crater="gpus=1 cpus=2 memory-bandwidth=70 cache=1000GB"))
        running(lab, job)


def test_jobs_without_crater_count_too(lab: Lab) -> None:
    plain = accepted(submit(lab, "--gres=membw:100"))
    running(lab, plain)
    waits(lab, accepted(submit(lab, crater="gpus=1 memory-bandwidth=50")))
    running(lab, accepted(submit(lab, crater="gpus=1 memory-bandwidth=42")))


def test_the_users_own_gres_is_kept(lab: Lab, slurm_version: tuple[int, int]) -> None:
    said = submit(
        lab, "--gres=membw:20,gpu:a100:1", crater="gpus=1 memory-bandwidth=140 ssd-iops=1000"
    )
    job = accepted(said)
    record = running(lab, job)
    prefix = "gres:" if slurm_version < (23, 2) else "gres/"
    wanted = ("membw:20", "gpu:a100:1", "nviops:1000")
    assert sorted(record["TresPerNode"].split(",")) == sorted(prefix + part for part in wanted)
    assert shares(lab, job)[0].counts == {"gpu": 1, "membw": 20, "nviops": 1000}


@pytest.mark.parametrize("option", ["--gpus=1", "--gpus-per-node=1", "--gres=gpu:1"])
def test_gpus_are_not_lost_beside_it(lab: Lab, option: str) -> None:
    job = accepted(submit(lab, option, crater="memory-bandwidth=50"))
    running(lab, job)
    share = shares(lab, job)[0]
    assert (len(share.gpus), share.counts["membw"]) == (1, 50)


def test_more_than_a_node_has_is_refused(lab: Lab) -> None:
    for asked, way_out in (
        ("memory-bandwidth=143", "memory-bandwidth=142"),
        ("ssd-iops=900k", "ssd-iops=850000"),
        ("cache=4TB", "cache=3500GB"),
    ):
        said = submit(lab, crater=asked)
        assert said.job is None
        assert f"it would fit with {way_out}" in said.text, said.text
        running(lab, accepted(submit(lab, crater=way_out)))
        cancel(lab)


def test_the_node_is_well(lab: Lab) -> None:
    all_well(lab)
