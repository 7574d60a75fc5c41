# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of real jobs: the ring at their cores, on their bill, NVMe below, and what may break.

The jobs bring a plan, and their scripts use nothing but what the hooks name: crater_slurm.job from
the node's folder, by the guest's own Python without torch. The cache is an XFS with project quota
on the NVMe drive, the destination lies on the guest's system disk.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from .binding_helpers import (
    SETTINGS,
    finish,
    install_hooks,
    node_state,
    record,
    running_daemon,
    submit,
    with_plan,
)
from .guest import Guest
from .image import GUEST_FILES
from .node import BED, NodeDaemon, push_source
from .slurm import Slurm, slurm_up

MOUNT = "/crater-cache"
FAR = "/srv/far"
"""Where checkpoints go: a folder of each user on another file system than the cache."""

MIB = 1 << 20
STATE_MIB = 16
HALF = ("--ntasks=1", "--cpus-per-task=4", "--gres=gpu:a100:2", "--gres-flags=enforce-binding")
MEMORY = "--mem=500M"
NODE_OF_CORES = {(0, 1, 2, 3): "0", (4, 5, 6, 7): "1"}

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


@pytest.fixture(scope="module")
def drive(guest: Guest) -> str:
    """The device of the NVMe drive at NUMA node 0."""
    name = guest.check("basename $(dirname $(grep -l CRATER0 /sys/class/nvme/*/serial))/nvme*n1")
    return f"/dev/{name}"


@pytest.fixture(scope="module")
def slurm(guest: Guest) -> Iterator[Slurm]:
    """A Slurm that runs our hooks, and what the jobs' scripts need."""
    push_source(guest)
    guest.write(f"{BED}/patient_daemon.py", PATIENT_DAEMON)
    guest.write(f"{BED}/trainer.py", (GUEST_FILES / "trainer.py").read_text("utf-8"))
    for user in ("alice", "bob"):
        guest.check(f"rm -rf {FAR}/{user}; install -d -o {user} -g {user} {FAR}/{user}")
    running = slurm_up(guest, install_hooks(guest))
    yield running
    running.down()
    guest.check(f"rm -rf {FAR}")


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


@pytest.fixture(scope="class")
def daemon(guest: Guest, slurm: Slurm, drive: str) -> Iterator[NodeDaemon]:
    """A node daemon that the tests of a class leave alive, with the drive as its cache."""
    with mounted(guest, drive), daemon_with(guest) as running:
        yield running


@pytest.fixture
def go(guest: Guest) -> Iterator[str]:
    """Beginning of the paths whose appearance lets a job go on; at the end all of them are there."""
    path = f"/tmp/go-{time.monotonic_ns()}"
    yield path
    guest.check(f"touch {path}-{{1,2,3,4}}")


class TestJobs:
    def test_save_by_a_ring_at_their_cores_to_nvme(
        self, guest: Guest, slurm: Slurm, daemon: NodeDaemon, drive: str, go: str
    ) -> None:
        """Two users' jobs, one on each NUMA node; neither gets into the other's ring."""
        before = written_bytes(guest, drive)
        first = train(
            slurm,
            f"begin()\nsave(1)\nsave(2)\nflushed(2)\nopen('{go}-1', 'w')\nuntil('{go}-2')\nload()",
            with_plan(guest, gpus=2, checkpoint=f"{FAR}/alice/%j"),
        )
        guest.wait_for(f"[ -e {go}-1 ] || [ -e /var/tmp/end-{first} ]", 300)
        ring = f"'/run/crater/ring.sock', '{first}', '{first}.0'"
        second = train(
            slurm,
            f"begin()\nsave(7)\ntry_to_open({ring})\nload()",
            with_plan(guest, "bob", gpus=2, checkpoint="on"),
            user="bob",
        )
        other = train(slurm, f"try_to_open({ring})")
        outputs = [finish(slurm, second, user="bob").output, finish(slurm, other).output]
        places = self.look(guest, first, drive)
        guest.check(f"touch {go}-2")
        outputs.insert(0, finish(slurm, first).output)
        print(*outputs, sep="\n")

        assert saves(outputs[0]) == [(1, "ring", None), (2, "ring", None)]
        assert saves(outputs[1]) == [(7, "ring", None)]
        assert written_bytes(guest, drive) - before > 3 * STATE_MIB * MIB
        self.check_memory(outputs)
        for output, step in ((outputs[0], 2), (outputs[1], 7)):
            loaded = only(output, "load")
            assert (loaded["step"], loaded["source"], loaded["good"]) == (step, "cache", True)
            began = only(output, "begin")
            assert began["imported"].startswith("/run/crater/job/")
            assert began["imported"] == began["named"]
            assert began["suite"] == [], "the suite's own modules are no business of a job"
            assert loaded["folder"].startswith(f"{began['folder']}/step-")
        refused = f"couldn't open the ring of job {first} for "
        uid = guest.check("id -u bob")
        assert f"{refused}uid {uid}" in only(outputs[1], "refused")["error"]
        assert f"{refused}a process of " in only(outputs[2], "refused")["error"]
        assert places == {"good"}
        assert node_state(guest) == "idle none"

    def look(self, guest: Guest, job: int, drive: str) -> set[str]:
        """From outside, while the job runs: its checkpoints' places, and nobody else's way in."""
        folder = record(guest, job)["folders"]["checkpoint"]
        assert guest.check(f"findmnt -no SOURCE,FSTYPE -T {folder}").split() == [drive, "xfs"]
        steps = guest.check(f"ls -A {folder}").split()
        assert steps == ["step-000000001", "step-000000002"]
        far = f"{FAR}/alice/{job}"
        told = [verify(guest, f"{place}/{step}") for place in (folder, far) for step in steps]
        pid = worker(guest, job)
        assert "slurm" not in guest.read(f"/proc/{pid}/cgroup")
        assert guest.check(f"stat -c %U /proc/{pid}/cwd") == "root", "it could be looked into"
        assert guest.check(f"awk '/^Uid:/ {{print $2, $3, $4}}' /proc/{pid}/status") == " ".join(
            3 * [guest.check("id -u alice")]
        )
        for user in ("alice", "bob"):
            for path in (f"/proc/{pid}/fd", f"/proc/{pid}/map_files", "/run/crater/workers"):
                assert guest.run(f"ls {path}", user=user).rc != 0, (user, path)
        assert guest.run(f"ls {folder}", user="bob").rc != 0
        return {line.split(": ")[1] for line in told}

    def check_memory(self, outputs: list[str]) -> None:
        seen = []
        for output in outputs[:2]:
            began = only(output, "begin")
            node = NODE_OF_CORES[tuple(began["cpus"])]
            seen.append(node)
            assert set(began["pages"]["lane"]) == set(began["pages"]["anon"]) == {node}
            assert began["lane"] >= STATE_MIB * MIB
            assert began["pages"]["lane"][node] * 4096 == began["lane"]
            assert began["pages"]["anon"][node] > 1000
            grown = {kind: began["after"][kind] - began["before"][kind] for kind in began["after"]}
            assert grown["shmem"] == pytest.approx(began["lane"], abs=MIB)
            assert grown["current"] >= began["lane"] - MIB
        assert seen == ["0", "1"]

    def test_go_on_by_the_ring_while_the_daemon_is_dead(
        self, guest: Guest, slurm: Slurm, daemon: NodeDaemon, go: str
    ) -> None:
        job = train(
            slurm,
            f"begin()\nsave(1)\nopen('{go}-1', 'w')\nuntil('{go}-2')\n"
            f"save(2)\nopen('{go}-3', 'w')\nuntil('{go}-4')\nsave(3)\nload()",
            with_plan(guest, gpus=2, checkpoint=f"{FAR}/alice/%j"),
        )
        guest.wait_for(f"[ -e {go}-1 ] || [ -e /var/tmp/end-{job} ]", 300)
        pid = worker(guest, job)
        daemon.stop("KILL")
        guest.check(f"touch {go}-2")
        guest.wait_for(f"[ -e {go}-3 ] || [ -e /var/tmp/end-{job} ]", 300)
        guest.check(alive(pid))
        daemon.start()
        found = f"job {job}: found its worker again"
        guest.wait_for(f"grep -q '{found}' /var/log/crater-node.log", 60)
        guest.check(f"touch {go}-4")
        done = finish(slurm, job)
        print(done.output)
        assert saves(done.output) == [(step, "ring", None) for step in (1, 2, 3)]
        assert only(done.output, "load")["step"] == 3
        assert worker(guest, job) == pid
        guest.wait_for(f"! {alive(pid)}", 120, what="the worker's end, as all is safe")
        for step in (1, 2, 3):
            assert verify(guest, f"{FAR}/alice/{job}/step-{step:09}").endswith(": good")


class TestAfterTheJob:
    def test_epilog_returns_and_the_slow_flush_goes_on(
        self, guest: Guest, slurm: Slurm, drive: str
    ) -> None:
        with mounted(guest, drive), daemon_with(guest, rate_mb_s=0.5):
            job = train(
                slurm,
                "begin()\nsave(1)",
                with_plan(guest, gpus=2, checkpoint=f"{FAR}/alice/%j"),
            )
            done = finish(slurm, job)
            assert saves(done.output) == [(1, "ring", None)]
            guest.wait_for('[ "$(sinfo -h -o %T)" = idle ]', 120, what="Epilog's end")
            kept, pid = record(guest, job), worker(guest, job)
            step = f"{FAR}/alice/{job}/step-000000001"
            guest.check(f"[ ! -e {step}/manifest-00000.json ] && {alive(pid)}")
            assert kept["phase"] == "ended"
            assert "slurm" not in guest.read(f"/proc/{pid}/cgroup")
            guest.wait_for(f"[ -e {step}/manifest-00000.json ]", 300, interval=1)
            assert verify(guest, step) == f"{step.split('/')[-1]}: good"
            assert guest.check(f"stat -c %U {step}/*") == "alice\nalice\nalice"
            guest.wait_for(f"! {alive(pid)}", 120, what="the worker's end")
            assert node_state(guest) == "idle none"


class TestFaultyDisk:
    """The NVMe drive below device-mapper, which then answers every request with an error."""

    @pytest.fixture
    def mapped(self, guest: Guest, drive: str) -> Iterator[str]:
        guest.check("modprobe dm-mod")
        size = int(guest.check(f"blockdev --getsz {drive}"))
        made = f"dmsetup create crater --table '0 {size} linear {drive} 0'"
        guest.check(f"{made} && dmsetup mknodes crater")  # there is no udev
        yield f"0 {size} error"
        guest.wait_for("dmsetup remove crater", 60)
        guest.check("rm -f /dev/mapper/crater")

    def test_trainer_is_told_and_goes_on(
        self, guest: Guest, slurm: Slurm, mapped: str, go: str
    ) -> None:
        with mounted(guest, "/dev/mapper/crater"), daemon_with(guest) as daemon:
            job = train(
                slurm,
                f"begin()\nsave(1)\nflushed(1)\nopen('{go}-1', 'w')\nuntil('{go}-2')\n"
                f"save(2)\nload()\nsave(3)\nreport('end')",
                with_plan(guest, gpus=2, checkpoint=f"{FAR}/alice/%j"),
            )
            guest.wait_for(f"[ -e {go}-1 ] || [ -e /var/tmp/end-{job} ]", 300)
            guest.check(
                f"dmsetup suspend --nolockfs crater && dmsetup load crater --table '{mapped}'"
                f" && dmsetup resume crater && touch {go}-2"
            )
            done = finish(slurm, job)
            print(done.output)
            print(daemon.log())
            assert only(done.output, "end")
            assert daemon.alive()
            loaded = only(done.output, "load")
            assert (loaded["step"], loaded["good"]) == (1, True)
            failed = [error for step, _, error in saves(done.output) if step == 2]
            assert "reports an error" in str(failed[0])
