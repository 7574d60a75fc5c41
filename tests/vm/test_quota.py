# SPDX-License-Identifier: Apache-2.0
"""Project quota on a real XFS: a job is held to its cache by the kernel, and by nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from crater_slurm.model.plan import Plan
from crater_slurm.model.token import SignedPlan, sign

from .binding_helpers import (
    JOB_SECONDS,
    KEY,
    SETTINGS,
    STATE,
    closed_record,
    finish,
    install_hooks,
    record,
    submit,
)
from .guest import Guest
from .node import NodeDaemon, crater_node, push_source
from .slurm import Slurm, slurm_up

MOUNT = "/crater-cache"
FIRST_PROJECT = 1_000_000_000
QUOTA: dict[str, Any] = SETTINGS | {
    "node": SETTINGS["node"]
    | {
        "cache": {"mount_point": MOUNT, "min_free_percent": 0, "account_seconds": 2},
        "checkpoints": {"enabled": False},
        "listen": "127.0.0.1:9194",
    }
}


@pytest.fixture(scope="module")
def running(guest: Guest) -> Iterator[tuple[Slurm, NodeDaemon]]:
    """Slurm and the node daemon beside XFS with project quota on an NVMe drive."""
    push_source(guest)
    drive = guest.check("basename $(dirname $(grep -l CRATER0 /sys/class/nvme/*/serial))/nvme*n1")
    guest.check(
        f"mkfs.xfs -q -f /dev/{drive} && mkdir -p {MOUNT}"
        f" && mount -o prjquota /dev/{drive} {MOUNT} && chmod 711 {MOUNT}"
    )
    slurm = slurm_up(guest, install_hooks(guest))
    with crater_node(guest, QUOTA, arguments=["--foreground"]) as daemon:
        yield slurm, daemon
    slurm.down()
    guest.check(f"umount {MOUNT} && wipefs -qa /dev/{drive}")


@pytest.fixture
def slurm(running: tuple[Slurm, NodeDaemon]) -> Slurm:
    return running[0]


@pytest.fixture
def daemon(running: tuple[Slurm, NodeDaemon]) -> NodeDaemon:
    return running[1]


def planned(guest: Guest, cache_gb: int) -> str:
    uid = int(guest.check("id -u alice"))
    plan = Plan(id=f"quota-{time.monotonic_ns()}", cache_gb=cache_gb)
    return "--comment=" + sign(SignedPlan(plan, uid, "guest", int(time.time())), KEY)


def project(guest: Guest, number: int) -> tuple[int, int]:
    """KiB used and hard limit of a project, as XFS's own tool reads them."""
    lines = guest.check(f"xfs_quota -x -c 'report -p -n -N' {MOUNT}").splitlines()
    for line in lines:
        words = line.split()
        if words and words[0] == f"#{number}":
            return int(words[1]), int(words[3])
    return 0, 0


def test_a_job_gets_a_project_and_can_not_write_beyond_its_plan(guest: Guest, slurm: Slurm) -> None:
    script = (
        "cd $CRATER_CACHE_PATH\n"
        "fallocate -l 800M first && echo first fits\n"
        "fallocate -l 200M second || { echo second does not; rm -f second; }\n"
        "mkdir -p $CRATER_CHECKPOINT_PATH/deep && fallocate -l 90M $CRATER_CHECKPOINT_PATH/deep/x"
        " && mv $CRATER_CHECKPOINT_PATH/deep/x . && echo moves within the job are free\n"
    )
    job = submit(slurm, script, "-n1", planned(guest, 1))
    done = finish(slurm, job)
    assert "first fits" in done.output
    assert "second does not" in done.output
    assert "No space left" in done.output
    assert "moves within the job are free" in done.output
    kept = closed_record(guest, job)
    quota = kept["quota"]
    assert (quota["by"], quota["limit_bytes"]) == ("project", 10**9)
    guest.wait_for(f"! grep -q '\"project\": {FIRST_PROJECT + job}' {STATE}/jobs/{job}.json", 60)
    guest.wait_for(f'[ -z "$(ls -A {MOUNT}/.crater-trash)" ]', 60, what="the trash is emptied")
    assert project(guest, FIRST_PROJECT + job) == (0, 0), "given back"


def test_a_running_job_s_use_is_read_from_the_kernel_and_told_at_its_limit(
    guest: Guest, slurm: Slurm, daemon: NodeDaemon
) -> None:
    go = f"/tmp/quota-{time.monotonic_ns()}"
    script = f"fallocate -l 953M $CRATER_CACHE_PATH/file\nuntil [ -e {go} ]; do sleep 0.5; done\n"
    job = submit(slurm, script, "-n1", planned(guest, 1))
    try:
        file = f"{STATE}/jobs/{job}.json"
        guest.wait_for(f"grep -q 'it holds 0.999 GB' {file}", JOB_SECONDS, what="it is noticed")
        kept = record(guest, job)
        number = kept["quota"]["project"]
        assert number == FIRST_PROJECT + job
        used, hard = project(guest, number)
        assert hard in (976562, 976563), "10^9 bytes in KiB"
        assert abs(kept["quota"]["used_bytes"] - used * 1024) < 2**20
        page = guest.check(
            'python3 -c "import urllib.request as u;'
            "print(u.urlopen('http://127.0.0.1:9194/metrics').read().decode())\""
        )
        assert 'crater_io_daemon_jobs{phase="running"} 1.0' in page
        assert "crater_io_daemon_quota_exceeded_total 1.0" in page
    finally:
        guest.check(f"touch {go}")
    told = finish(slurm, job).output
    assert "crater: it holds 0.999 GB in the local cache, its limit is 1 GB" in told
    assert "no more checkpoints are taken" in told
    assert f"quota: job {job}: it holds" in daemon.log()


def test_a_project_that_somebody_else_uses_is_left_to_him(guest: Guest, slurm: Slurm) -> None:
    last = int(guest.check("ls /var/lib/crater-binding/jobs | sed s/.json// | sort -n | tail -n1"))
    taken = FIRST_PROJECT + last + 1
    guest.check(
        f"mkdir {MOUNT}/theirs && xfs_quota -x -c 'project -s -p {MOUNT}/theirs {taken}' {MOUNT}"
        f" && echo x >{MOUNT}/theirs/file"
    )
    go = f"/tmp/quota-{time.monotonic_ns()}"
    job = submit(slurm, f"until [ -e {go} ]; do sleep 0.5; done", "-n1", planned(guest, 2))
    try:
        guest.wait_for(f"[ -e {STATE}/jobs/{job}.json ]", JOB_SECONDS)
        assert FIRST_PROJECT + job == taken
        assert record(guest, job)["quota"]["project"] == taken + 1
        assert project(guest, taken)[1] == 0, "no limit was put on theirs"
    finally:
        guest.check(f"touch {go}")
    finish(slurm, job)
    guest.check(f"rm -r {MOUNT}/theirs")
