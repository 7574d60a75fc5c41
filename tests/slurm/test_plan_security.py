"""Users who edit, copy, forge and ask: nobody gains a plan or a word that isn't theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import (
    accepted,
    all_well,
    cancel,
    completed,
    crater,
    output,
    patient_lab,
    planning,
    python,
    running,
    submit,
    variables,
    wait_until,
)

from crater_slurm.lab import Lab
from crater_slurm.model import token
from crater_slurm.model.plan import Plan

ASKED = "gpus=1 cpus=2"
FORGED = "crater-plan:1.eyJnIjo4LCJpIjoiZm9yZ2VkIiwidSI6NjEwMDF9.AAAAAAAAAAAAAAAAAAAAAA"


@pytest.fixture(scope="module")
def cluster(lab_factory: Any) -> Lab:
    return patient_lab(lab_factory, inventory="a100-pcie")


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    yield cluster
    cancel(cluster)


@pytest.fixture
def alices(lab: Lab) -> tuple[int, str]:
    """A running job of alice's on a1, and its token."""
    job = accepted(submit(lab, "-w", "a1", crater=ASKED))
    running(lab, job)
    return job, comment(lab, job)


@pytest.fixture
def unfiltered(lab: Lab, alices: tuple[int, str]) -> Iterator[Lab]:
    """After alice's job was planned the filter lets everything pass, tokens too."""
    file = lab.folders.crater_etc / "filter.lua"
    before = file.read_text()
    file.write_text('return {off_switch = "/etc/crater/filter.lua"}\n')

    def passes() -> bool:
        job = accepted(submit(lab, "--hold", f"--comment={FORGED}"))
        return comment(lab, job) == FORGED

    wait_until(passes, "the filter has read its settings")
    yield lab
    file.write_text(before)
    planning(lab)


def comment(lab: Lab, job: int) -> str:
    return lab.job(job).get("Comment", "").strip()


def record(lab: Lab, job: int, node: str = "a1") -> dict[str, Any]:
    """What the node's daemon keeps of a job."""
    file = lab.folders.node(node) / f"lib/node/jobs/{job}.json"
    return dict(json.loads(wait_until(lambda: file.exists() and file.read_text(), str(file))))


def run_with(lab: Lab, text: str, user: str = "alice", node: str = "a1") -> tuple[int, str]:
    """A finished job with that comment and no directives; its id and output."""
    job = accepted(submit(lab, "-w", node, f"--comment={text}", body="env", user=user))
    completed(lab, job)
    return job, output(lab, job, user)


# At the filter -----------------------------------------------------------------------------------


def test_a_plan_stays_with_its_job(lab: Lab) -> None:
    job = accepted(submit(lab, "--hold", "--comment=mine", crater=ASKED))
    own = comment(lab, job).removeprefix("mine ")
    for change, now in (
        ("comment=", own),
        ("comment=other", f"other {own}"),
        (f"comment={FORGED}", own),
    ):
        done = lab.run(["scontrol", "update", f"job={job}", change])
        assert done.returncode == 0, done.stderr
        assert comment(lab, job) == now


@pytest.mark.parametrize("dead", [False, True], ids=["scheduler", "no scheduler"])
def test_tokens_can_not_be_brought_along(lab: Lab, alices: tuple[int, str], dead: bool) -> None:
    if dead:
        lab.kill("scheduler")
    for user, brought in (("bob", alices[1]), ("alice", alices[1]), ("alice", FORGED)):
        job, text = run_with(lab, f"words {brought}", user)
        assert comment(lab, job) == "words"
        assert not variables(text, "CRATER_")
    if dead:
        lab.start("scheduler")
        planning(lab)


# At the node -------------------------------------------------------------------------------------


def test_the_node_believes_no_token_but_the_jobs_own(
    unfiltered: Lab, alices: tuple[int, str]
) -> None:
    lab, (first, alices_token) = unfiltered, alices
    key = bytes.fromhex((lab.folders.crater_etc / "plan.key").read_text().split()[0])
    plan = token.SignedPlan(Plan(id="elsewhere"), 61001, "another-cluster", 1)
    for user, text, why in (
        ("bob", alices_token, "the plan token belongs to uid 61001, not to 61002"),
        ("alice", alices_token, f"the plan token is a copy of job {first}'s"),
        ("alice", FORGED, "the plan token is not signed with this cluster's plan key"),
        ("alice", alices_token[:-2], "the plan token is not signed"),
        ("alice", "crater-plan:nonsense", "the comment holds a damaged plan token"),
        ("alice", token.sign(plan, key), "is for cluster another-cluster, not for "),
        ("alice", token.sign(plan, b"x" * 32), "is not signed with this cluster's plan key"),
    ):
        job, said = run_with(lab, text, user)
        assert not variables(said, "CRATER_"), (text, said)
        kept = record(lab, job)
        assert why.rstrip() in kept["plan_problem"]
        assert (kept["plan"], kept["folders"]) == (None, {})
        assert said.count("crater: this job runs without its plan: ") == 1
        assert f"job {job}: plan ignored: " in lab.log("node@a1")
    # The job that was copied from still has what it had.
    assert record(lab, first)["plan"]["id"] == token.read_unverified(alices_token)["i"]  # type: ignore[index]


def test_a_token_taken_to_another_node_gives_no_more_than_slurm_gave(
    unfiltered: Lab, alices: tuple[int, str]
) -> None:
    """There the copy can't be recognised; it is the user's own plan, and it prepares one folder."""
    job, said = run_with(unfiltered, alices[1], node="a2")
    found = variables(said, "CRATER_")
    plan = token.read_unverified(alices[1])
    assert plan is not None
    assert found.get("CRATER_PLAN_ID", plan["i"]) == plan["i"]
    assert "CRATER_GPU_IDS_HOST" not in found  # Slurm gave none
    assert found.get("CRATER_CPU_CORES", "1") == "1"
    assert found.get("CRATER_CACHE_PATH", f"/{job}").endswith(f"/{job}")


# Asking ------------------------------------------------------------------------------------------


def test_plans_are_told_to_their_owner_and_admins(lab: Lab, alices: tuple[int, str]) -> None:
    job = alices[0]
    plan = token.read_unverified(alices[1])["i"]  # type: ignore[index]
    for user in ("alice", "root"):
        assert crater(lab, "explain", plan, user=user).returncode == 0
    refused = crater(lab, "explain", plan, user="bob")
    assert refused.returncode != 0
    assert refused.stdout == ""
    assert "another user" in refused.stderr, refused.stderr
    said = crater(lab, "explain", str(job), "--json", user="bob")
    told = json.loads(said.stdout)
    assert "conditions" not in told["decision"]  # no more than scontrol shows everyone
    assert told["grants"] == []
    assert "another user" in " ".join(told["notes"])


ASK = """
import socket, sys
from crater_slurm.hooks import frame
path, *words = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as s:
    s.settimeout(5)
    s.connect(path)
    try:
        s.sendall(frame.encode([tuple(w.split("=", 1)) for w in words]))
        print(frame.receive(s))
    except Exception as error:
        print("nothing:", type(error).__name__)
"""


def test_only_slurmctld_and_root_ask_the_scheduler(lab: Lab) -> None:
    words = ["op=submit", "uid=61001", "kind=batch", "script=#!/bin/sh\n#CRATER gpus=1\n"]
    done = python(lab, "-c", ASK, "/run/crater/filter.sock", *words, user="bob")
    assert done.stdout.startswith("nothing:"), done
    assert "uid 61002 may not ask the filter" in lab.log("scheduler")
    done = python(lab, "-c", ASK, "/run/crater/filter.sock", *words, user="root")
    assert "('verdict', 'accept')" in done.stdout, done


def test_the_node_tells_nobody_about_anothers_job(lab: Lab, alices: tuple[int, str]) -> None:
    job, kept = alices[0], ("phase", "uid", "plan", "token", "folders", "restarts", "ended")
    before = {name: record(lab, job)[name] for name in kept}
    for operation in ("task_prolog", "prolog", "epilog"):
        words = [f"op={operation}", f"env.SLURM_JOB_ID={job}", "env.SLURM_JOB_UID=61001"]
        done = python(lab, "-c", ASK, "/run/crater/node.sock", *words, user="bob", node="a1")
        assert "('status', 'error')" in done.stdout, done
        assert "CRATER_" not in done.stdout
    assert {name: record(lab, job)[name] for name in kept} == before
    done = lab.node_run("a1", ["cat", "/etc/crater/plan.key"], user="bob")
    assert done.returncode != 0


CALL = """
import hashlib, subprocess, sys, urllib.request, urllib.error
method, url, body, prove = sys.argv[1:]
request = urllib.request.Request(url, data=body.encode() if body else None, method=method)
request.add_header("Content-Type", "application/json")
if prove:
    text = hashlib.sha256((body if prove == "yes" else prove).encode()).hexdigest()
    done = subprocess.run(["munge", "-s", text], capture_output=True, text=True, check=True)
    request.add_header("Authorization", "MUNGE " + done.stdout.strip())
try:
    print(urllib.request.urlopen(request, timeout=10).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


def test_reports_come_from_nodes_only(lab: Lab, alices: tuple[int, str]) -> None:
    url = "http://127.0.0.1:9192"
    plan = token.read_unverified(alices[1])["i"]  # type: ignore[index]
    facts = {"job_id": str(alices[0]), "plan_id": plan, "node": "a1", "time": 1.0}
    body = json.dumps(facts | {"phase": "epilog", "grant": {"local": "lie"}})
    for user, words, status in (
        ("bob", ("POST", f"{url}/node/v1/grants", body, "yes"), 403),
        ("alice", ("POST", f"{url}/node/v1/grants", body, "yes"), 403),
        ("root", ("POST", f"{url}/node/v1/grants", body, ""), 401),
        ("root", ("POST", f"{url}/node/v1/grants", body, "another body"), 401),
        ("bob", ("GET", f"{url}/api/v1/decisions/{plan}", "", ""), 401),
        ("bob", ("GET", f"{url}/api/v1/decisions/{plan}", "", "yes"), 403),
        ("bob", ("GET", f"{url}/healthz", "", ""), 200),
    ):
        done = python(lab, "-c", CALL, *words, user=user)
        assert done.stdout.strip() == str(status), (user, words, done)
    assert "lie" not in crater(lab, "explain", plan).stdout


def test_the_nodes_are_well(lab: Lab) -> None:
    all_well(lab)
