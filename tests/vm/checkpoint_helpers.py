# SPDX-License-Identifier: Apache-2.0
"""What the checkpoint tests are made of: drives and their faults, the daemon, jobs and reports."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from .binding_helpers import SETTINGS, record, running_daemon, submit
from .guest import Guest
from .node import BED, NodeDaemon
from .slurm import Slurm

MOUNT = "/crater-cache"
FAR = "/srv/far"
"""Where checkpoints go: a folder of each user on another file system than the cache."""

MIB = 1 << 20
HALF = ("--ntasks=1", "--cpus-per-task=4", "--gres=gpu:a100:2", "--gres-flags=enforce-binding")
MEMORY = "--mem=500M"

#: The emulated machine gets more time than a node would, as the jobs' own trainer.py does.
PATIENT_DAEMON = """\
import sys
from crater_slurm.node import cache, holdings, main, quota

cache._PATIENCE_SECONDS = holdings._PATIENCE_SECONDS = quota._PATIENCE_SECONDS = 30.0
sys.exit(main.main())
"""


def settings(**checkpoints: Any) -> dict[str, Any]:
    """The daemon's settings, with the NVMe drive as its cache."""
    changed = copy.deepcopy(SETTINGS)
    changed["node"]["cache"] = {"mount_point": MOUNT, "require_mount": True}
    changed["node"]["checkpoints"] = checkpoints
    return changed


def drive_of(guest: Guest, node: int) -> str:
    """The device of the NVMe drive at a NUMA node."""
    serial = f"$(dirname $(grep -l CRATER{node} /sys/class/nvme/*/serial))"
    return "/dev/" + guest.check(f"basename {serial}/nvme*n1")


@contextlib.contextmanager
def mounted(guest: Guest, device: str) -> Iterator[None]:
    """A fresh XFS of a device as the cache."""
    guest.check(
        f"mkfs.xfs -q -f {device} && mkdir -p {MOUNT}"
        f" && mount -o prjquota {device} {MOUNT} && chmod 711 {MOUNT}"
    )
    try:
        yield
    finally:
        guest.wait_for(f"umount {MOUNT} || ! mountpoint -q {MOUNT}", 60, interval=1)
        guest.check(f"wipefs -qa {device} || true")


@contextlib.contextmanager
def daemon_with(guest: Guest, **checkpoints: Any) -> Iterator[NodeDaemon]:
    """The node daemon with these settings of checkpoints; its workers end with the block."""
    with running_daemon(guest, settings(**checkpoints), "patient_daemon") as daemon:
        yield daemon


def train(slurm: Slurm, script: str, plan: str = "", user: str = "alice") -> int:
    """Submit a job that runs a Python script on half of the node; without a plan a small one."""
    options = (*HALF, MEMORY, plan) if plan else ("--mem=100M",)
    code = f"from trainer import *\n{script}\n"
    return submit(
        slurm,
        f"export PYTHONPATH=${{PYTHONPATH:-$(echo /run/crater/job/*)}}:{BED}\n"
        f"python3 - <<'END'\n{code}END",
        *options,
        user=user,
    )


def reports(output: str) -> list[dict[str, Any]]:
    """What trainer.py reported, in its order."""
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"what"')]


def only(output: str, what: str) -> dict[str, Any]:
    """The one report of a kind."""
    (found,) = (one for one in reports(output) if one["what"] == what)
    return found


def saves(output: str) -> list[tuple[int, str, str | None]]:
    """Step, way and error of each save."""
    found = [one for one in reports(output) if one["what"] == "save"]
    assert all(one["done"] for one in found)
    return [(one["step"], one["how"], one["error"]) for one in found]


def verify(guest: Guest, folder: str, user: str = "alice") -> str:
    """What `verify` of the jobs' own module says of a step's folder."""
    job = "PYTHONPATH=$(echo /run/crater/job/*) python3 -m crater_slurm.job.checkpoint"
    return guest.check(f"cd / && {job} verify {folder}", user=user)


def worker(guest: Guest, job: int) -> int:
    """The process of a job's worker, by the daemon's record."""
    return int(record(guest, job)["checkpoints"]["worker"]["pid"])


def alive(pid: int) -> str:
    """Bash: whether a process is there and is no zombie."""
    return f"grep -q '^State:.[^ZX]' /proc/{pid}/status"


def written_bytes(guest: Guest, device: str) -> int:
    """Bytes that were written to a drive since the start of the machine."""
    return int(guest.check(f"awk '{{print $7}}' /sys/block/{device.split('/')[-1]}/stat")) * 512


@dataclasses.dataclass
class Hanging:
    """A destination of alice's whose drive can be made to answer nothing for a while."""

    guest: Guest
    folder: str

    def begin(self) -> None:
        self.guest.check("dmsetup suspend --nolockfs far")

    def end(self) -> None:
        self.guest.check("dmsetup resume far")


@contextlib.contextmanager
def mapped(guest: Guest, device: str, name: str) -> Iterator[int]:
    """A drive below device-mapper, as /dev/mapper/NAME; its size in sectors."""
    size = int(guest.check(f"modprobe dm-mod && blockdev --getsz {device}"))
    made = f"dmsetup create {name} --table '0 {size} linear {device} 0'"
    guest.check(f"{made} && dmsetup mknodes {name}")  # there is no udev
    try:
        yield size
    finally:
        guest.wait_for(f"dmsetup remove {name}", 60)
        guest.check(f"rm -f /dev/mapper/{name}; wipefs -qa {device} || true")
