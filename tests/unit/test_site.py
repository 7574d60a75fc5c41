"""Partitions and reservations: told with need and have, never a refusal of what Slurm may run."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Any

import pytest
from cluster_samples import cluster, decider, gpus, message, node, replan

from crater_slurm.model.cluster import Partition, Reservation, SlurmCluster
from crater_slurm.model.plan import Condition
from crater_slurm.placement import inventory
from crater_slurm.placement.outcome import Outcome, Scope
from crater_slurm.placement.planner import Planner
from crater_slurm.scheduler.state import View

NOW = 1_700_000_000.0  # the sample decider's clock
HOUR = 3600.0
PARTITIONS = {"n1": "gpu", "n2": "gpu", "n3": "long"}


def site(
    *limits: Partition, enforce: str = "NO", held: tuple[Reservation, ...] = (), **options: Any
) -> SlurmCluster:
    profiles = [node(name) for name in PARTITIONS]
    found = cluster(profiles, **{"partitions": PARTITIONS, **options})
    return dataclasses.replace(found, partitions=limits, enforce_limits=enforce, reservations=held)


def outcome(there: SlurmCluster, words: str = "gpus=1", **job: Any) -> Outcome:
    names = tuple(job.pop("partitions", ()))
    scope = Scope(partitions=names, now=NOW, reservations=tuple(job.pop("reservations", ())))
    planner = Planner(inventory.build(there, [node(name) for name in PARTITIONS]))
    return replan(planner, words, scope=scope, partitions=names, **job)


def of(found: Outcome, name: str) -> Condition:
    (one,) = [c for c in found.conditions if c.name == name]
    return one


DAY = 24 * 60
LIMITS: list[tuple[str, dict[str, Any], list[dict[str, Any]], str]] = [
    (
        "partition-nodes",
        {"max_nodes": 2},
        [{"min_nodes": 1}, {"min_nodes": 2}, {"min_nodes": 3}],
        "at most 2 nodes",
    ),
    (
        "partition-time",
        {"max_time_minutes": DAY},
        [
            {"time_limit_minutes": DAY - 1},
            {"time_limit_minutes": DAY},
            {"time_limit_minutes": 1441},
        ],
        "at most 1-00:00:00",
    ),
    (
        "partition-cpus",
        {"max_cpus_per_node": 8},
        [{"cpus_per_task": 7}, {"cpus_per_task": 8}, {"cpus_per_task": 9}],
        "at most 8 CPUs a node",
    ),
    (
        "partition-memory",
        {"max_memory_per_node_mib": 2048},
        [
            {"memory_per_node_mib": 2047},
            {"memory_per_node_mib": 2048},
            {"memory_per_node_mib": 2049},
        ],
        "at most 2 GiB a node",
    ),
]


@pytest.mark.parametrize(("name", "limit", "jobs", "have"), LIMITS, ids=lambda v: str(v)[:20])
def test_a_limit_is_a_condition_from_both_sides_and_refuses_nothing(
    name: str, limit: dict[str, Any], jobs: list[dict[str, Any]], have: str
) -> None:
    there = site(Partition(name="gpu", **limit))
    for place, job in enumerate(jobs):
        found = outcome(there, **job)
        fits = place < 2
        assert of(found, name).have == have
        assert of(found, name).met is fits
        assert (of(found, name).passed_nodes, of(found, name).failed_nodes) == (
            (2, 0) if fits else (0, 2)
        )
        # Three nodes are more than the partition has: that is the hardware's to refuse.
        assert found.feasible is (job.get("min_nodes", 1) <= 2)
        assert bool(found.notes) is not fits


@pytest.mark.parametrize("name", [row[0] for row in LIMITS])
def test_what_is_not_limited_or_not_asked_is_no_condition(name: str) -> None:
    without = outcome(site(Partition(name="gpu")), min_nodes=2, time_limit_minutes=9999)
    assert name not in {c.name for c in without.conditions}
    limits = {k: v for row in LIMITS[1:] for k, v in row[1].items()}
    silent = outcome(site(Partition(name="gpu", **limits)))
    assert not {c.name for c in silent.conditions} & {row[0] for row in LIMITS[1:]}
    assert silent.notes == ()


def test_a_partition_may_ask_for_more_nodes_than_a_job_wants() -> None:
    there = site(Partition(name="gpu", min_nodes=2))
    found = outcome(there, min_nodes=1, max_nodes=1)
    assert (of(found, "partition-nodes").need, of(found, "partition-nodes").have) == (
        "at most 1 node",
        "at least 2 nodes",
    )
    assert found.feasible
    assert outcome(there, min_nodes=2, max_nodes=2).notes == ()
    assert outcome(there).notes == (), "without -N Slurm takes as many as the partition wants"


@pytest.mark.parametrize(
    ("enforce", "then"),
    [
        ("NO", "it waits"),
        ("ANY", "Slurm refuses it (EnforcePartLimits=ANY)"),
        ("ALL", "Slurm refuses it (EnforcePartLimits=ALL)"),
    ],
)
def test_the_note_says_what_slurm_will_do(enforce: str, then: str) -> None:
    there = site(Partition(name="gpu", max_time_minutes=60), enforce=enforce)
    assert outcome(there, time_limit_minutes=90).notes == (
        f"partition gpu allows at most 01:00:00, the job asks for 01:30:00: {then}, unless its QOS "
        "or an admin allows more",
    )


def test_with_several_partitions_a_node_counts_where_one_allows_the_job() -> None:
    short = Partition(name="gpu", max_time_minutes=60)
    for long, passed in (
        (Partition(name="long"), 1),
        (Partition(name="long", max_time_minutes=120), 1),
        (Partition(name="long", max_time_minutes=61), 0),
    ):
        found = outcome(site(short, long), partitions=("gpu", "long"), time_limit_minutes=90)
        assert of(found, "partition-time").passed_nodes == passed
        assert found.feasible
        assert bool(found.notes) is (passed == 0)
    strict = site(short, Partition(name="long"), enforce="ALL")
    found = outcome(strict, partitions=("gpu", "long"), time_limit_minutes=90)
    assert [note[:13] for note in found.notes] == ["partition gpu"], "ALL means every partition"


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("UP", None),
        ("DOWN", "partition gpu is DOWN: jobs wait there until it is up"),
        ("DRAIN", "partition gpu is DRAIN: Slurm takes no new jobs there"),
        ("INACTIVE", "partition gpu is INACTIVE: Slurm neither takes nor starts jobs there"),
    ],
)
def test_a_partition_s_state_is_a_note(state: str, says: str | None) -> None:
    found = outcome(site(Partition(name="gpu", state=state)))
    assert found.feasible
    assert found.notes == ((says,) if says else ())
    both = site(Partition(name="gpu", state=state), Partition(name="long"))
    assert outcome(both, partitions=("gpu", "long")).notes == ()


# Reservations


def reserved(*nodes: str, start: float, hours: float, **fields: Any) -> Reservation:
    begin = NOW + start * HOUR
    fields = {"name": "maint", **fields}
    return Reservation(start=begin, end=begin + hours * HOUR, nodes=frozenset(nodes), **fields)


def clock(hours: float) -> str:
    return datetime.fromtimestamp(NOW + hours * HOUR).astimezone().strftime("%Y-%m-%d %H:%M")


ALL = ("n1", "n2")


@pytest.mark.parametrize(
    ("held", "minutes", "waits"),
    [
        (reserved(*ALL, start=-1, hours=2), 30, True),  # now
        (reserved("n1", start=-1, hours=2), 30, False),  # one node is left
        (reserved(*ALL, start=-2, hours=2), 30, False),  # over
        (reserved(*ALL, start=1, hours=2), 60, False),  # ends just when it begins
        (reserved(*ALL, start=1, hours=2), 61, True),
        (reserved(*ALL, start=24 * 30, hours=2), None, True),  # no limit reaches any time
        (reserved(*ALL, start=-1, hours=2, flags=frozenset({"MAGNETIC"})), 30, False),
        (reserved(*ALL, start=-1, hours=2, whole_nodes=False), 30, False),
    ],
)
def test_reservations_of_others_are_told_and_refuse_nothing(
    held: Reservation, minutes: int | None, waits: bool
) -> None:
    there = site(Partition(name="gpu"), held=(held,))
    found = outcome(there, time_limit_minutes=minutes)
    assert found.feasible
    assert found.passed.bit_count() == 2
    assert bool(found.notes) is waits


def test_the_note_says_until_when() -> None:
    now = site(held=(reserved(*ALL, start=-1, hours=3),))
    assert outcome(now, time_limit_minutes=30).notes == (
        "of the 2 nodes that can run this job none can start it now because of reservations "
        f"(maint): it waits until {clock(2)}",
    )
    later = site(held=(reserved(*ALL, start=2, hours=3),))
    assert outcome(later, time_limit_minutes=180).notes == (
        "of the 2 nodes that can run this job none can start it now because of reservations "
        f"(maint), which its time limit reaches into: it waits until {clock(5)}; with "
        "--time=02:00:00 it could start before",
    )


def test_reservations_one_after_the_other_are_waited_for_together() -> None:
    first = reserved(*ALL, start=-1, hours=2)
    second = reserved("n1", start=1.5, hours=2, name="course")
    third = reserved("n2", start=1.25, hours=4, name="other")
    there = site(held=(first, second, third))
    (note,) = outcome(there, time_limit_minutes=60).notes
    assert note.endswith(f"it waits until {clock(3.5)}"), "n1 is free before n2"
    (note,) = outcome(there, time_limit_minutes=60, min_nodes=2).notes
    assert note.endswith(f"it waits until {clock(5.25)}")
    (note,) = outcome(there, time_limit_minutes=15).notes
    assert note.endswith(f"it waits until {clock(1)}"), "it fits between"


def test_without_a_time_limit_the_partition_s_default_counts() -> None:
    held = (reserved(*ALL, start=2, hours=1),)
    for limits, waits in (
        ({"default_time_minutes": 60, "max_time_minutes": DAY}, False),
        ({"max_time_minutes": 120}, False),
        ({"max_time_minutes": 121}, True),
        ({}, True),
    ):
        found = outcome(site(Partition(name="gpu", **limits), held=held))
        assert bool(found.notes) is waits, limits


def test_a_job_in_a_reservation_has_its_nodes_and_no_others() -> None:
    held = reserved("n2", start=-1, hours=2, name="course")
    inside = outcome(site(held=(held,)), reservations=("course",))
    assert (inside.passed.bit_count(), inside.notes) == (1, ())
    two = outcome(site(held=(held,)), reservations=("course",), min_nodes=2)
    assert not two.feasible
    assert outcome(site(held=(held,)), min_nodes=2).feasible


@pytest.mark.parametrize("flag", ["FLEX", "REPLACE", "REPLACE_DOWN", "ANY_NODES"])
def test_a_reservation_whose_nodes_are_not_fixed_confines_no_job(flag: str) -> None:
    held = reserved("n2", start=-1, hours=2, name="course", flags=frozenset({flag}))
    assert outcome(site(held=(held,)), reservations=("course",), min_nodes=2).feasible


def test_a_reservation_that_slurm_does_not_have_is_slurm_s_to_refuse() -> None:
    assert outcome(site(), reservations=("nosuch",)).feasible
    held = reserved("n2", start=-1, hours=2, name="course")
    assert outcome(site(held=(held,)), reservations=("course", "nosuch"), min_nodes=2).feasible


def test_nodes_in_maintenance_are_reserved_and_not_down() -> None:
    held = (reserved(*ALL, start=-1, hours=2),)
    there = site(held=held, states={"n1": "maint", "n2": "maint"})
    (note,) = outcome(there, time_limit_minutes=30).notes
    assert "reservations (maint)" in note
    down = site(held=held, states={"n1": "down", "n2": "maint"})
    assert len(outcome(down, time_limit_minutes=30).notes) == 1


def test_a_hundred_reservations_cost_no_loop_over_nodes() -> None:
    """The sets are made with the picture; each job only joins them."""
    held = tuple(reserved("n1", start=i, hours=0.5, name=f"r{i}") for i in range(100))
    built = inventory.build(site(held=held), [node(name) for name in PARTITIONS])
    assert [nodes for _, nodes in built.reservations] == [1] * 100


# The whole way of a submission


def answer(there: SlurmCluster, words: str, **fields: str) -> Any:
    profiles = [node(name) for name in PARTITIONS]
    view = View(there, Planner(inventory.build(there, profiles)), len(profiles))
    return decider().decide(message(words, **fields), view)


def test_the_filter_s_message_brings_time_limit_and_reservation() -> None:
    held = (reserved("n2", start=-1, hours=2, name="course"),)
    there = site(Partition(name="gpu", max_time_minutes=60), held=held)
    late = answer(there, "gpus=1", time_limit="90")
    assert not late.reject
    assert "crater: partition gpu allows at most 01:00:00, the job asks for 01:30:00" in str(
        late.messages
    )
    assert "partition-time" in {c.name for c in late.decision.conditions}
    inside = answer(there, "gpus=1", reservation="course")
    assert inside.decision.passed_nodes == "n2"
    refused = answer(there, "gpus=5", reservation="course")
    assert refused.reject
    assert "none of the 1 nodes that its options allow can run this job" in refused.messages[0]


def test_linked_gpus_are_kept_for_explain_and_not_said_to_the_user() -> None:
    from crater_slurm.model.profile import NvLink

    pairs = {0: 1, 1: 0, 2: 3, 3: 2}
    cards = tuple(
        dataclasses.replace(g, nvlinks=(NvLink(pairs[g.index]),)) for g in gpus(0, 0, 1, 1)
    )
    profiles = [node("n1", cards=cards), node("n2", cards=cards), node("n3")]
    there = cluster(profiles)
    view = View(there, Planner(inventory.build(there, profiles)), 3)
    found = decider().decide(message("gpus=2"), view)
    assert found.decision is not None
    assert found.decision.facts == (
        "2 nodes such as n1: GPUs 0-1 and 2-3 are linked by NVLink",
        "n3: no NVLink between its GPUs is known",
    )
    assert not any("NVLink" in line for line in found.messages)
    four = decider().decide(message("gpus=4"), view)
    assert four.decision is not None
    assert four.decision.facts[0].endswith("are linked by NVLink, no 4 of them all")
    alone = decider().decide(message("gpus=1"), view)
    assert alone.decision is not None
    assert alone.decision.facts == ()
