"""Planning a waiting job again from its record, and what is then done about its excluded nodes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from cluster_samples import GIB, decider, gpus, message, mixed, node, view
from queue_samples import submitted

from crater_slurm.model.plan import Decision, Placement
from crater_slurm.placement.reconcile import Act, Wanted, judge
from crater_slurm.scheduler import replan
from crater_slurm.scheduler.state import View
from crater_slurm.slurm import levers
from crater_slurm.slurm.fields import PLANNING, job_from_fields
from crater_slurm.store.decisions import decision_from_dict, decision_to_dict

FAST = "gpus=1 ssd-latency=100us"
CONSUME = {"membw", "nviops", "nvme"}


def names(*words: str) -> frozenset[str]:
    return frozenset(words)


def wanted(decision: Decision, on: View) -> Wanted | None:
    return replan.wanted(decision, on, CONSUME)


def test_a_node_that_was_repaired_is_no_longer_excluded_and_the_user_s_own_stays() -> None:
    slow = node("y1", latency_us=165)
    decision, _ = submitted(FAST, node("x1"), slow, node("z1"), exc_nodes="z1")
    assert decision.fields["exc_nodes"] == "z1,y1"
    found = wanted(decision, view(node("x1"), node("y1"), node("z1")))
    assert found == Wanted(excluded=frozenset({"z1"}))


def test_a_node_that_got_worse_is_excluded() -> None:
    decision, _ = submitted(FAST, node("x1"), node("y1"))
    assert "exc_nodes" not in decision.fields
    found = wanted(decision, view(node("x1"), node("y1", latency_us=300)))
    assert found == Wanted(excluded=frozenset({"y1"}))


def test_the_record_comes_back_from_the_store_as_exactly_as_it_went() -> None:
    decision, _ = submitted(
        "cpus=8 numa=strict", node(), tres_per_node="gres/gpu:a100:2", num_tasks="2", min_nodes="1"
    )
    stored = decision_from_dict(json.loads(json.dumps(decision_to_dict(decision))))
    assert stored.submitted == decision.submitted
    assert wanted(stored, view(node(), node("n2"))) == Wanted()


def test_when_no_node_is_left_it_says_why() -> None:
    decision, _ = submitted(FAST, node("x1"))
    found = wanted(decision, view(node("x1", latency_us=300)))
    assert found is not None
    assert not found.feasible
    assert found.why.startswith("no node can run it any more; nearest is x1: ")


BIG = "gpus=2 gpu-memory=30GB"


def test_a_job_that_was_given_a_gpu_type_goes_on_waiting_for_that_type() -> None:
    """Today it would be given no type, since most machines have big GPUs only."""
    decision, _ = submitted(BIG, mixed("m1"))
    assert decision.fields["gres"] == "gpu:a100:2"
    other = node("h1", cards=gpus(0, 0, 1, 1, model="h100", gres_type="h100", memory_mib=81920))
    found = wanted(decision, view(mixed("m1"), node("a1"), node("a2"), other))
    assert found == Wanted(excluded=frozenset({"h1"}))


def test_a_job_without_a_type_is_never_opened_to_machines_that_mix_types() -> None:
    decision, _ = submitted(BIG, node("a1"))
    assert decision.fields["gres"] == "gpu:2"
    found = wanted(decision, view(node("a1"), mixed("m1"), mixed("m2")))
    assert found is not None
    assert not found.same
    assert found.why == "it would be planned otherwise now (gres)"


L4 = gpus(0, 1, model="l4", gres_type="l4", memory_mib=24 * GIB)
FEATURES = {"a1": {"gpu_a100"}, "l1": {"gpu_l4"}, "l2": {"gpu_l4"}}
SMALL = "gpus=1 gpu-memory=16GiB ssd-latency=100us"


def small_cards(slow: str = "", **fields: str) -> tuple[Decision, View]:
    """A job for which l1 and l2 suit better than a1, and the cluster when one became slow."""
    machines = [node("a1"), node("l1", cards=L4), node("l2", cards=L4)]
    there = view(*machines, features=FEATURES)
    decision = decider().decide(message(SMALL, **fields), there).decision
    assert decision is not None
    later = [node(m.name, cards=m.gpus, latency_us=300 if m.name in slow else 80) for m in machines]
    return decision, view(*later, features=FEATURES)


def test_what_a_job_prefers_is_no_reason_to_leave_it_as_it_is() -> None:
    decision, later = small_cards(slow="l2")
    assert decision.fields["prefer"] == "gpu_l4"
    assert wanted(decision, later) == Wanted(excluded=names("l2"))


def test_a_preference_goes_when_none_of_its_nodes_is_left() -> None:
    """24.11 and 26.05 would hold the job for ever."""
    decision, later = small_cards(slow="l1 l2")
    assert wanted(decision, later) == Wanted(excluded=names("l1", "l2"), unprefer=True)


@pytest.mark.parametrize("own", ["gpu_l4", "[gpu_l4*2&gpu_a100]"])
def test_a_users_own_preference_is_never_left_without_a_node(own: str) -> None:
    decision, later = small_cards(slow="l1 l2", prefer=own)
    assert "prefer" not in decision.fields
    found = wanted(decision, later)
    assert found is not None
    assert found.against == "Slurm would hold it, for the sake of its own --prefer"
    assert not found.unprefer


@pytest.mark.parametrize(
    "change",
    [
        {"submitted": {}},
        {"request": {"a_word_of_tomorrow": 1}},
        {"submitted": {"uid": "x"}},
        {"submitted": {"uid": "1000", "field.exc_nodes": "a[1-"}},
        {"submitted": {"uid": "1000", "field.partition": "nowhere"}},
    ],
    ids=["old record", "newer record", "no number", "no host list", "partition gone"],
)
def test_a_record_that_can_t_be_planned_again_is_left_alone(change: dict[str, object]) -> None:
    decision, _ = submitted(FAST, node("x1"))
    assert wanted(dataclasses.replace(decision, **change), view(node("x1"))) is None  # type: ignore[arg-type]


def test_options_too_long_to_keep_whole_are_not_kept_at_all() -> None:
    names = ",".join(f"other{i}" for i in range(9000))
    decision, _ = submitted(FAST, node("x1"), exc_nodes=names)
    assert decision.submitted == {}


def test_what_a_job_needs_on_each_machine_is_judged_by_its_own_options() -> None:
    """A need that the directives do not show: the user's own -c is in the record too."""
    decision, _ = submitted("gpus=1 numa=strict", node("n1"), cpus_per_task="16", num_tasks="1")
    found = wanted(decision, view(node("n1"), node("n2", cores=8)))
    assert found == Wanted(excluded=frozenset({"n2"}))


OURS = [names("y1", "z1")]


@pytest.mark.parametrize(
    ("current", "wanted", "act", "why"),
    [
        (names("y1", "z1"), Wanted(excluded=names("z1")), Act.CHANGE, "1 node more can run it"),
        (
            names("y1", "z1"),
            Wanted(excluded=names("a", "b")),
            Act.CHANGE,
            "2 nodes more can run it and 2 nodes left out now",
        ),
        (
            names("y1", "z1"),
            Wanted(excluded=names("y1", "z1")),
            Act.LEAVE,
            "nothing changes for it",
        ),
        (
            names("y1"),
            Wanted(excluded=names("z1")),
            Act.LEAVE,
            "its excluded nodes were changed by somebody else",
        ),
        (
            names("y1", "z1"),
            Wanted(excluded=names("y1", "z1", "a")),
            Act.CHANGE,
            "1 node left out now",
        ),
        (
            names("y1", "z1"),
            Wanted(excluded=names("y1", "z1", *(f"n{i}" for i in range(21)))),
            Act.CHANGE,
            "21 nodes left out now",
        ),
        (names("y1", "z1"), Wanted(against="its own"), Act.OTHERWISE, "its own"),
        (
            names("y1", "z1"),
            Wanted(excluded=names("y1", "z1"), against="its own"),
            Act.LEAVE,
            "nothing changes for it",
        ),
        (names("y1", "z1"), Wanted(feasible=False, why="none"), Act.INFEASIBLE, "none"),
        (names("y1", "z1"), Wanted(same=False, why="other"), Act.OTHERWISE, "other"),
        (names(), Wanted(feasible=False, why="none"), Act.LEAVE, None),
    ],
)
def test_only_what_crater_set_is_replaced_and_never_by_a_list_without_a_way(
    current: frozenset[str], wanted: Wanted, act: Act, why: str | None
) -> None:
    found = judge(current, OURS, wanted)
    assert found.act is act
    if why is not None:
        assert found.why == why


class Watched(dict[str, str]):
    """A filter message that notes which of its keys are read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> str:
        self.read.add(key)
        return super().__getitem__(key)


def test_the_record_keeps_every_field_that_planning_reads() -> None:
    """A new field that planning reads and the record lacks would change waiting jobs silently."""
    read: set[str] = set()
    for gpus_on, extra in ((2, {}), (0, {"field.ntasks_per_gpu": "1", "field.gres": "gpu:2"})):
        sent = Watched(message("gpus=1", cpus_per_task="4") | extra | {"het": "1"})
        job = job_from_fields(sent)
        for domains in (0, 1, 2):
            placement = Placement(
                gpus=gpus_on, cores=4, threads_per_core=2, domains=domains, domain_gpus=1
            )
            levers.changes(placement, job, sent)
        read |= sent.read
    assert {"field.tres_per_node", "field.ntasks_per_socket", "field.threads_per_core"} <= read
    assert read - set(PLANNING) == {"user", "field.comment"}
