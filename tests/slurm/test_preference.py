"""Preferred nodes on a real slurmctld: taken first, never waited for, and never a way to be refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helpers import accepted, cancel, crater, patient_lab, profile, running, submit, wait_until

from crater_slurm.lab import Lab

SMALL = "gpus=1 gpu-memory=16GiB cpus=2"
CONF = {
    "scheduler": {"queue_seconds": 0.3, "refresh_seconds": 1},
    "health": {"stale_seconds": 1},  # no node reports any, and nobody waits for it
}


@pytest.fixture(scope="module")
def cluster(lab_factory: Any) -> Lab:
    return patient_lab(lab_factory, inventory="demo", crater_conf=CONF)


@pytest.fixture
def empty(cluster: Lab) -> Iterator[Lab]:
    yield cluster
    cancel(cluster)


def preferred(lab: Lab, job: int) -> str:
    return lab.job(job).get("Prefer", "").replace("(null)", "")


def test_a_small_job_goes_to_small_cards_and_to_others_when_those_are_taken(empty: Lab) -> None:
    """l1's L4 cards come last in Slurm's own order of nodes, and still get the jobs that fit."""
    cards = len(empty.nodes.profile_of("l1").gpus)
    jobs = [accepted(submit(empty, crater=SMALL)) for _ in range(cards)]
    assert {running(empty, job)["NodeList"] for job in jobs} == {"l1"}
    further = running(empty, accepted(submit(empty, crater=SMALL)))
    assert further["NodeList"] != "l1"


def test_a_job_that_is_to_start_at_once_takes_any_node(empty: Lab) -> None:
    """Slurm tries it on the preferred nodes alone; test_slurm_tries_... has the reason."""
    fill_l1(empty)
    done = at_once(empty, f"--comment=crater: {SMALL}")
    assert "Granted job allocation" in done, done


def test_slurm_tries_a_job_with_immediate_on_the_preferred_nodes_alone(empty: Lab) -> None:
    """The reason why crater prefers nothing for it; it may go when no release does so."""
    fill_l1(empty)
    assert "busy" in at_once(empty, "--gpus=1", "--prefer=gpu_l4")
    assert "Granted job allocation" in at_once(empty, "--gpus=1")


def fill_l1(lab: Lab) -> None:
    jobs = [accepted(submit(lab, "-wl1", crater=SMALL)) for _ in lab.nodes.profile_of("l1").gpus]
    for job in jobs:
        running(lab, job)


def at_once(lab: Lab, *options: str) -> str:
    done = lab.run(["salloc", "--immediate", "--no-shell", *options], timeout=60)
    return str(done.stderr)


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
    running(empty, job)
    assert preferred(empty, job) == ""


def test_slurm_refuses_what_the_preferred_nodes_alone_could_never_run(empty: Lab) -> None:
    """The reason why crater is careful; it may go when the oldest Slurm no longer does so."""
    said = submit(empty, "--nodes=2", "--prefer=gpu_l4")
    assert said.job is None
    assert "Requested node configuration is not available" in said.text


@pytest.mark.parametrize(
    "options", [["-N2"], ["-N2", "-w", "e1,l1"], ["-N2", "-w", "e1,s1"], ["-x", "l1"]]
)
def test_a_job_that_needs_other_nodes_too_is_not_refused(empty: Lab, options: list[str]) -> None:
    record = running(empty, accepted(submit(empty, *options, crater=SMALL)))
    assert int(record["NumNodes"]) == (2 if "-N2" in options else 1)


def test_a_users_preference_for_nodes_that_can_t_run_it_is_said(empty: Lab) -> None:
    said = submit(empty, "--prefer=gpu_l4", crater="gpus=1 gpu-memory=70GiB")
    assert said.job is None
    assert "whose --prefer names too few nodes that can run it" in said.text


def set_latency(lab: Lab, microseconds: float) -> None:
    """Import another profile of l1."""
    found = profile("l4-inference")
    found["nvmes"][0]["read_latency_us"] = microseconds
    file = lab.home("root") / "l1.yaml"
    file.write_text(yaml.safe_dump({"name": "l1", **found}))
    done = crater(lab, "nodes", "import", file.name, user="root")
    assert done.returncode == 0, done.stderr


def test_a_job_that_waits_is_not_held_for_the_sake_of_a_node_that_it_must_not_get(
    empty: Lab,
) -> None:
    before = empty.nodes.profile_of("l1").nvmes[0].read_latency_us
    assert before is not None
    job = accepted(submit(empty, "--hold", crater=f"{SMALL} ssd-latency=200us"))
    own = accepted(submit(empty, "--hold", "--prefer=gpu_l4", crater=f"{SMALL} ssd-latency=200us"))
    assert preferred(empty, job) in ("gpu_l4", "cc8.9")
    assert preferred(empty, own) == "gpu_l4"
    set_latency(empty, 300)
    try:
        wait_until(lambda: "l1" in empty.job(job)["ExcNodeList"], "it keeps off l1")
        assert preferred(empty, job) == ""
        empty.run(["scontrol", "release", f"{job},{own}"], user="root", check=True)
        assert running(empty, job)["NodeList"] != "l1"
        running(empty, own)
    finally:
        set_latency(empty, before)
