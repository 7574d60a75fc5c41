# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of real jobs: the ring at their cores, on their bill, NVMe below, and what may break.

The jobs bring a plan, and their scripts use nothing but what the hooks name: crater_slurm.job from
the node's folder, by the guest's own Python without torch. The cache is an XFS with project quota
on the NVMe drive, the destination lies on the guest's system disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .binding_helpers import finish, install_hooks, node_state, record, with_plan
from .checkpoint_helpers import (
    FAR,
    PATIENT_DAEMON,
    Hanging,
    alive,
    daemon_with,
    drive_of,
    mapped,
    mounted,
    only,
    saves,
    train,
    verify,
    worker,
    written_bytes,
)
from .guest import Guest
from .image import GUEST_FILES
from .node import BED, NodeDaemon, push_source
from .slurm import Slurm, slurm_up

MIB = 1 << 20
STATE_MIB = 16
NODE_OF_CORES = {(0, 1, 2, 3): "0", (4, 5, 6, 7): "1"}


@pytest.fixture(scope="module")
def drive(guest: Guest) -> str:
    """The drive of the cache."""
    return drive_of(guest, 0)


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


@pytest.fixture
def hanging(guest: Guest) -> Iterator[Hanging]:
    """The drive at NUMA node 1 as alice's destination."""
    place = "/srv/hanging"
    with mapped(guest, drive_of(guest, 1), "far"):
        guest.check(
            f"mkfs.xfs -q -f /dev/mapper/far && mkdir -p {place} && mount /dev/mapper/far {place}"
            f" && install -d -o alice -g alice {place}/alice"
        )
        made = Hanging(guest, f"{place}/alice")
        yield made
        made.end()  # of one that does not hang it is nothing
        guest.wait_for(f"umount {place}", 60, interval=1)


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

    def test_epilog_returns_while_the_flush_hangs_and_the_flush_goes_on(
        self, guest: Guest, slurm: Slurm, daemon: NodeDaemon, go: str, hanging: Hanging
    ) -> None:
        """The destination answers nothing from before the save until long after the job."""
        job = train(
            slurm,
            f"begin()\nopen('{go}-1', 'w')\nuntil('{go}-2')\nsave(1)",
            with_plan(guest, gpus=2, checkpoint=f"{hanging.folder}/%j"),
        )
        guest.wait_for(f"[ -e {go}-1 ] || [ -e /var/tmp/end-{job} ]", 300)
        hanging.begin()
        guest.check(f"touch {go}-2")
        done = finish(slurm, job)
        assert saves(done.output) == [(1, "ring", None)]
        guest.wait_for('[ "$(sinfo -h -o %T)" = idle ]', 120, what="Epilog's end")
        kept, pid = record(guest, job), worker(guest, job)
        assert kept["phase"] == "ended"
        assert "slurm" not in guest.read(f"/proc/{pid}/cgroup")
        step = f"{hanging.folder}/{job}/step-000000001"
        guest.check(f"[ ! -e {step}/manifest-00000.json ] && {alive(pid)}")
        assert verify(guest, f"{kept['folders']['checkpoint']}/step-000000001").endswith(": good")

        hanging.end()
        guest.wait_for(f"[ -e {step}/manifest-00000.json ]", 300, interval=1)
        assert verify(guest, step) == "step-000000001: good"
        assert guest.check(f"stat -c %U {step}/*") == "alice\nalice\nalice"
        guest.wait_for(f"! {alive(pid)}", 120, what="the worker's end")
        assert node_state(guest) == "idle none"


class TestFaultyDisk:
    """The NVMe drive below device-mapper, which then answers every request with an error."""

    def test_trainer_is_told_and_goes_on(
        self, guest: Guest, slurm: Slurm, drive: str, go: str
    ) -> None:
        with (
            mapped(guest, drive, "crater") as size,
            mounted(guest, "/dev/mapper/crater"),
            daemon_with(guest) as daemon,
        ):
            job = train(
                slurm,
                f"begin()\nsave(1)\nflushed(1)\nopen('{go}-1', 'w')\nuntil('{go}-2')\n"
                f"save(2)\nload()\nsave(3)\nreport('end')",
                with_plan(guest, gpus=2, checkpoint=f"{FAR}/alice/%j"),
            )
            guest.wait_for(f"[ -e {go}-1 ] || [ -e /var/tmp/end-{job} ]", 300)
            guest.check(
                f"dmsetup suspend --nolockfs crater && dmsetup load crater --table '0 {size} error'"
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
