"""An explanation as a person reads it, from the records alone."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from cluster_samples import decide, decider, gpus, message, node, view
from store_samples import rich_decision

from crater_slurm.cli.explanation import lines
from crater_slurm.model.plan import Mode
from crater_slurm.model.profile import NvLink, Software
from crater_slurm.placement.sharing import Policy
from crater_slurm.store.decisions import decision_to_dict

WHOLE = """\
Plan p1: planned (enforce), WHEN
  asked    gpus=2 cpus=8 cache=200GB numa=strict
  options  kind=batch

    condition  need                               best there is                    nodes
  ✓ gpus       2                                  4                                1 of 2
  ✓ cpus       8 cores                            32 cores                         2 of 2
  ✓ numa       2 GPUs, 8 cores together (strict)  2 GPUs, 16 cores on 1 NUMA node  1 of 2
  ✓ cache      200 GB                             3,000 GB                         2 of 2

Nodes: 1 of 2 can run it: n1
  not c1: has no GPU; too few GPUs

Score of the nodes that can run it (* preferred)
    0.50  n1
      1.00 x 0.50  cpu-cores: asks 8 of the 16 cores that are its share

Plan, per node: 2 GPUs, 8 cores, on 1 NUMA node, 200 GB of NVMe cache, numa=strict
Asked of Slurm: num_tasks=1, cpus_per_task=8, min_cpus=8, gres=gpu:2,nvme:200, \
tres_per_socket=gres/gpu:2, sockets_per_node=1, min_nodes=1, max_nodes=1, exc_nodes=c1, \
flags=GRES_ENFORCE_BIND
"""


def text(decision: dict[str, Any] | None = None, **more: Any) -> str:
    return "\n".join(
        lines(decision or {}, more.get("grants", ()), more.get("job", {}), more.get("notes", ()))
    )


def explained(words: str, *profiles: Any, mode: Mode = Mode.ENFORCE, **fields: str) -> str:
    """As it comes over the API: through JSON."""
    decision = decide(words, *profiles, mode=mode, **fields).decision
    assert decision is not None
    document = json.loads(json.dumps(decision_to_dict(decision)))
    return re.sub(r"20\d\d-\S+ \S+, decided in \S+ ms", "WHEN", text(document))


def test_a_planned_job_is_told_whole() -> None:
    shown = explained("gpus=2 cpus=8 numa=strict cache=200", node("n1"), node("c1", cards=()))
    assert shown + "\n" == WHOLE


def test_a_part_of_a_gpu_is_told_as_one() -> None:
    (card,) = gpus(0, model="l4", gres_type="l4", memory_mib=23034)
    there = view(node(cards=(card,)), shards={"n1": 30}, policy=Policy())
    words = message("gpus=1 gpu-memory=2GiB gpu-sharing=yes cpus=2")
    decision = decider().decide(words, there).decision
    assert decision is not None
    shown = text(json.loads(json.dumps(decision_to_dict(decision))))
    assert (
        "Plan, per node: 3 of 31 slices of an L4 (2,160 MiB), shared, not isolated, 2 cores, "
        "numa=best_effort"
    ) in shown
    assert re.search(r"✓ gpu-slices +3 slices of one GPU +30 of 720 MiB +1 of 1", shown)
    assert "gres=shard:3" in shown
    assert "Note: the job shares its GPU with others" in shown


def test_own_shards_are_among_the_options() -> None:
    decision = decide("cpus=2", node(), tres_per_node="gres/shard:3").decision
    assert decision is not None
    shown = text(json.loads(json.dumps(decision_to_dict(decision))))
    assert "gpus=['3 shards per node']" in shown


def test_a_refusal_is_told_with_what_failed_and_the_way_out() -> None:
    shown = explained("gpus=2 cpus=20 numa=strict", node("n1"))
    assert "Plan p1: refused (enforce)" in shown
    assert re.search(r"✗ numa .* 0 of 1", shown)
    assert "Nodes: 0 of 1 can run it\n" in shown
    assert "  not n1: one NUMA node has at most 16 cores beside 2 GPUs" in shown
    assert "Nearest: n1\n" in shown
    assert "It would fit with cpus=16, or with numa=best_effort" in shown
    assert "Asked of Slurm" not in shown


def test_what_is_only_observed_would_be_asked() -> None:
    assert "Would be asked of Slurm: " in explained("gpus=2", node(), mode=Mode.OBSERVE)


def test_the_signed_plan_is_not_printed() -> None:
    assert "crater-plan" not in explained("gpus=2", node())


def test_directives_that_could_not_be_read_are_notes() -> None:
    assert "Note: line 2: unknown directive 'gpuz'" in explained("gpuz=2", node())


def test_many_nodes_of_one_reason_are_counted() -> None:
    shown = explained("gpus=2", node("n1"), *(node(f"c{i}", cards=()) for i in range(3)))
    assert "  not 3 nodes such as c0: has no GPU" in shown


@pytest.mark.parametrize(
    ("words", "plan"),
    [
        ("gpus=1 cpus=1", "Plan, per node: 1 GPU, 1 core, numa=best_effort"),
        ("ssd-iops=800k", "Plan, per node: 800000 IOPS, numa=best_effort"),
        ("memory-bandwidth=138.7", "Plan, per node: 138.7 GB/s, numa=best_effort"),
        ("avx=avx2", "Plan, per node: numa=best_effort"),
    ],
)
def test_the_plan_is_in_words_with_units(words: str, plan: str) -> None:
    assert plan in explained(words, node()).splitlines()


def test_large_amounts_are_not_rounded() -> None:
    plan = {"id": "p", "ssd_iops": 1_234_567, "memory_bandwidth_gb_s": 12345.678}
    assert "12345.678 GB/s, 1234567 IOPS" in text({"id": "p", "plan": plan})


def test_what_the_job_got_is_told_per_node_without_empty_values() -> None:
    grants = [
        {
            "job_id": 7,
            "node": "n1",
            "time": 1.0,
            "got": {
                "phase": "epilog",
                "numa_nodes": [0],
                "local": True,
                "hard": False,
                "cache": "",
                "gpus": [],
                "memory_mib": {"0": 120, "1": 3},
            },
        }
    ]
    assert text(grants=grants).splitlines() == [
        "",
        "What the job got",
        "  on n1 (epilog):",
        "    numa nodes: 0",
        "    local: yes",
        "    hard: no",
        "    memory mib: 0 120, 1 3",
    ]


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (
            {"JobId": "7", "JobName": "t", "JobState": "PENDING", "Reason": "Resources"},
            "Job 7 (t) is PENDING; Slurm's reason: Resources",
        ),
        (
            {
                "JobId": "7",
                "JobName": "t",
                "JobState": "RUNNING",
                "Reason": "None",
                "NodeList": "n1",
            },
            "Job 7 (t) is RUNNING; on n1",
        ),
        ({"JobId": "7", "NodeList": "(null)"}, "Job 7 () is ?"),
    ],
)
def test_slurm_s_own_word_stands_first(job: dict[str, str], line: str) -> None:
    assert text(job=job) == line


def test_notes_stand_last() -> None:
    assert text(notes=["one", "two"]) == "\none\ntwo"
    assert text() == ""


def test_a_record_of_another_version_is_shown_as_far_as_it_goes() -> None:
    shown = text({"id": "p", "request": {"gpus": 2, "colour": "red"}})
    assert shown == "  asked    gpus=2 colour=red"
    assert text({"id": "p", "plan": {}}) == ""
    assert text({"id": "p", "plan": {"gpus": 2}}) == "\nPlan, per node: 2 GPUs, numa=best_effort"


def test_a_decision_with_every_field_set_is_shown() -> None:
    shown = text(json.loads(json.dumps(decision_to_dict(rich_decision()))))
    assert "Plan " in shown
    assert "It would fit with gpus=1" in shown


def test_long_values_are_cut_with_their_length() -> None:
    fields = {"exc_nodes": "n" * 500}
    shown = text({"id": "p", "mode": "enforce", "fields": fields})
    assert shown == "Asked of Slurm: exc_nodes=" + "n" * 120 + "... (500 characters)"


def test_what_was_done_while_it_waited_is_told() -> None:
    act = {"job": "7", "time": 0.0, "kind": "sla", "action": "priority", "value": "nice -1000"}
    done = act | {"outcome": "done", "message": "waited 8 s of max-wait=10s (80%)"}
    failed = act | {"action": "qos", "value": "x", "outcome": "failed", "message": "no QOS x"}
    noted = act | {"kind": "reconcile", "action": "infeasible", "value": "", "outcome": "noted"}
    told = list(lines({}, (), {}, (), actions=[done, failed, noted | {"message": "no node can"}]))
    assert told[:2] == ["", "What crater did while it waited"]
    assert [line.partition("  job ")[2] for line in told[2:]] == [
        "7  sla: priority nice -1000: waited 8 s of max-wait=10s (80%)",
        "7  sla: qos x [failed]: no QOS x",
        "7  reconcile: infeasible: no node can",
    ]


def test_linked_gpus_are_told_below_the_plan() -> None:
    cards = tuple(dataclasses.replace(g, nvlinks=(NvLink(peer=1 - g.index),)) for g in gpus(0, 0))
    shown = explained("gpus=2", node("n1", cards=cards))
    assert "Plan, per node: 2 GPUs, numa=best_effort\n  n1: GPUs 0-1 are linked by NVLink" in shown


def test_new_conditions_read_like_the_others() -> None:
    software = Software(gpu_driver="535.104.05", cuda="12.2")
    old = dataclasses.replace(node("n1"), software=software)
    shown = explained("gpus=1 driver=550 cuda=12.4 tensor-cores=yes mig=1g.5gb", old)
    for row in (
        r"✗ gpus +1 +0 +0 of 1",
        r"✗ mig +1g.5gb +none +0 of 1",
        r"✗ tensor-cores +yes +no GPU +0 of 1",
        r"✗ driver +550 or newer +535.104.05 +0 of 1",
        r"✗ cuda +12.4 or newer +12.2 +0 of 1",
    ):
        assert re.search(row, shown), shown
    assert "  not n1: has no MIG instance; its GPU driver is 535.104.05; its driver's CUDA" in shown
