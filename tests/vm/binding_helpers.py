# SPDX-License-Identifier: Apache-2.0
"""The node daemon and its hooks around a guest's Slurm, and jobs that bring a signed plan."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from crater_slurm.model.plan import Plan
from crater_slurm.model.token import SignedPlan, sign

from . import alloc
from .guest import Guest
from .node import SOURCE, NodeDaemon, crater_node
from .slurm import Hooks, Slurm

KEY = bytes(range(32))
KEY_FILE = "/etc/crater/plan.key"
STATE = "/var/lib/crater-binding"
PROFILE = f"{STATE}/profile.json"
HOOKS = "/opt/binding-hooks"
HOOK_SECONDS = 15
"""The hooks' own 2 s are too short for an emulated daemon that shares two cores."""

RESERVE_MIB = 100
SETTINGS: dict[str, Any] = {
    "plan": {"key_file": KEY_FILE},
    "node": {
        "memory_binding": "hard",
        "memory_reserve_mib": RESERVE_MIB,
        "state_dir": STATE,
        "profile": PROFILE,
        "sample_seconds": 5,
        "cache": {"mount_point": "/var/crater-cache", "require_mount": False},
    },
}

_serial = itertools.count(1)


def install_hooks(guest: Guest) -> Hooks:
    """Put plan key, profile and hooks into the guest; the hooks only lengthen our own's time."""
    guest.check(f"rm -rf {STATE} /run/crater; mkdir -p {STATE} /var/crater-cache")
    guest.write(KEY_FILE, KEY.hex() + "\n", 0o600)
    gpus = [
        {"index": gpu, "uuid": f"GPU-0000-{gpu}", "numa_node": node}
        for gpu, node in enumerate((0, 0, 1, 1))
    ]
    guest.write(PROFILE, json.dumps({"gpus": gpus}))
    for name in ("prolog", "epilog", "task_prolog"):
        script = f'#!/bin/sh\nexec {SOURCE}/prolog/{name}.sh timeout={HOOK_SECONDS} "$@"\n'
        guest.write(f"{HOOKS}/{name}", script, 0o755)
    return Hooks(
        prolog=f"{HOOKS}/prolog", epilog=f"{HOOKS}/epilog", task_prolog=f"{HOOKS}/task_prolog"
    )


@contextlib.contextmanager
def running_daemon(guest: Guest) -> Iterator[NodeDaemon]:
    """The node daemon with this module's settings, until the block is left."""
    with crater_node(guest, SETTINGS, arguments=["--foreground"]) as daemon:
        yield daemon


def with_plan(guest: Guest, user: str = "alice", **attributes: Any) -> str:
    """The sbatch option that brings a plan of its own, signed as the submit filter signs it."""
    uid = int(guest.check(f"id -u {user}"))
    plan = Plan(id=f"plan-{next(_serial)}", **{"numa": "strict", "domains": 1} | attributes)
    return "--comment=" + sign(SignedPlan(plan, uid, "guest", int(time.time())), KEY)


@dataclasses.dataclass(frozen=True)
class Part:
    """What a job printed between one `== name` line and the next."""

    text: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables that `env` printed."""
        pairs = (line.partition("=") for line in self.text.splitlines())
        return {name: value for name, equals, value in pairs if equals and name.isidentifier()}

    @property
    def placements(self) -> list[alloc.Placement]:
        """What the allocator reported, in its order."""
        return alloc.placements(self.text)

    @property
    def placement(self) -> alloc.Placement:
        """The one report there is."""
        (placed,) = self.placements
        return placed


def parts(output: str) -> dict[str, Part]:
    """Cut a job's output at its `== name` lines."""
    pieces = re.split(r"^== (.*)$", output, flags=re.M)[1:]
    return {name: Part(text) for name, text in zip(pieces[::2], pieces[1::2], strict=True)}


def record(guest: Guest, job: int) -> dict[str, Any]:
    """The daemon's record of a job, from its state folder."""
    kept: dict[str, Any] = json.loads(guest.read(f"{STATE}/jobs/{job}.json"))
    return kept


def closed_record(guest: Guest, job: int) -> dict[str, Any]:
    """The record of a job that has ended, once its Epilog has written it."""
    guest.wait_for(f'grep -q \'"phase": "ended"\' {STATE}/jobs/{job}.json', 60)
    return record(guest, job)


def reports(guest: Guest, job: int) -> dict[str, Mapping[str, Any]]:
    """The last report of each phase that waits for a scheduler, by phase."""
    spool = f"{STATE}/spool"
    last = f'grep -lE \'"job_id": "{job}".*"phase": "epilog"\' {spool}/*.json'
    guest.wait_for(last, 60, what=f"the last report of job {job}")
    lines = guest.check(f"for file in {spool}/*.json; do cat $file; echo; done").splitlines()
    sent = [json.loads(line) for line in lines]
    return {report["phase"]: report for report in sent if report["job_id"] == str(job)}


def mems(guest: Guest, folder: str) -> str:
    """The NUMA nodes that the processes of a cgroup may use."""
    return guest.read(f"{folder}/cpuset.mems.effective")


def node_state(guest: Guest) -> str:
    """The state of n1, with the reason of a drain if there is one."""
    return guest.check("sinfo -h -o '%T %E'")


def up_file(slurm: Slurm, job: int) -> None:
    """Wait until the job has made its file ~/up-JOB, by which it says that it got there."""
    slurm.guest.wait_for(f"[ -e /home/*/up-{job} ]", 240, what=f"job {job} to get to its mark")
