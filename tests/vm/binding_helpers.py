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
from .slurm import Hooks, Job, Slurm

KEY = bytes(range(32))
KEY_FILE = "/etc/crater/plan.key"
STATE = "/var/lib/crater-binding"
PROFILE = f"{STATE}/profile.json"
HOOKS = "/opt/binding-hooks"
PATIENCE = f"{HOOKS}/seconds"
"""The file in the guest that says how long the hooks wait for the daemon."""
HOOK_SECONDS = 90
"""The hooks' own 2 s are too short for an emulated daemon on a busy machine."""

JOB_SECONDS = 600
"""Patience for what a job does."""

MARK = "/var/tmp/{}-$SLURM_JOB_ID"
UP = f"touch {MARK.format('up')}"
"""Bash by which a job of `submit` leaves its mark."""

RESERVE_MIB = 100
SETTINGS: dict[str, Any] = {
    "plan": {"key_file": KEY_FILE},
    "node": {
        "memory_binding": "hard",
        "memory_reserve_mib": RESERVE_MIB,
        "state_dir": STATE,
        "profile": PROFILE,
        "cache": {"mount_point": "/var/crater-cache", "require_mount": False},
    },
}

_serial = itertools.count(1)


def install_hooks(guest: Guest) -> Hooks:
    """Put plan key, profile and hooks into the guest; the hooks only lengthen our own's time."""
    guest.check(
        f"rm -rf {STATE} /run/crater /var/tmp/up-* /var/tmp/end-*\n"
        f"mkdir -p {STATE} /var/crater-cache"
    )
    guest.write(KEY_FILE, KEY.hex() + "\n", 0o600)
    guest.write(PATIENCE, f"{HOOK_SECONDS}\n")
    gpus = [
        {"index": gpu, "uuid": f"GPU-0000-{gpu}", "numa_node": node}
        for gpu, node in enumerate((0, 0, 1, 1))
    ]
    guest.write(PROFILE, json.dumps({"gpus": gpus}))
    for name in ("prolog", "epilog", "task_prolog"):
        script = f'#!/bin/sh\nexec {SOURCE}/prolog/{name}.sh timeout=$(cat {PATIENCE}) "$@"\n'
        guest.write(f"{HOOKS}/{name}", script, 0o755)
    return Hooks(
        prolog=f"{HOOKS}/prolog", epilog=f"{HOOKS}/epilog", task_prolog=f"{HOOKS}/task_prolog"
    )


@contextlib.contextmanager
def running_daemon(
    guest: Guest, settings: Mapping[str, Any] = SETTINGS, module: str = "crater_slurm.node"
) -> Iterator[NodeDaemon]:
    """The node daemon with this module's settings, until the block is left."""
    with crater_node(guest, settings, module=module, arguments=["--foreground"]) as daemon:
        yield daemon


def with_plan(
    guest: Guest, user: str = "alice", *, numa: str = "strict", domains: int = 1, **planned: Any
) -> str:
    """The sbatch option that brings a plan of its own, signed as the submit filter signs it."""
    uid = int(guest.check(f"id -u {user}"))
    plan = Plan(id=f"plan-{next(_serial)}", numa=numa, domains=domains, **planned)
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


def mark(job: int, name: str = "up") -> str:
    """The file by which a job of `submit` says that it got somewhere."""
    return f"/var/tmp/{name}-{job}"


def submit(slurm: Slurm, script: str, *options: str, user: str = "alice") -> int:
    """Submit a script that leaves the mark "up" where it says UP, or at the latest at its end.

    Waiting for a file costs an emulated machine next to nothing; asking Slurm takes it a second.
    """
    trap = f"trap 'touch {MARK.format('up')} {MARK.format('end')}' EXIT"
    return slurm.submit(f"{trap}\n{script}", *options, user=user)


def up(slurm: Slurm, job: int) -> None:
    """Wait for the job's mark "up"; it must still run."""
    there = f"[ -e {mark(job)} ]"
    slurm.guest.wait_for(there, JOB_SECONDS, what=f"the mark of job {job}", interval=0.5)
    slurm.guest.check(f"[ ! -e {mark(job, 'end')} ] || (cat /home/*/job-{job}.out >&2; exit 1)")


def await_report(slurm: Slurm, job: int, part: str, *, user: str = "alice") -> None:
    """Wait until the allocator has reported below a job's `== part` line."""
    out = f"/home/{user}/job-{job}.out"
    reported = f"grep -sA1 '^== {part}' {out} | grep -q cpus"
    either = f"{reported} || [ -e {mark(job, 'end')} ]"
    slurm.guest.wait_for(either, JOB_SECONDS, what=f"a report of job {job}", interval=1)
    slurm.guest.check(f"{reported} || (cat {out} >&2; exit 1)")


def finish(slurm: Slurm, job: int, *, user: str = "alice") -> Job:
    """Wait for the end of a job of `submit`, which must be a good one."""
    ended = f"[ -e {mark(job, 'end')} ]"
    slurm.guest.wait_for(ended, JOB_SECONDS, what=f"the end of job {job}", interval=0.5)
    done = slurm.finish(job, user=user, timeout=JOB_SECONDS)
    assert done.state == "COMPLETED", done
    return done


def run(slurm: Slurm, script: str, *options: str, user: str = "alice") -> Job:
    """Submit a script and wait for its good end."""
    return finish(slurm, submit(slurm, script, *options, user=user), user=user)
