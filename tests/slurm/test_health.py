"""Node health beside a real slurmctld: weights that come back, drains that are only crater's own,
and jobs that keep off degraded nodes.

Nodes report as crater-probe would, by MUNGE from the node, with GPUs as hot as the test wants them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import LabFactory
from helpers import (
    accepted,
    cancel,
    crater,
    explained,
    patient_lab,
    python,
    running,
    submit,
    wait_until,
)

from crater_slurm.lab import Lab

URL = "http://127.0.0.1:9192"
NODES = ("a1", "a2")
CONF = {
    "scheduler": {"refresh_seconds": 1, "queue_seconds": 0.3},
    "health": {
        "reports": 1,
        "publish_seconds": 1,
        "stale_seconds": 600,
        "drain": ["gpu_lost"],
        "drain_share": 0.5,
    },
}
OWN = 1 + 8  # by the GPUs
HOT = OWN + 10_000  # a score of 0 is the worst tier


@pytest.fixture(scope="module")
def cluster(lab_factory: LabFactory) -> Lab:
    return patient_lab(lab_factory, inventory="a100-pcie", daemons=("scheduler",), crater_conf=CONF)


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    """Two nodes in service, healthy, with their own weights."""
    for name in NODES:
        report(cluster, name)
    wait_until(lambda: weights(cluster) == {"a1": OWN, "a2": OWN}, "the weights are the nodes' own")
    yield cluster
    cancel(cluster)
    for name in NODES:
        if "DRAIN" in cluster.node(name)["State"]:
            update(cluster, name, "state=undrain")


def report(lab: Lab, node: str, celsius: float = 40, gpus: int = 8) -> None:
    """Report so many GPUs, the last as hot as said."""
    states = [{"index": i, "temperature_c": 40} for i in range(gpus)]
    states[-1]["temperature_c"] = celsius
    code = (
        "import hashlib, json, sys, time; from crater_slurm.slurm import munge, spool\n"
        "health = {'time': time.time(), 'gpus': json.loads(sys.argv[2])}\n"
        "body = json.dumps({'node': sys.argv[1], 'health': health}).encode()\n"
        f"print(spool.post('{URL}/node/v1/reports', body, "
        "munge.encode(hashlib.sha256(body).hexdigest())))"
    )
    done = python(lab, "-c", code, node, json.dumps(states), user="root", node=node)
    assert done.stdout.strip() == "204", done.stdout + done.stderr


def told(lab: Lab, node: str) -> dict[str, Any]:
    """``crater nodes health --json`` of one node."""
    found = json.loads(crater(lab, "nodes", "health", "--json", user="root").stdout)["nodes"]
    return next(entry for entry in found if entry["node"] == node)


def slurm(lab: Lab, *words: str) -> str:
    return str(lab.run(list(words), user="root", check=True).stdout)


def update(lab: Lab, node: str, *changes: str) -> None:
    slurm(lab, "scontrol", "update", f"nodename={node}", *changes)


def weights(lab: Lab) -> dict[str, int]:
    lines = slurm(lab, "sinfo", "--noheader", "--Node", "--format", "%N %w").split("\n")
    return {name: int(weight) for name, weight in (line.split() for line in lines if line)}


def weight_becomes(lab: Lab, node: str, weight: int) -> None:
    wait_until(lambda: weights(lab)[node] == weight, f"the weight of {node} is {weight}")


def reason(lab: Lab, node: str) -> str:
    return lab.node(node).get("Reason", "")


def drained(lab: Lab, node: str) -> bool:
    return "DRAIN" in lab.node(node)["State"]


def looks(lab: Lab, times: int = 2) -> None:
    """Wait until the scheduler compared Slurm with health so often again: it has done all it would."""

    def rounds() -> float:
        found = re.search(r"^crater_health_rounds_total (\S+)", api(lab, "/metrics"), re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    before = rounds()
    wait_until(lambda: rounds() >= before + times, f"{times} more rounds")


def api(lab: Lab, path: str) -> str:
    code = f"import urllib.request as r; print(r.urlopen('{URL}{path}').read().decode())"
    return str(python(lab, "-c", code, user="root").stdout)


def test_one_line_of_sinfo_stands_for_nodes_of_one_weight(lab: Lab) -> None:
    def lines() -> list[list[str]]:
        text = slurm(lab, "sinfo", "-a", "-e", "-h", "-o", "%R|%T|%f|%G|%w|%z|%m|%N|%E")
        return [line.split("|") for line in text.splitlines()]

    assert [line[4::3] for line in lines()] == [[str(OWN), "a[1-2]"]]
    report(lab, "a1", celsius=95)
    weight_becomes(lab, "a1", HOT)
    assert sorted(line[4::3] for line in lines()) == [[str(HOT), "a1"], [str(OWN), "a2"]]


def test_an_ill_node_is_taken_last(lab: Lab) -> None:
    report(lab, "a1", celsius=95)
    weight_becomes(lab, "a1", HOT)
    assert weights(lab)["a2"] == OWN
    # Without a directive: it is Slurm itself that prefers the other node.
    assert running(lab, accepted(submit(lab)))["NodeList"] == "a2"
    # What crater tells is what it saw of Slurm last, which was before it changed it.
    a1 = wait_until(lambda: (e := told(lab, "a1"))["weight"] == HOT and e, "crater sees the weight")
    assert (a1["score"], a1["degraded"], a1["own_weight"]) == (0, True, OWN)
    table = crater(lab, "nodes", "health", user="root").stdout.splitlines()
    assert "gpu_temperature: GPU 7 at 95 °C" in next(x for x in table if x.startswith("a1"))
    metrics = api(lab, "/metrics")
    assert 'crater_node_health{node="a1"} 0.0' in metrics
    assert f'crater_node_weight{{node="a1"}} {HOT}.0' in metrics


def test_weights_survive_reconfigure_and_restarts(lab: Lab) -> None:
    report(lab, "a1", celsius=95)
    weight_becomes(lab, "a1", HOT)
    slurm(lab, "scontrol", "reconfigure")
    weight_becomes(lab, "a1", HOT)
    lab.restart_slurmctld()
    weight_becomes(lab, "a1", HOT)
    # A restart of ours takes nothing of ours for the node's own, and gives nothing up at once.
    lab.stop("scheduler")
    lab.start("scheduler")
    wait_until(lambda: 'crater_node_weight{node="a1"}' in api(lab, "/metrics"), "it is up again")
    looks(lab)
    assert weights(lab)["a1"] == HOT
    report(lab, "a1", celsius=95)
    looks(lab)
    assert weights(lab)["a1"] == HOT
    report(lab, "a1")
    weight_becomes(lab, "a1", OWN)


def test_an_admins_weight_becomes_the_nodes_own(lab: Lab) -> None:
    report(lab, "a1", celsius=95)
    weight_becomes(lab, "a1", HOT)
    update(lab, "a1", "weight=7")
    weight_becomes(lab, "a1", 10_007)
    report(lab, "a1")
    weight_becomes(lab, "a1", 7)
    slurm(lab, "scontrol", "reconfigure")
    weight_becomes(lab, "a1", OWN)


def test_a_lost_gpu_drains_and_its_return_undrains(lab: Lab) -> None:
    report(lab, "a1", gpus=7)
    wait_until(lambda: drained(lab, "a1"), "a1 is drained")
    assert reason(lab, "a1").startswith("crater: gpu_lost: 7 of 8 GPUs answer; silent: 7")
    report(lab, "a1")
    wait_until(lambda: not drained(lab, "a1"), "a1 is back")


def test_a_partition_is_never_drained_beyond_its_share(lab: Lab) -> None:
    report(lab, "a1", gpus=7)
    wait_until(lambda: drained(lab, "a1"), "a1 is drained")
    report(lab, "a2", gpus=7)
    wait_until(lambda: "a2 is not drained" in lab.log("scheduler"), "it says why not")
    looks(lab)
    assert not drained(lab, "a2")


def test_what_people_drained_stays_drained(lab: Lab) -> None:
    update(lab, "a1", "state=drain", "reason=a fan is changed")
    report(lab, "a1", gpus=7)
    looks(lab)
    assert reason(lab, "a1").startswith("a fan is changed")
    report(lab, "a1")
    looks(lab)
    assert drained(lab, "a1")
    assert reason(lab, "a1").startswith("a fan is changed")


def test_a_drain_that_people_made_their_own_is_theirs(lab: Lab) -> None:
    report(lab, "a1", gpus=7)
    wait_until(lambda: drained(lab, "a1"), "a1 is drained")
    update(lab, "a1", "state=drain", "reason=sent back to the vendor")
    report(lab, "a1")
    looks(lab)
    assert drained(lab, "a1")


def test_a_planned_job_keeps_off_a_degraded_node(lab: Lab) -> None:
    report(lab, "a1", celsius=95)
    weight_becomes(lab, "a1", HOT)
    said = submit(lab, crater="gpus=2")
    assert "a1 is degraded and left out (a1: GPU 7 at 95 °C)" in said.text
    record = running(lab, accepted(said))
    assert (record["NodeList"], record["ExcNodeList"]) == ("a2", "a1")
    told = explained(lab, said.job)["decision"]["health"]
    assert (told["left_out"], told["degraded_nodes"]) == ("a1", 1)
    text = crater(lab, "explain", str(said.job)).stdout
    assert "degraded a1: score 0.00 (gpu_temperature: GPU 7 at 95 °C)" in text
    # Not at the price of a job that could never run, nor against the user's own word.
    both = submit(lab, "--nodes=2", crater="gpus=2")
    assert "a1 is degraded and may still be chosen" in both.text
    assert running(lab, accepted(both))["NodeList"] == "a[1-2]"
    named = submit(lab, "--nodelist=a1", crater="gpus=1")
    assert running(lab, accepted(named))["NodeList"] == "a1"


def test_a_waiting_job_follows_the_nodes_health(lab: Lab) -> None:
    job = accepted(submit(lab, "--hold", crater="gpus=2"))

    def left_out(node: str) -> bool:
        return lab.job(job)["ExcNodeList"].replace("(null)", "") == node

    assert left_out("")
    report(lab, "a1", celsius=95)
    wait_until(lambda: left_out("a1"), "it keeps off a1")
    report(lab, "a1")
    report(lab, "a2", celsius=95)
    wait_until(lambda: left_out("a2"), "it keeps off a2 instead")
    report(lab, "a1", celsius=95)
    wait_until(lambda: left_out(""), "too few others are left")
    acts = explained(lab, job)["actions"]
    assert {(act["kind"], act["outcome"]) for act in acts} == {("reconcile", "done")}
    assert acts[0]["message"] == "1 node left out now"
    lab.run(["scontrol", "release", str(job)], user="root", check=True)
    assert running(lab, job)["NodeList"] in NODES


def test_when_all_are_degraded_jobs_still_run(lab: Lab) -> None:
    for name in NODES:
        report(lab, name, celsius=95)
    wait_until(lambda: set(weights(lab).values()) == {HOT}, "both are taken last")
    said = submit(lab, crater="gpus=2")
    record: dict[str, Any] = running(lab, accepted(said))
    assert record["ExcNodeList"] in ("", "(null)")
