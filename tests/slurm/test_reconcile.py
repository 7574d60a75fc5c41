"""Waiting jobs follow the cluster: promises of max-wait, and nodes that were repaired or degraded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helpers import (
    accepted,
    cancel,
    crater,
    explained,
    inventory,
    patient_lab,
    profile,
    running,
    submit,
    wait_until,
    waits,
)

from crater_slurm.lab import Lab
from crater_slurm.slurm import hostlist

FAST_US, SLOW_US = 80.0, 165.0
#: Only x1 has an SSD that is fast enough.
NEEDS_FAST = "gpus=1 ssd-latency=100us"
CONF = {
    "scheduler": {"queue_seconds": 0.3, "refresh_seconds": 1},
    "health": {"stale_seconds": 1},  # no node reports any, and nobody waits for it
    "sla": {"enabled": True, "least_wait_seconds": 1, "jobs_per_user": 2},
}


def machine(latency_us: float) -> dict[str, Any]:
    found = profile("a100-pcie-40gb")
    found["nvmes"][0]["read_latency_us"] = latency_us
    return found


@pytest.fixture(scope="module")
def cluster(lab_factory: Any, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    nodes = [("x1", machine(FAST_US)), ("y1", machine(SLOW_US)), ("z1", machine(SLOW_US))]
    file = inventory(tmp_path_factory.mktemp("inventory"), *nodes)
    return patient_lab(lab_factory, inventory=file, daemons=("scheduler",), crater_conf=CONF)


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    """The cluster without jobs, and with the profiles and settings that it began with."""
    wait_until(lambda: "planned" in (told := passed(cluster)) and "1 of 3 nodes" in told, "a start")
    yield cluster
    cancel(cluster)
    set_latency(cluster, "y1", SLOW_US)


def set_latency(lab: Lab, node: str, latency_us: float) -> None:
    """Import another profile of a node, as after a repair."""
    file = lab.home("root") / f"{node}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"name": node, **machine(latency_us)}))
    done = crater(lab, "nodes", "import", file.name, user="root")
    assert done.returncode == 0, done.stderr


def excluded(lab: Lab, job: int) -> set[str]:
    text = lab.job(job)["ExcNodeList"].replace("(null)", "")
    return set(hostlist.expand(text))


def setting(lab: Lab, section: str, **values: Any) -> None:
    """Change settings of the lab and restart crater-scheduler."""
    file = lab.folders.crater_etc / "crater.yaml"
    tree = yaml.safe_load(file.read_text())
    tree.setdefault(section, {}).update(values)
    file.write_text(yaml.safe_dump(tree))
    lab.stop("scheduler")
    lab.start("scheduler")


def passed(lab: Lab) -> str:
    """Nodes that a job that needs a fast SSD would get now."""
    said = submit(lab, "--test-only", crater=NEEDS_FAST)
    return said.text


def test_a_waiting_job_moves_on_when_another_node_is_repaired(lab: Lab) -> None:
    running(lab, accepted(submit(lab, "--exclusive", "-w", "x1")))
    job = accepted(submit(lab, "-x", "z1", crater=NEEDS_FAST))
    waits(lab, job)
    edited = accepted(submit(lab, "--hold", crater=NEEDS_FAST))
    lab.run(["scontrol", "update", f"JobId={edited}", "ExcNodeList=x1"], user="root", check=True)
    assert excluded(lab, job) == {"y1", "z1"}

    set_latency(lab, "y1", FAST_US)

    assert running(lab, job)["NodeList"] == "y1"
    assert excluded(lab, job) == {"z1"}, "the user's own -x stays"
    (act,) = explained(lab, job)["actions"]
    assert (act["kind"], act["action"], act["outcome"]) == ("reconcile", "exclude", "done")
    assert (act["value"], act["message"]) == ("z1", "1 node more can run it")
    told = crater(lab, "explain", str(job)).stdout
    assert "What crater did while it waited" in told
    assert "reconcile: exclude z1: 1 node more can run it" in told
    assert excluded(lab, edited) == {"x1"}, "what somebody else set is left alone"


def test_an_array_is_changed_as_one(lab: Lab) -> None:
    running(lab, accepted(submit(lab, "--exclusive", "-w", "x1")))
    array = accepted(submit(lab, "--array=1-4%1", "--hold", crater=NEEDS_FAST))
    assert excluded(lab, array) == {"y1", "z1"}
    set_latency(lab, "y1", FAST_US)
    wait_until(lambda: excluded(lab, array) == {"z1"}, "the array may use y1")
    (act,) = explained(lab, array)["actions"]
    assert (act["job"], act["outcome"]) == (f"{array}_[1-4]", "done")
    told = lab.run(["squeue", "--noheader", "--array", "--format", "%A %x"], user="root").stdout
    assert told.count(f"{array} z1") == 4, "it is still one record"


def test_observing_changes_no_job_and_enforcing_again_catches_up(lab: Lab) -> None:
    job = accepted(submit(lab, "--hold", crater=NEEDS_FAST))
    assert excluded(lab, job) == {"y1", "z1"}
    try:
        setting(lab, "filter", mode="observe")
        set_latency(lab, "y1", FAST_US)
        setting(lab, "filter", mode="advise")  # a new start looks at all jobs, if it may
        wait_until(lambda: "2 of 3 nodes" in passed(lab), "the new profile counts")
        assert excluded(lab, job) == {"y1", "z1"}
    finally:
        setting(lab, "filter", mode="enforce")
    wait_until(lambda: excluded(lab, job) == {"z1"}, "the job may use y1")


def test_a_job_that_became_impossible_stays_and_its_record_says_why(lab: Lab) -> None:
    job = accepted(submit(lab, "--hold", crater=NEEDS_FAST))
    set_latency(lab, "x1", SLOW_US)
    try:
        acts = wait_until(lambda: explained(lab, job)["actions"], "the record says so")
    finally:
        set_latency(lab, "x1", FAST_US)
    assert (acts[0]["action"], acts[0]["outcome"]) == ("infeasible", "noted")
    assert acts[0]["message"].startswith("no node can run it any more; nearest is ")
    assert lab.job(job)["JobState"] == "PENDING"
    assert excluded(lab, job) == {"y1", "z1"}


def nices(lab: Lab) -> dict[str, int]:
    told = lab.run(
        ["squeue", "-h", "-r", "-t", "PD", "-O", "JobArrayID:30,Nice:20"], user="root"
    ).stdout
    return {line.split()[0]: int(line.split()[1]) for line in told.splitlines()}


def test_a_promise_about_to_break_raises_the_job_within_the_limits(lab: Lab) -> None:
    for node in ("x1", "y1", "z1"):
        running(lab, accepted(submit(lab, "--exclusive", "-w", node)))
    first = accepted(submit(lab, "--nice=5", crater="gpus=1 max-wait=1s"))
    array = accepted(submit(lab, "--array=1-3", crater="gpus=1 max-wait=2s"))
    patient = accepted(submit(lab, crater="gpus=1 max-wait=1d"))
    before = int(lab.job(first)["Priority"])
    wait_until(lambda: nices(lab).get(f"{array}_1") == -1000, "the second place is used")
    assert nices(lab) == {
        str(first): -995,
        f"{array}_1": -1000,
        f"{array}_2": 0,
        f"{array}_3": 0,
        str(patient): 0,
    }, "two jobs of a user at a time, each once"
    assert int(lab.job(first)["Priority"]) > before
    (act,) = explained(lab, first)["actions"]
    assert (act["kind"], act["action"], act["outcome"]) == ("sla", "priority", "done")
    assert act["value"] == "nice -995"
    assert act["user_id"] == 61001

    lab.stop("scheduler")
    lab.start("scheduler")  # which remembers what it did
    wait_until(lambda: "crater: planned" in passed(lab), "it plans again")
    other = accepted(submit(lab, user="bob", crater="gpus=1 max-wait=1s"))
    wait_until(lambda: nices(lab)[str(other)] == -1000, "bob has places of his own")
    assert nices(lab)[str(first)] == -995
    cancel(lab, f"{array}_1")
    wait_until(lambda: nices(lab)[f"{array}_2"] == -1000, "a place that is free again is used")


def test_eta_says_what_slurm_expects_and_what_becomes_of_the_promise(lab: Lab) -> None:
    for node in ("x1", "y1", "z1"):
        running(lab, accepted(submit(lab, "--exclusive", "--time=30", "-w", node)))
    job = accepted(submit(lab, "--time=5", crater="gpus=1 max-wait=1h"))

    def asked(*words: str) -> dict[str, Any]:
        done = crater(lab, "eta", *words, "--json")
        assert done.returncode == 0, done.stderr
        (entry,) = json.loads(done.stdout)["jobs"]
        return dict(entry)

    found = wait_until(lambda: (e := asked(str(job)))["kept"] is not None and e, "an estimate")
    assert 25 * 60 < found["wait_seconds"] <= 30 * 60
    assert (found["max_wait_seconds"], found["kept"], found["why_unknown"]) == (3600, True, "")
    told = crater(lab, "eta", str(job)).stdout
    assert "max-wait=1 h would be kept, " in told

    text = "#!/bin/bash\n#SBATCH --time=5 --exclusive\n#CRATER gpus=1 max-wait=10m\nsleep 1\n"
    (lab.home("alice") / "job.sh").write_text(text)
    found = asked("job.sh")
    assert 25 * 60 < found["wait_seconds"] <= 36 * 60
    assert (found["max_wait_seconds"], found["kept"]) == (600, False)

    held = accepted(submit(lab, "--hold", crater="gpus=1"))
    assert asked(str(held))["why_unknown"].startswith("its user holds it")
    done = crater(lab, "eta", "999999")
    assert done.returncode == 4
    assert "crater: ERROR:" in done.stderr
