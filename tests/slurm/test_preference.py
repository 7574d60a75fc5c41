"""Preferred nodes on a real slurmctld: taken first, and never waited for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers import accepted, cancel, patient_lab, running, submit

from crater_slurm.lab import Lab

SMALL = "gpus=1 gpu-memory=16GiB cpus=2"


@pytest.fixture(scope="module")
def cluster(lab_factory: Any) -> Lab:
    return patient_lab(lab_factory, inventory="demo")


@pytest.fixture
def empty(cluster: Lab) -> Iterator[Lab]:
    yield cluster
    cancel(cluster)


def test_a_small_job_goes_to_small_cards_and_to_others_when_those_are_taken(empty: Lab) -> None:
    """l1's L4 cards come last in Slurm's own order of nodes, and still get the jobs that fit."""
    cards = len(empty.nodes.profile_of("l1").gpus)
    jobs = [accepted(submit(empty, crater=SMALL)) for _ in range(cards)]
    assert {running(empty, job)["NodeList"] for job in jobs} == {"l1"}
    further = running(empty, accepted(submit(empty, crater=SMALL)))
    assert further["NodeList"] != "l1"


def test_two_features_together_name_nodes(empty: Lab) -> None:
    """a1 and a2 share their cards with s1, whose drive is slow, and their drive's class with h1."""
    said = submit(empty, crater="gpus=2 gpu-memory=40GiB cpus=8 ssd-iops=200k")
    record = running(empty, accepted(said))
    assert record["NodeList"] in ("a1", "a2")


def test_a_users_own_preference_and_constraint_win(empty: Lab) -> None:
    for option in ("--prefer", "--constraint"):
        job = accepted(submit(empty, f"{option}=gpu_h100-sxm5-80gb", crater=SMALL))
        assert running(empty, job)["NodeList"] == "h1"


def test_a_job_that_nothing_suits_better_prefers_nothing(empty: Lab) -> None:
    job = accepted(submit(empty, "--partition=cpu", crater="cpus=2"))
    assert running(empty, job).get("Prefer", "(null)") in ("(null)", "")
