# SPDX-License-Identifier: Apache-2.0
"""Memory binding by the real node daemon on a real Slurm: local, and never anyone's death."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest

from . import alloc
from .binding_helpers import (
    HOOK_SECONDS,
    PATIENCE,
    STATE,
    UP,
    Part,
    await_report,
    closed_record,
    finish,
    install_hooks,
    mems,
    node_state,
    parts,
    record,
    reports,
    run,
    running_daemon,
    submit,
    up,
    with_plan,
)
from .guest import Guest
from .node import NodeDaemon, push_source
from .slurm import Slurm, slurm_up

HALF = ("--ntasks=1", "--cpus-per-task=4", "--gres=gpu:a100:2", "--gres-flags=enforce-binding")
QUARTER = ("--ntasks=1", "--cpus-per-task=2", "--gres=gpu:a100:1", "--gres-flags=enforce-binding")
MEASURE = "/opt/crater-vm/measure"
MEASURE_SCRIPT = f"""\
#!/bin/bash
env | grep -E '^(CRATER_|CUDA_)'
exec {alloc.COMMAND} --anon-mib 80 --file-mib 16 --file f-$SLURM_JOB_ID-$1
"""
NODE_OF_CORES = {"0-3": 0, "4-7": 1}
MIB = 1 << 20
CROWD_MIB = 1020
"""Two jobs that use so much overflow a NUMA node; each stays below its own limit of 1100."""


@pytest.fixture(scope="module")
def slurm(guest: Guest) -> Iterator[Slurm]:
    """A Slurm that runs our hooks."""
    push_source(guest)
    guest.write(MEASURE, MEASURE_SCRIPT, 0o755)
    running = slurm_up(guest, install_hooks(guest))
    yield running
    running.down()


@pytest.fixture(scope="class")
def daemon(guest: Guest, slurm: Slurm) -> Iterator[NodeDaemon]:
    """A node daemon that the tests of a class leave alive."""
    with running_daemon(guest) as running:
        yield running


@pytest.fixture
def release(guest: Guest) -> Iterator[str]:
    """A path whose appearance ends the jobs that hold on for it."""
    path = f"/tmp/release-{time.monotonic_ns()}"
    yield path
    guest.check(f"touch {path}")


def until(path: str) -> str:
    """Bash that waits for a path."""
    return f"until [ -e {path} ]; do sleep 0.3; done"


@dataclasses.dataclass(frozen=True)
class Seen:
    """One finished strict job: its node, what it printed, and what was seen from outside."""

    node: int
    job: int
    parts: dict[str, Part]
    folder: str
    """The job's cgroup."""
    outside: dict[str, str]
    """cpuset.mems.effective of each step's `user` folder."""
    moved: alloc.Placement
    """A process that was put into the extern step, as pam_slurm_adopt does."""
    record: dict[str, Any]
    reports: dict[str, Any]

    @property
    def other(self) -> int:
        return 1 - self.node


def strict_script(release: str) -> str:
    """Report from the batch step, a whole step, half a one and a running one; try to get out."""
    return f"""
echo == batch
{MEASURE} batch
unset ${{!CRATER_@}}
echo == whole
srun -n1 -c4 {MEASURE} whole
echo == half
srun -n1 -c2 --gres=gpu:a100:1 {MEASURE} half
echo == escape
own=/sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)
for folder in $own $own/.. $own/../.. $own/../../..; do
    echo 0-1 >$folder/cpuset.mems && echo widened $folder
done
echo $$ >/sys/fs/cgroup/cgroup.procs && echo moved out
grep Mems_allowed_list /proc/self/status
srun -n1 -c4 sleep 1000 &
{UP}
{until(release)}
kill %1
wait
true
"""


@pytest.fixture(scope="class")
def both(guest: Guest, slurm: Slurm, daemon: NodeDaemon) -> list[Seen]:
    """Two strict jobs side by side, one on each NUMA node, looked at in every way."""
    go = f"/tmp/release-{time.monotonic_ns()}"
    jobs = [
        submit(slurm, strict_script(go), *HALF, "--mem=900M", with_plan(guest, gpus=2))
        for _ in range(2)
    ]
    try:
        looks = []
        for job in jobs:
            up(slurm, job)
            folder = str(PurePosixPath(slurm.step_cgroup(job)).parent)
            steps = guest.check(f"cd {folder} && ls -d step_*").split()
            outside = {step: mems(guest, f"{folder}/{step}/user") for step in steps}
            looks.append((folder, outside, move_in(guest, f"{folder}/step_extern/user", job)))
    finally:
        guest.check(f"touch {go}")
    seen = []
    for job, look in zip(jobs, looks, strict=True):
        done = finish(slurm, job)
        printed = parts(done.output)
        node = NODE_OF_CORES[printed["batch"].placement.cpus]
        seen.append(Seen(node, job, printed, *look, closed_record(guest, job), reports(guest, job)))
    guest.check("rm -f /home/*/f-* /home/*/up-*")
    assert [one.node for one in seen] == [0, 1]
    return seen


def move_in(guest: Guest, user: str, job: int) -> alloc.Placement:
    """Run the allocator in the extern step of a job, where Slurm puts a process it adopts.

    24.11 keeps a process of its own in `task_special`; 26.05 makes that folder when it needs it.
    """
    out = guest.check(
        f"""
        mkdir {user}/task_special 2>/dev/null && made=1
        (
            echo $BASHPID >{user}/task_special/cgroup.procs || exit 1
            exec {alloc.COMMAND} --anon-mib 40 --file /home/alice/f-{job}-moved --file-mib 8
        ) || exit 1
        [ -z "$made" ] || rmdir {user}/task_special
        """
    )
    (placed,) = alloc.placements(out)
    return placed


class TestStrictJobs:
    @pytest.mark.parametrize("step", ["batch", "whole", "half"])
    def test_have_memory_and_page_cache_on_the_node_of_their_cores(
        self, both: list[Seen], step: str
    ) -> None:
        for seen in both:
            placed = seen.parts[step].placement
            assert placed.mems == str(seen.node)
            assert placed.anon_pages == {seen.node: 80 * alloc.PAGES_PER_MIB}
            assert placed.file_mib(seen.node) == pytest.approx(16, abs=2)
            assert placed.file_mib(seen.other) < 1
            assert placed.numa_stat["anon"][seen.other] < MIB

    def test_have_a_narrow_extern_step(self, both: list[Seen]) -> None:
        for seen in both:
            assert seen.moved.mems == str(seen.node)
            assert seen.moved.anon_pages == {seen.node: 40 * alloc.PAGES_PER_MIB}
            assert seen.moved.file_mib(seen.other) < 1
            assert "/step_extern/" in seen.moved.cgroup

    def test_have_no_wide_step(self, both: list[Seen]) -> None:
        for seen in both:
            assert {"step_batch", "step_extern"} <= set(seen.outside)
            assert set(seen.outside.values()) == {str(seen.node)}

    def test_lie_where_the_release_puts_them(self, guest: Guest, both: list[Seen]) -> None:
        for seen in both:
            name = PurePosixPath(seen.folder).name
            if guest.release == "24.11":
                assert name == f"job_{seen.job}"
            else:
                assert re.fullmatch(r"s[0-9A-Z]{13}", name)
                assert seen.record["sluid"] == name

    def test_cannot_be_widened_by_their_owner(self, both: list[Seen]) -> None:
        for seen in both:
            text = seen.parts["escape"].text
            assert "widened" not in text
            assert "moved out" not in text
            assert re.findall(r"Mems_allowed_list:\s*(\S+)", text) == [str(seen.node)]

    @pytest.mark.parametrize("step", ["batch", "whole", "half"])
    def test_have_an_environment_that_tells_the_truth(self, both: list[Seen], step: str) -> None:
        for seen in both:
            told, placed = seen.parts[step].environment, seen.parts[step].placement
            gpus = 1 if step == "half" else 2
            assert told["CRATER_CPU_LIST"] == placed.cpus
            assert told["CRATER_NUMA_NODE"] == placed.mems
            assert told["CRATER_CPU_CORES"] == ("2" if step == "half" else "4")
            assert told["CRATER_GPU_IDS"] == told["CUDA_VISIBLE_DEVICES"] == "0,1"[: 2 * gpus - 1]
            host = [int(gpu) for gpu in told["CRATER_GPU_IDS_HOST"].split(",")]
            assert len(host) == gpus
            assert {gpu // 2 for gpu in host} == {seen.node}

    def test_are_recorded_and_reported(self, both: list[Seen]) -> None:
        for seen in both:
            for grant in (seen.record["grant"], seen.reports["epilog"]["grant"]):
                assert grant["asked"] == "strict"
                assert grant["given"] == "hard"
                assert grant["reason"] == "the memory limits of all jobs fit"
                assert grant["local"] is True
                assert grant["numa_nodes"] == grant["memory_nodes"] == [seen.node]
                assert grant["gpu_numa_nodes"] == [seen.node]
            assert set(seen.reports) == {"prolog", "task", "epilog"}


class TestWholeNode:
    """A job over both NUMA nodes, whose tasks are apart."""

    SCRIPT = f"""
echo == batch
{alloc.COMMAND} --anon-mib 40
echo == tasks
srun -n2 -c4 --cpu-bind=cores {alloc.COMMAND} --anon-mib 80
"""
    OPTIONS = ("--ntasks=2", "--cpus-per-task=4", "--gres=gpu:a100:4", "--mem=1200M")

    @pytest.mark.parametrize("numa", ["best_effort", "strict"])
    def test_has_each_task_s_memory_at_its_cores(
        self, guest: Guest, slurm: Slurm, daemon: NodeDaemon, numa: str
    ) -> None:
        plan = with_plan(guest, gpus=4, numa=numa, domains=2)
        done = run(slurm, self.SCRIPT, *self.OPTIONS, plan)
        printed = parts(done.output)
        assert printed["batch"].placement.mems == "0-1"
        tasks = sorted(printed["tasks"].placements, key=lambda task: task.cpus)
        assert [task.cpus for task in tasks] == ["0-3", "4-7"]
        wide = numa == "best_effort"
        assert [task.mems for task in tasks] == (["0-1", "0-1"] if wide else ["0", "1"])
        for node, task in enumerate(tasks):
            assert task.anon_pages == {node: 80 * alloc.PAGES_PER_MIB}
        grant = closed_record(guest, done.id)["grant"]
        assert (grant["asked"], grant["given"]) == (numa, "none" if wide else "hard")
        assert grant["local"] is True


class TestLedger:
    """What does not fit stays soft, and nobody is killed for it."""

    def test_two_that_exceed_a_node_are_both_soft_and_live(
        self, guest: Guest, slurm: Slurm, daemon: NodeDaemon, release: str
    ) -> None:
        arrived = f"{release}-arrived"
        filler = submit(slurm, f"{UP}\n{until(release)}", *HALF, "--mem=100M")
        up(slurm, filler)  # takes node 0, so that the two others share node 1
        first = submit(
            slurm,
            f"echo == alone\n{alloc.COMMAND} --anon-mib 300\n{UP}\n{until(arrived)}\n"
            f"echo == crowded\n{alloc.COMMAND} --anon-mib {CROWD_MIB} --hold {release}",
            *QUARTER, "--mem=1100M", with_plan(guest, gpus=1),
        )  # fmt: skip
        up(slurm, first)
        step = f"{slurm.step_cgroup(first)}/user"
        assert mems(guest, step) == "1"
        second = submit(
            slurm,
            f"echo == first\ncat {step}/cpuset.mems.effective\ntouch {arrived}\n"
            f"echo == crowded\n{alloc.COMMAND} --anon-mib {CROWD_MIB} --hold {release}",
            *QUARTER, "--mem=1100M", with_plan(guest, "bob", gpus=1), user="bob",
        )  # fmt: skip
        for user, job in (("alice", first), ("bob", second)):
            await_report(slurm, job, "crowded", user=user)
        guest.check(f"touch {release}")
        done = [finish(slurm, first), finish(slurm, second, user="bob")]
        finish(slurm, filler)
        alone = parts(done[0].output)["alone"].placement
        assert (alone.mems, alone.anon_pages) == ("1", {1: 300 * alloc.PAGES_PER_MIB})
        assert parts(done[1].output)["first"].text.strip() == "0-1"
        spilled = 0
        for ended in done:
            placed = parts(ended.output)["crowded"].placements[-1]
            assert placed.mems == "0-1"
            assert placed.cpus in ("4-5", "6-7")
            assert sum(placed.anon_pages.values()) == CROWD_MIB * alloc.PAGES_PER_MIB
            spilled += placed.anon_pages.get(0, 0)
        assert spilled > 0, "the two were to overflow node 1"
        for ended in done:
            grant = closed_record(guest, ended.id)["grant"]
            assert (grant["asked"], grant["given"]) == ("strict", "soft")
            assert "3 jobs could put 2300 MiB on NUMA node 1, which has" in grant["reason"]
            assert grant["local"] is True
            assert reports(guest, ended.id)["epilog"]["grant"]["given"] == "soft"
        assert node_state(guest) == "idle none"

    def test_a_job_without_a_plan_counts_by_its_limit(
        self, guest: Guest, slurm: Slurm, daemon: NodeDaemon, release: str
    ) -> None:
        small = submit(slurm, f"{UP}\n{until(release)}", "--mem=300M", user="bob")
        up(slurm, small)
        strict = submit(
            slurm,
            f"echo == strict\n{alloc.COMMAND} --anon-mib 600 --hold {release}",
            *QUARTER, "--mem=900M", with_plan(guest, gpus=1),
        )  # fmt: skip
        await_report(slurm, strict, "strict")
        step = f"{slurm.step_cgroup(strict)}/user"
        assert mems(guest, step) in ("0", "1")
        large = run(
            slurm,
            f"cat {step}/cpuset.mems.effective; {alloc.COMMAND} --anon-mib 1300",
            *("--mem=1500M", "--cpus-per-task=2"),
            user="bob",
        )
        assert large.output.splitlines()[0] == "0-1"
        assert mems(guest, step) == "0-1", "what was widened stays wide"
        guest.check(f"touch {release}")
        done = finish(slurm, strict)
        before, after = alloc.placements(done.output)
        assert (before.mems, after.mems) in (("0", "0-1"), ("1", "0-1"))
        grant = closed_record(guest, strict)["grant"]
        assert grant["given"] == "soft"
        assert "3 jobs could put 2700 MiB on NUMA node" in grant["reason"]
        finish(slurm, small, user="bob")


class TestUsers:
    def test_skipping_task_prolog_does_not_skip_the_binding(
        self, guest: Guest, slurm: Slurm, daemon: NodeDaemon, skip_library: str
    ) -> None:
        skip = f"LD_PRELOAD={skip_library} SKIP_PROGRAM=task_prolog"
        done = run(
            slurm,
            "echo == before\nunset CRATER_NUMA_NODE\n"
            f"echo == step\n{skip} srun -n1 -c4 bash -c "
            f"'echo TOLD=$CRATER_NUMA_NODE; {alloc.COMMAND} --anon-mib 80'",
            *HALF, "--mem=900M", with_plan(guest, gpus=2),
        )  # fmt: skip
        step = parts(done.output)["step"]
        assert step.environment["TOLD"] == ""
        node = NODE_OF_CORES[step.placement.cpus]
        assert step.placement.mems == str(node)
        assert step.placement.anon_pages == {node: 80 * alloc.PAGES_PER_MIB}


class TestDaemonAway:
    """A job does not need the daemon, and a node is not drained for the want of one."""

    def test_killed_and_started_again_during_a_job(
        self, guest: Guest, slurm: Slurm, release: str
    ) -> None:
        with running_daemon(guest) as killed:
            job = submit(
                slurm,
                f"echo == before\n{alloc.COMMAND} --anon-mib 50\n{UP}\n"
                f"echo == away\n{until(release + '-killed')}\n"
                f"srun -n1 -c1 {alloc.COMMAND} --anon-mib 50 --hold {release}-back\n"
                f"echo == back\nsrun -n1 -c1 {alloc.COMMAND} --anon-mib 50\n"
                f"echo == large\n{alloc.COMMAND} --anon-mib 700 --hold {release}",
                *QUARTER, "--mem=900M", with_plan(guest, gpus=1),
            )  # fmt: skip
            up(slurm, job)
            killed.stop("KILL")
            guest.check(f"touch {release}-killed")
            started = record(guest, job)["started"]
            await_report(slurm, job, "away")
            alone = run(
                slurm,
                "echo numa=$CRATER_NUMA_NODE",
                *("--mem=200M", with_plan(guest, "bob")),
                user="bob",
            )
            assert alone.output == "numa="
        with running_daemon(guest) as back:
            folder = slurm.step_cgroup(job)
            steps = guest.check(f"ls -d {PurePosixPath(folder).parent}/step_*/user").split()
            assert len(steps) == 3
            for step in steps:
                guest.wait_for(f"[ $(cat {step}/cpuset.mems.effective) = 0 ]", what=step)
            guest.check(f"touch {release}-back")
            await_report(slurm, job, "large")
            run(slurm, f"{alloc.COMMAND} --anon-mib 1300", "--mem=1500M", user="bob")
            guest.check(f"touch {release}")
            done = finish(slurm, job)
            assert back.alive()
            printed = parts(done.output)
            assert printed["before"].placement.mems == "0"
            assert printed["away"].placements[0].mems == "0-1"
            assert printed["away"].placements[1].mems == "0"
            assert printed["away"].placements[1].anon_pages == {0: 50 * alloc.PAGES_PER_MIB}
            assert printed["back"].placements[0].mems == "0"
            kept = closed_record(guest, job)
            assert kept["started"] == started
            assert kept["grant"]["asked"] == "strict"
            assert node_state(guest) == "idle none"

    def test_stopped_during_a_job_and_going_on(
        self, guest: Guest, slurm: Slurm, release: str
    ) -> None:
        with running_daemon(guest) as daemon:
            job = submit(
                slurm,
                f"{UP}\n{until(release + '-stopped')}\n"
                f"echo == away\nsrun -n1 -c1 {alloc.COMMAND} --anon-mib 50\n"
                f"{until(release)}\necho == back\nsrun -n1 -c1 {alloc.COMMAND} --anon-mib 50",
                *QUARTER, "--mem=900M", with_plan(guest, gpus=1),
            )  # fmt: skip
            up(slurm, job)
            guest.check(f"echo 3 >{PATIENCE}; kill -STOP {daemon.pid}; touch {release}-stopped")
            meanwhile = run(
                slurm,
                "echo numa=$CRATER_NUMA_NODE",
                *("--mem=200M", with_plan(guest, "bob")),
                user="bob",
            )
            assert meanwhile.output == "numa="
            await_report(slurm, job, "away")
            guest.check(
                f"echo {HOOK_SECONDS} >{PATIENCE}; kill -CONT {daemon.pid}; touch {release}"
            )
            done = finish(slurm, job)
            printed = parts(done.output)
            assert printed["away"].placement.mems == "0-1"
            assert printed["back"].placement.mems == "0"
            assert closed_record(guest, job)["grant"]["given"] == "hard"
            assert daemon.alive()
            assert node_state(guest) == "idle none"
            left = guest.run(f"grep -l prepared {STATE}/jobs/*.json; ls /run/crater/jobs")
            assert left.stdout == ""
