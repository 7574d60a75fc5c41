"""crater-scheduler, its store and slurmctld in trouble: submissions go on, and nothing is lost."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import (
    Said,
    accepted,
    all_well,
    cancel,
    completed,
    crater,
    explained,
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

ASKED = "cpus=2 cache=1GB"
HEALTH = """
import urllib.request, urllib.error
try: print(urllib.request.urlopen("http://127.0.0.1:9192/healthz", timeout=10).read().decode())
except urllib.error.HTTPError as error: print(error.read().decode())
except OSError as error: print("no answer:", error)
"""


@pytest.fixture(scope="module")
def cluster(lab_factory: Any) -> Lab:
    return patient_lab(lab_factory, inventory="cpu", cache_mib=2048)


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    yield cluster
    cancel(cluster)
    all_well(cluster)


def database(lab: Lab) -> Path:
    return lab.folders.controller / "lib/crater.db"


def planned(said: Said) -> bool:
    return said.job is not None and "crater: planned 2 cores" in said.text


def untouched(lab: Lab, said: Said) -> bool:
    """Whether the job is as a user without crater would have it."""
    record = lab.job(accepted(said))
    return "crater-plan" not in record.get("Comment", "") and record["NumCPUs"] == "1"


def health(lab: Lab) -> str:
    return str(python(lab, "-c", HEALTH).stdout)


def written(connection: sqlite3.Connection, plan: str) -> bool:
    """Whether a decision is in the database, whatever the daemon has in memory."""
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall()
    table = next(name for (name,) in tables if "decision" in name)
    return any(plan in map(str, row) for row in connection.execute(f"SELECT * FROM {table}"))


def stored(lab: Lab, plan: str) -> bool:
    with contextlib.closing(sqlite3.connect(database(lab))) as connection:
        return written(connection, plan)


# The store ----------------------------------------------------------------------------------------


def test_a_locked_store_delays_the_record_not_the_job(lab: Lab) -> None:
    blocker = sqlite3.connect(database(lab), isolation_level=None)
    try:
        blocker.execute("BEGIN EXCLUSIVE")
        said = submit(lab, crater=ASKED, body="env")
        assert planned(said), said
        completed(lab, accepted(said))
        assert variables(output(lab, accepted(said)))["CRATER_PLAN_ID"] == said.plan
        assert explained(lab, said.plan)["decision"]["verdict"] == "planned"
        wait_until(lambda: "degraded" in health(lab), "the daemon tells that it can't write")
        assert not written(blocker, said.plan)
    finally:
        blocker.execute("ROLLBACK")
        blocker.close()
    wait_until(lambda: stored(lab, said.plan), "the decision is written after all")
    wait_until(lambda: '"ok"' in health(lab), "the daemon is well again")


def test_a_full_disk_delays_the_record_not_the_job(lab: Lab) -> None:
    lab.stop("scheduler")
    folder = "/var/lib/crater"
    for command in (
        f"cp -a {folder} /run/kept",
        f"mount -t tmpfs -o size=4m small {folder}",
        f"cp -a /run/kept/. {folder}/",
    ):
        lab.run(["sh", "-c", command], user="root", machine_side=True, check=True)
    try:
        lab.start("scheduler")
        planning(lab)
        fill = f"cat /dev/zero > {folder}/fill; true"
        lab.run(["sh", "-c", fill], user="root", machine_side=True)
        said = submit(lab, crater=ASKED, body="env")
        for _ in range(20):  # more than what free pages of the database could hold
            last = submit(lab, "--hold", crater=f"{ASKED} model={'m' * 100}")
            assert planned(last), last
        completed(lab, accepted(said))
        assert variables(output(lab, accepted(said)))["CRATER_PLAN_ID"] == said.plan
        wait_until(lambda: "degraded" in health(lab), "the daemon tells that it can't write")
        assert explained(lab, last.plan)["decision"]["verdict"] == "planned"
        lab.run(["rm", f"{folder}/fill"], user="root", machine_side=True, check=True)
        wait_until(lambda: '"ok"' in health(lab), "the daemon is well again")
        lab.kill("scheduler")
        lab.start("scheduler")
        planning(lab)
        assert explained(lab, last.plan)["decision"]["verdict"] == "planned"
    finally:
        lab.stop("scheduler")
        lab.run(["umount", folder], user="root", machine_side=True, check=True)
        lab.start("scheduler")
        planning(lab)


def test_new_profiles_count_within_seconds(lab: Lab) -> None:
    before = crater(lab, "nodes", "export", user="root").stdout
    (lab.home("root") / "before.yaml").write_text(before)
    asked = "cpus=2 cache=500GB"
    assert "2 of 2 nodes can run it" in submit(lab, "--hold", crater=asked).text
    tree = yaml.safe_load(before)
    tree["nodes"][0]["cache_gb"] = 100
    (lab.home("root") / "less.yaml").write_text(yaml.safe_dump(tree))

    def told(words: str) -> bool:
        return words in submit(lab, "--hold", crater=asked).text

    try:
        done = crater(lab, "nodes", "import", "less.yaml", user="root")
        assert done.returncode == 0, done.stderr
        begin = time.monotonic()
        wait_until(lambda: told("1 of 2 nodes can run it"), "the new profile counts")
        assert time.monotonic() - begin < 30
        said = submit(lab, "--hold", crater=asked)
        assert lab.job(accepted(said))["ExcNodeList"] == "c1"

        # An empty store: crater keeps its hands off, and says why.
        done = crater(lab, "nodes", "remove", "c1", "c2", user="root")
        assert done.returncode == 0, done.stderr
        wait_until(lambda: told("has a profile (crater nodes import)"), "the store is empty")
        said = submit(lab, "--hold", crater=asked)
        assert said.lines == (
            "crater: the job is left as it is: no node that its options allow has a profile "
            "(crater nodes import)",
        )
        assert untouched(lab, said)
    finally:
        done = crater(lab, "nodes", "import", "before.yaml", user="root")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: told("2 of 2 nodes can run it"), "the old profiles count again")


# The daemon ---------------------------------------------------------------------------------------


def test_a_killed_scheduler_costs_plans_while_it_is_away(lab: Lab) -> None:
    before = submit(lab, "--hold", crater=ASKED)
    assert planned(before)
    wait_until(lambda: stored(lab, before.plan), "the decision is in the store")
    lab.kill("scheduler")
    said = submit(lab, crater=ASKED, body="true")
    assert said.lines == ()
    completed(lab, accepted(said))
    assert untouched(lab, said)
    done = crater(lab, "explain", str(before.job))
    assert done.returncode == 0
    assert "Plan, per node: 2 cores" in done.stdout  # the essence travels with the job
    assert "only the plan in the job's comment is known" in done.stdout
    lab.start("scheduler")
    planning(lab)
    assert planned(submit(lab, "--hold", crater=ASKED))
    assert explained(lab, before.plan)["decision"]["verdict"] == "planned"
    # Planned jobs do not need the daemon to run.
    lab.run(["scontrol", "release", str(before.job)], check=True)
    running(lab, accepted(before))


def test_jobs_with_mistakes_pass_while_the_scheduler_is_away(lab: Lab) -> None:
    said = submit(lab, "--hold", crater="gpus=two")
    assert said.job is None
    assert "gpus='two': must be a whole number" in said.text
    lab.kill("scheduler")
    said = submit(lab, "--hold", crater="gpus=two")
    assert untouched(lab, said)
    lab.start("scheduler")
    planning(lab)


def test_without_a_key_jobs_are_placed_and_not_prepared(lab: Lab) -> None:
    key = lab.folders.crater_etc / "plan.key"
    secret = key.read_text()
    lab.stop("scheduler")
    key.unlink()
    try:
        lab.start("scheduler")
        planning(lab)
        said = submit(lab, crater=ASKED, body="env")
        assert planned(said)
        assert "crater: no plan key: the node prepares nothing for this job" in said.lines
        record = completed(lab, accepted(said))
        assert record["NumCPUs"] == "2"
        assert not variables(output(lab, accepted(said)), "CRATER_")
        assert "plan.key" in health(lab)
    finally:
        key.touch(mode=0o400)
        key.write_text(secret)
    wait_until(lambda: "no plan key" not in submit(lab, "--hold", crater=ASKED).text, "a new key")


@pytest.mark.parametrize("mode", ["advise", "observe"])
def test_modes_that_change_nothing(lab: Lab, mode: str) -> None:
    file = lab.folders.crater_etc / "crater.yaml"
    before = file.read_text()
    file.write_text(yaml.safe_dump(yaml.safe_load(before) | {"filter": {"mode": mode}}))
    lab.stop("scheduler")
    lab.start("scheduler")
    try:
        wait_until(lambda: '"ok"' in health(lab), "the scheduler is up")
        said = submit(lab, "--hold", crater=ASKED)
        assert untouched(lab, said)
        impossible = submit(lab, "--hold", crater="cpus=5000")
        assert untouched(lab, impossible)
        unreadable = submit(lab, "--hold", crater="cpus=many")
        assert untouched(lab, unreadable)
        if mode == "advise":
            assert said.lines[0].startswith("crater: would plan 2 cores; 2 of 2 nodes")
            assert explained(lab, said.plan)["decision"]["mode"] == "advise"
            assert impossible.lines[0].startswith("crater: would be refused: none of the 2 nodes")
            assert "cpus='many'" in unreadable.text
        else:
            assert (said.lines, impossible.lines, unreadable.lines) == ((), (), ())
            log = lab.log("scheduler")
            assert "would plan" in log
            assert "2 cores; 2 of 2 nodes can run it" in log
    finally:
        file.write_text(before)
        lab.stop("scheduler")
        lab.start("scheduler")
        planning(lab)


# slurmctld ----------------------------------------------------------------------------------------


def test_planned_jobs_survive_slurmctld(lab: Lab) -> None:
    blockers = [accepted(submit(lab, "-w", f"c{i}", "--exclusive")) for i in (1, 2)]
    for job in blockers:
        running(lab, job)
    said = submit(lab, crater=f"{ASKED} numa=strict", body="env")
    job = accepted(said)
    lab.run(["scontrol", "update", f"job={job}", "comment=mine"], check=True)
    kept = ("Comment", "NumCPUs", "CPUs/Task", "TresPerNode", "ReqB:S:C:T", "ExcNodeList")
    before = {name: lab.job(job).get(name) for name in kept}
    assert before["Comment"].startswith("mine crater-plan:1.")  # type: ignore[union-attr]
    lab.restart_slurmctld()
    assert {name: lab.job(job).get(name) for name in kept} == before
    lab.run(["scontrol", "reconfigure"], user="root", check=True)
    assert {name: lab.job(job).get(name) for name in kept} == before
    cancel(lab, *blockers)
    completed(lab, job)
    found = variables(output(lab, job), "CRATER_")
    assert found["CRATER_PLAN_ID"] == said.plan
    assert found["CRATER_CPU_CORES"] == "2"
    # And the filter works on in the new slurmctld.
    assert planned(submit(lab, "--hold", crater=ASKED))


def test_reconfigure_leaves_running_jobs_alone(lab: Lab) -> None:
    said = submit(lab, crater=ASKED, body="until [ -e go ]; do sleep 0.1; done; env")
    running(lab, accepted(said))
    for _ in range(3):
        lab.run(["scontrol", "reconfigure"], user="root", check=True)
        assert planned(submit(lab, "--hold", crater=ASKED))
    (lab.home() / "go").touch()
    completed(lab, accepted(said))
    assert variables(output(lab, accepted(said)))["CRATER_PLAN_ID"] == said.plan


def test_the_off_switch(lab: Lab) -> None:
    switch = lab.folders.crater_etc / "off"
    planned_before = submit(lab, crater=ASKED, body="until [ -e on ]; do sleep 0.1; done")
    running(lab, accepted(planned_before))
    switch.touch()
    try:
        said = submit(lab, crater="cpus=5000 nonsense", body="env")
        assert said.lines == ()
        assert untouched(lab, said)
        completed(lab, accepted(said))
        assert not variables(output(lab, accepted(said)), "CRATER_")
        (lab.home() / "on").touch()
        completed(lab, accepted(planned_before))  # its Epilog does nothing, and harms nothing
        all_well(lab)
    finally:
        switch.unlink()
    assert planned(submit(lab, "--hold", crater=ASKED))
