"""Prolog, TaskProlog and Epilog on a real slurmd: whatever breaks, the node stays in service."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import (
    accepted,
    cancel,
    completed,
    output,
    patient_lab,
    running,
    submit,
    variables,
    wait_until,
)

from crater_slurm.hooks import frame
from crater_slurm.lab import Lab

NODE = "c1"
SHOW = "env; ls -d $CRATER_CACHE_PATH"
RELEASE = "until [ -e go.$SLURM_JOB_ID ]; do sleep 0.1; done"


@pytest.fixture(scope="module")
def cluster(lab_factory: Any) -> Lab:
    # Hooks give up sooner here: some of these tests wait for just that.
    return patient_lab(lab_factory, hook_seconds=6, inventory="cpu")


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    """Daemon and cache of c1 are well before, and afterwards c1 must be in service."""
    yield cluster
    if cluster.supervisor.pid(f"node@{NODE}") is not None:
        cluster.signal(("node", NODE), signal.SIGCONT)
    cancel(cluster)
    in_service(cluster)
    revive(cluster)


def in_service(lab: Lab) -> None:
    """c1 is idle, by itself and without a reason against it."""
    wait_until(lambda: lab.node(NODE)["State"] == "IDLE", f"{NODE} is idle: {lab.node(NODE)}")
    assert "Reason" not in lab.node(NODE)
    assert "Prolog error" not in lab.log("slurmctld")


def revive(lab: Lab) -> None:
    """Start the daemon of c1 where it is dead, and wait until it answers."""
    if lab.supervisor.pid(f"node@{NODE}") is None:
        lab.start(("node", NODE))
    path = lab.folders.node(NODE) / "run/node.sock"

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(path))
            connection.sendall(frame.encode([("op", "ping")]))
            return ("status", "ok") in frame.receive(connection)
        return False

    wait_until(answers, "the node's daemon answers")


def start(lab: Lab, body: str = SHOW, user: str = "alice", **how: Any) -> int:
    return accepted(submit(lab, "-w", NODE, crater="cpus=2 cache=1GB", body=body, user=user, **how))


def held(lab: Lab, more: str = "true") -> int:
    """A job that waits for a file before it goes on with ``more``; it has told its environment."""
    job = start(lab, f"{SHOW}\n{RELEASE}\n{more}")
    running(lab, job)
    wait_until(lambda: f"/temp/{lab.spec.name}/{job}\n" in output(lab, job), "the job has started")
    return job


def release(lab: Lab, job: int) -> None:
    (lab.home() / f"go.{job}").touch()
    completed(lab, job)


def told(lab: Lab, job: int) -> dict[str, str]:
    return variables(output(lab, job), "CRATER_")


def folders(lab: Lab, job: int) -> list[str]:
    """What there is of a job in the node's cache, in the trash too."""
    find = ["find", "/crater-cache", "-name", str(job), "-o", "-name", f"*.{job}.*"]
    return sorted(lab.node_run(NODE, find).stdout.split())


def gone(lab: Lab, job: int) -> None:
    wait_until(lambda: not folders(lab, job), f"the folders of job {job} are gone")


def hook(lab: Lab, name: str, job: int, **variables_: str) -> int:
    """Run a hook by hand as slurmd would; its exit code."""
    words = {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_UID": "61001",
        "SLURM_JOB_GID": "61001",
        "SLURM_JOB_USER": "alice",
        "SLURM_CLUSTER_NAME": lab.spec.name,
        "SLURMD_NODENAME": NODE,
        "SLURM_JOB_RESTART_COUNT": "0",
        **variables_,
    }
    pairs = [f"{key}={value}" for key, value in words.items()]
    command = ["env", "-i", *pairs, f"/usr/lib/crater/prolog/{name}.sh", "timeout=20"]
    return int(lab.node_run(NODE, command).returncode)


# The daemon ---------------------------------------------------------------------------------------


def test_a_dead_daemon_costs_only_what_it_would_have_given(lab: Lab) -> None:
    lab.kill(("node", NODE))
    job = start(lab)
    completed(lab, job)
    assert told(lab, job) == {}
    in_service(lab)
    revive(lab)
    job = start(lab)
    completed(lab, job)
    assert told(lab, job)["CRATER_CPU_CORES"] == "2"
    gone(lab, job)


def test_a_stopped_daemon_costs_the_hooks_deadline(lab: Lab) -> None:
    lab.signal(("node", NODE), signal.SIGSTOP)
    job = start(lab)
    completed(lab, job)
    assert told(lab, job) == {}
    in_service(lab)
    lab.signal(("node", NODE), signal.SIGCONT)
    job = start(lab)
    completed(lab, job)
    assert told(lab, job)["CRATER_CPU_CORES"] == "2"


def test_a_daemon_that_is_replaced_during_a_job_remembers_it(lab: Lab) -> None:
    job = held(lab, "echo kept > $CRATER_CACHE_PATH/file; cat $CRATER_CACHE_PATH/file")
    lab.kill(("node", NODE))
    revive(lab)
    release(lab, job)
    assert output(lab, job).endswith("kept\n")
    gone(lab, job)


def test_a_daemon_that_dies_during_a_job_leaves_the_job_alone(lab: Lab) -> None:
    job = held(lab, "echo kept > $CRATER_CACHE_PATH/file; cat $CRATER_CACHE_PATH/file")
    lab.kill(("node", NODE))
    release(lab, job)
    assert output(lab, job).endswith("kept\n")
    in_service(lab)
    # The daemon learns of the end that it missed.
    revive(lab)
    gone(lab, job)
    record = lab.folders.node(NODE) / f"lib/node/jobs/{job}.json"
    assert json.loads(record.read_text())["phase"] == "ended"


def test_a_job_cancelled_in_its_prolog_leaves_nothing(lab: Lab) -> None:
    lab.signal(("node", NODE), signal.SIGSTOP)
    job = start(lab)
    running(lab, job)  # as Slurm calls it while its Prolog runs
    lab.run(["scancel", str(job)], check=True)
    lab.signal(("node", NODE), signal.SIGCONT)
    lab.wait_job(job, ["CANCELLED"], timeout=90)
    in_service(lab)
    gone(lab, job)
    assert told(lab, job) == {}


# The cache ----------------------------------------------------------------------------------------


def test_without_its_mount_there_is_no_cache_but_a_job(lab: Lab) -> None:
    # Moved, not unmounted: another release's root has a mount of its own of the same cache.
    for command in (
        ["mkdir", "-p", "/run/aside"],
        ["mount", "--move", "/crater-cache", "/run/aside"],
    ):
        lab.node_run(NODE, command, machine_side=True, check=True)
    try:
        job = start(lab, "env")
        completed(lab, job)
    finally:
        back = ["mount", "--move", "/run/aside", "/crater-cache"]
        lab.node_run(NODE, back, machine_side=True, check=True)
    said = output(lab, job)
    assert said.count("crater: no local cache for this job: nothing is mounted at") == 1
    found = told(lab, job)
    assert "CRATER_CACHE_PATH" not in found
    assert "CRATER_CHECKPOINT_PATH" not in found
    assert found["CRATER_CPU_CORES"] == "2"
    in_service(lab)


def test_a_full_cache_is_said(lab: Lab) -> None:
    lab.node_run(NODE, ["sh", "-c", "cat /dev/zero > /crater-cache/fill"])
    try:
        job = start(lab, "env")
        completed(lab, job)
    finally:
        lab.node_run(NODE, ["rm", "/crater-cache/fill"], check=True)
    said = output(lab, job)
    assert "crater: no local cache for this job: the cache is full, 0.0 % are free\n" in said
    assert "CRATER_CACHE_PATH" not in told(lab, job)
    job = start(lab)
    completed(lab, job)
    assert "CRATER_CACHE_PATH" in told(lab, job)


def test_what_a_job_leaves_is_removed_and_nothing_else(lab: Lab) -> None:
    plant = """
mkdir -p $HOME/precious $CRATER_CACHE_PATH/deep/er && echo gold > $HOME/precious/file
cd $CRATER_CACHE_PATH
ln -s $HOME/precious link; ln -s / root; ln -s ../../.. up; ln -s link loop
ln $HOME/precious/file hard; mkfifo pipe
printf x > "$(printf 'a\\nb')"; printf x > "$(printf 'x\\r\\n; rm -rf $HOME')"; printf x > -rf
mkdir closed; touch closed/file; chmod 0 closed
rm -rf $CRATER_DATASET_PATH && echo REPLACED
ln -s $HOME/precious $CRATER_CHECKPOINT_PATH/.. 2>/dev/null && echo ESCAPED
ls | wc -l
"""
    job = held(lab, plant)
    other = held(lab)
    release(lab, job)
    gone(lab, job)
    said = output(lab, job)
    assert "REPLACED" not in said
    assert "ESCAPED" not in said
    precious = lab.home() / "precious"
    assert [p.name for p in precious.iterdir()] == ["file"]
    assert (precious / "file").read_text() == "gold\n"
    assert len(folders(lab, other)) == 3
    release(lab, other)
    gone(lab, other)


# Twice, alone, in the wrong order -----------------------------------------------------------------


def test_hooks_are_safe_twice(lab: Lab) -> None:
    job = held(lab, "cat $CRATER_CACHE_PATH/file; ls -d $CRATER_CHECKPOINT_PATH")
    file = f"/crater-cache/temp/{lab.spec.name}/{job}/file"
    lab.node_run(NODE, ["sh", "-c", f"echo kept > {file}"], check=True)
    comment = lab.job(job)["Comment"].strip()
    before = folders(lab, job)
    for _ in range(2):
        assert hook(lab, "prolog", job, SLURM_JOB_COMMENT=comment) == 0
    assert folders(lab, job) == before
    release(lab, job)
    assert "kept\n" in output(lab, job)
    for _ in range(2):
        assert hook(lab, "epilog", job) == 0
    gone(lab, job)


def test_hooks_are_safe_alone(lab: Lab) -> None:
    job = held(lab)
    before = folders(lab, job)
    assert hook(lab, "epilog", 987654) == 0
    assert hook(lab, "prolog", 987655) == 0
    assert hook(lab, "task_prolog", 987656) == 0
    for odd in ("", "..", "1/../../etc", "7\n8", "-1", "*"):
        assert hook(lab, "prolog", job, SLURM_JOB_ID=odd, SLURM_JOB_COMMENT="crater-plan:x") == 0
        assert hook(lab, "epilog", job, SLURM_JOB_ID=odd) == 0
    assert folders(lab, job) == before
    release(lab, job)


def test_leftovers_of_an_older_job_of_that_id_are_not_inherited(lab: Lab) -> None:
    last = held(lab)
    release(lab, last)
    path = f"/crater-cache/temp/{lab.spec.name}/{last + 1}"
    lab.node_run(NODE, ["mkdir", "-p", f"{path}/stale"], check=True)
    job = start(lab, f"{SHOW}; ls -A $CRATER_CACHE_PATH; stat -c %U:%a $CRATER_CACHE_PATH")
    assert job == last + 1
    completed(lab, job)
    assert output(lab, job).endswith(f"{path}\nalice:700\n")


def test_many_at_once(lab: Lab) -> None:
    jobs = [start(lab, SHOW, user=("alice", "bob")[i % 2]) for i in range(12)]
    for index, job in enumerate(jobs):
        completed(lab, job)
        text = output(lab, job, ("alice", "bob")[index % 2])
        assert variables(text)["CRATER_CACHE_PATH"].endswith(f"/{job}")
    for job in jobs:
        gone(lab, job)
