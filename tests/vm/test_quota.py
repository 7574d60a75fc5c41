# SPDX-License-Identifier: Apache-2.0
"""Project quota on a real XFS: the kernel holds a job to its space, and gives the number back.

Slurm has no part in it, so it is left out: the daemon's own parts run in the guest, called as the
hooks would call them, and its users write as a job would.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from .guest import Guest
from .node import SOURCE, push_source

MOUNT = "/crater-cache"
FIRST_PROJECT = 1_000_000_000
STATE = "/var/lib/crater-quota"
LIMIT = 10**9

#: Calls the daemon's parts; the emulated machine gets more time than a node would.
DRIVER = """\
import json, pathlib, pwd, sys
from crater_slurm.config.cache import Cache as Settings
from crater_slurm.node import cache, holdings, jobs, quota

cache._PATIENCE_SECONDS = holdings._PATIENCE_SECONDS = quota._PATIENCE_SECONDS = 60.0
what, job_id, *more = sys.argv[1:]
settings = Settings.model_validate({"mount_point": "/crater-cache", **json.loads(more[0])})
store = jobs.JobStore(pathlib.Path("/var/lib/crater-quota/jobs"))
held = cache.Cache(settings)
quotas = quota.Quotas(settings, store, held.holdings)
record, changes = store.get(job_id), []
if what == "begin":
    user = pwd.getpwnam("alice")
    record = jobs.JobRecord(
        job_id=job_id, uid=user.pw_uid, gid=user.pw_gid, cluster="guest",
        plan={"id": "p", "cache_gb": 1},
    )
    folders = held.prepare("guest", job_id, user.pw_uid, user.pw_gid)
    assert not folders.problem, folders.problem
    record.folders = folders.paths
    quotas.begin(record)
elif what == "count":
    changes = [(c.record.job_id, c.text) for c in quotas.count()]
elif what == "end":
    record.phase = jobs.ENDED
    assert held.release("guest", job_id)
    record.folders = {}
    quotas.end(record)
    held.sweep()
for one in store.all():
    store.save(one)
store.save(record)
print(json.dumps({"quota": record.quota, "folders": record.folders, "changes": changes}))
"""


class Node:
    """The daemon's parts in the guest, on an XFS with project quota."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest

    def call(self, what: str, job: int, **settings: Any) -> Any:
        words = [what, str(job), json.dumps(settings)]
        command = f"PYTHONPATH={SOURCE} /usr/bin/python3 {STATE}/driver.py {shlex.join(words)}"
        return json.loads(self.guest.check(f"cd / && {command}", timeout=300))

    def write(self, path: str, mib: int) -> str:
        """What fallocate says when alice makes a file of that size; empty when it fits."""
        done = self.guest.run(f"fallocate -l {mib}M {path}", user="alice")
        return done.stderr.strip() if done.rc else ""

    def project(self, number: int) -> tuple[int, int]:
        """KiB used and hard limit of a project, as XFS's own tool reads them."""
        text = self.guest.check(f"xfs_quota -x -c 'report -p -n -N' {MOUNT}")
        for words in (line.split() for line in text.splitlines()):
            if words and words[0] == f"#{number}":
                return int(words[1]), int(words[3])
        return 0, 0


@pytest.fixture(scope="module")
def node(guest: Guest) -> Iterator[Node]:
    push_source(guest)
    drive = guest.check("basename $(dirname $(grep -l CRATER0 /sys/class/nvme/*/serial))/nvme*n1")
    guest.check(
        f"mkfs.xfs -q -f /dev/{drive} && mkdir -p {MOUNT} {STATE}"
        f" && mount -o prjquota /dev/{drive} {MOUNT} && chmod 711 {MOUNT}"
    )
    guest.write(f"{STATE}/driver.py", DRIVER)
    yield Node(guest)
    guest.check(f"umount {MOUNT} && wipefs -qa /dev/{drive}; rm -rf {STATE}")


def test_a_job_can_not_write_beyond_its_plan_and_leaves_no_trace(node: Node) -> None:
    begun = node.call("begin", 1)
    number = FIRST_PROJECT + 1
    assert (begun["quota"]["by"], begun["quota"]["project"]) == ("project", number)
    assert begun["quota"]["limit_bytes"] == LIMIT
    assert node.project(number)[1] == -(-LIMIT // 4096) * 4, "in KiB, up to a whole block"
    temp, checkpoint = begun["folders"]["temp"], begun["folders"]["checkpoint"]

    assert node.write(f"{temp}/first", 800) == ""
    assert "No space left on device" in node.write(f"{temp}/second", 200)
    node.guest.check(f"rm -f {temp}/second", user="alice")
    node.guest.check(f"mkdir {checkpoint}/deep", user="alice")
    assert "No space left on device" in node.write(f"{checkpoint}/deep/third", 200)
    node.guest.check(f"rm -f {checkpoint}/deep/third", user="alice")
    assert node.write(f"{checkpoint}/deep/fourth", 90) == ""
    node.guest.check(f"mv {checkpoint}/deep {temp}/moved", user="alice")

    counted = node.call("count", 1)
    used = counted["quota"]["used_bytes"]
    assert 890 * 2**20 <= used < 891 * 2**20
    assert abs(used - node.project(number)[0] * 1024) < 2**17
    assert counted["changes"] == []
    assert node.write(f"{temp}/last", 60) == ""
    ((job, text),) = node.call("count", 1)["changes"]
    assert (job, text) == ("1", "it holds 0.996 GB in the local cache, its limit is 1 GB")

    ended = node.call("end", 1)
    assert ended["quota"]["project"] == 0
    assert node.guest.check(f"ls -A {MOUNT}/.crater-trash") == ""
    # XFS gives the space of deleted files back a moment later.
    given_back = f"xfs_quota -x -c 'report -p -n -N' {MOUNT} | awk '$1 == \"#{number}\" && $2 + $4'"
    node.guest.wait_for(f'[ -z "$({given_back})" ]', 60, what="the project is given back")


def test_a_project_that_somebody_else_uses_is_left_to_him(node: Node) -> None:
    taken = FIRST_PROJECT + 2
    node.guest.check(
        f"mkdir {MOUNT}/theirs && xfs_quota -x -c 'project -s -p {MOUNT}/theirs {taken}' {MOUNT}"
        f" && echo x >{MOUNT}/theirs/file && sync"
    )
    assert node.call("begin", 2)["quota"]["project"] == taken + 1
    assert node.project(taken)[1] == 0, "no limit was put on theirs"
    node.call("end", 2)
    node.guest.check(f"rm -r {MOUNT}/theirs")


def test_what_a_user_has_left_holds_his_next_job(node: Node) -> None:
    first = node.call("begin", 11, user_quota_gb=1)
    assert node.write(f"{first['folders']['temp']}/file", 700) == ""
    node.call("count", 11, user_quota_gb=1)
    second = node.call("begin", 12, user_quota_gb=1)
    assert "No space left on device" in node.write(f"{second['folders']['temp']}/file", 300)
    for job in (11, 12):
        node.call("end", job)


def test_without_the_mount_option_it_is_accounting(node: Node) -> None:
    source = node.guest.check(f"findmnt -n -o SOURCE {MOUNT}")
    node.guest.check(f"umount {MOUNT} && mount {source} {MOUNT}")
    try:
        begun = node.call("begin", 21)
        assert begun["quota"]["by"] == "accounting"
        assert node.write(f"{begun['folders']['temp']}/file", 1100) == ""
        ((_, text),) = node.call("count", 21)["changes"]
        assert text == "it holds 1.15 GB in the local cache, its limit is 1 GB"
        node.call("end", 21)
    finally:
        node.guest.check(f"umount {MOUNT} && mount -o prjquota {source} {MOUNT}")
