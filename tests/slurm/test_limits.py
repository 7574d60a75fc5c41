"""Partition limits and reservations: what crater tells is what Slurm then does, and no more is
refused than Slurm would refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers import (
    Said,
    accepted,
    cancel,
    explained,
    patient_lab,
    running,
    submit,
    wait_until,
)

from crater_slurm.lab import Lab


@pytest.fixture(scope="module")
def cluster(lab_factory: Any) -> Lab:
    return patient_lab(lab_factory, inventory="demo")


@pytest.fixture
def site(cluster: Lab) -> Iterator[Lab]:
    """The demo cluster without jobs, limits and reservations, before and after."""
    yield cluster
    cancel(cluster)
    admin(cluster, "update", "PartitionName=gpu", "MaxTime=INFINITE", "MaxNodes=UNLIMITED")
    names = cluster.run(["scontrol", "-o", "show", "reservation"], user="root").stdout.split()
    for word in names:
        if word.startswith("ReservationName="):
            admin(cluster, "delete", word)


def admin(lab: Lab, *words: str) -> None:
    lab.run(["scontrol", *words], user="root", check=True)


def tried(lab: Lab, text: str, *options: str, crater: str) -> Said:
    """What is said of such a job, once the scheduler has seen what the admin changed."""

    def said() -> Said | None:
        answer = submit(lab, "--test-only", *options, crater=crater)
        return answer if text in answer.text else None

    found: Said = wait_until(said, f"crater says {text!r}")
    return found


def pending(lab: Lab, job: int, reason: str) -> None:
    """Wait until Slurm gives that reason for not starting the job."""

    def settled() -> bool:
        record = lab.job(job)
        return record["JobState"] != "PENDING" or reason in record["Reason"]

    wait_until(settled, f"job {job} is looked at")
    assert (lab.job(job)["JobState"], lab.job(job)["Reason"]) == ("PENDING", reason)


def reserve(lab: Lab, name: str, nodes: str, start: str, minutes: int, *more: str) -> None:
    words = (f"ReservationName={name}", f"StartTime={start}", f"Duration={minutes}")
    admin(lab, "create", "reservation", *words, "Users=root", f"Nodes={nodes}", *more)


def test_a_job_over_a_partition_s_limits_is_told_and_waits_as_slurm_has_it(site: Lab) -> None:
    admin(site, "update", "PartitionName=gpu", "MaxTime=60", "MaxNodes=1")
    tried(site, "partition gpu allows", "--time=90", crater="gpus=1")
    said = submit(site, "--time=90", crater="gpus=1")
    job = accepted(said)
    assert (
        "crater: partition gpu allows at most 01:00:00, the job asks for 01:30:00: it waits, "
        "unless its QOS or an admin allows more"
    ) in said.lines
    pending(site, job, "PartitionTimeLimit")
    many = submit(site, "-N2", "--time=30", crater="gpus=1")
    assert "at most 1 node, the job asks for 2 nodes: it waits" in many.text
    pending(site, accepted(many), "PartitionNodeLimit")
    conditions = {c["name"]: c for c in explained(site, job)["decision"]["conditions"]}
    assert conditions["partition-time"]["passed_nodes"] == 0
    assert conditions["gpus"]["passed_nodes"] > 0
    running(site, accepted(submit(site, "--time=60", crater="gpus=1")))


def test_a_maintenance_ahead_is_told_with_the_time_limit_that_avoids_it(site: Lab) -> None:
    reserve(site, "maint", "ALL", "now+2hours", 60, "Flags=MAINT,IGNORE_JOBS")
    said = tried(site, "because of reservations (maint)", "--time=180", crater="gpus=1")
    assert "which its time limit reaches into: it waits until" in said.text
    late = accepted(submit(site, "--time=180", crater="gpus=1"))
    wait_until(lambda: "Reserved" in site.job(late)["Reason"] or "Maint" in site.job(late)["Reason"],
               "Slurm keeps the job from the reserved nodes")  # fmt: skip
    short = submit(site, "--time=60", crater="gpus=1")
    assert "reservations" not in short.text
    running(site, accepted(short))


def test_a_job_in_a_reservation_is_planned_on_its_nodes_alone(site: Lab) -> None:
    reserve(site, "course", "a1", "now", 60, "Flags=IGNORE_JOBS")
    tried(site, "of 1 nodes can run it", "--reservation=course", crater="gpus=1")
    refused = submit(site, "--reservation=course", crater="gpus=1 gpu-type=h100", user="root")
    assert refused.job is None
    assert "refused: none of the 1 nodes that its options allow can run this job" in refused.text
    job = accepted(submit(site, "--reservation=course", "--time=5", crater="gpus=1", user="root"))
    assert running(site, job)["NodeList"] == "a1"
