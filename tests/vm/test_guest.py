# SPDX-License-Identifier: Apache-2.0
"""The test bed proves itself: what it says it is, it is; else no test on it means anything."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import alloc
from .errors import GuestError
from .guest import Guest
from .preload import LIBRARY
from .slurm import Slurm

TWO_GPUS = ("--ntasks=1", "--cpus-per-task=4", "--gres=gpu:a100:2", "--gres-flags=enforce-binding")
OPEN_GPUS = """\
/usr/bin/python3 -c '
import os
for gpu in range(4):
    try:
        os.open(f"/dev/nvidia{gpu}", os.O_RDWR)
    except OSError as error:
        print(f"gpu {gpu} errno {error.errno}")
'
"""


@pytest.fixture
def release(guest: Guest) -> Iterator[str]:
    """A path whose appearance ends the jobs that hold on for it."""
    path = f"/tmp/release-{time.monotonic_ns()}"
    yield path
    guest.check(f"touch {path}")


class TestMachine:
    def test_has_two_numa_nodes_of_four_cores_and_two_gib(self, guest: Guest) -> None:
        nodes = "/sys/devices/system/node"
        assert guest.read(f"{nodes}/online") == "0-1"
        assert guest.read(f"{nodes}/node0/cpulist") == "0-3"
        assert guest.read(f"{nodes}/node1/cpulist") == "4-7"
        assert guest.read(f"{nodes}/node0/distance") == "10 21"
        assert guest.read(f"{nodes}/node1/distance") == "21 10"
        total = guest.check(f"awk '/MemTotal/ {{print $4}}' {nodes}/node*/meminfo")
        for memory_kib in map(int, total.split()):
            assert 1800 * 1024 < memory_kib <= 2048 * 1024

    @pytest.mark.parametrize(
        ("serial", "node", "cpus"), [("CRATER0", 0, "0-3"), ("CRATER1", 1, "4-7")]
    )
    def test_has_an_nvme_drive_on_each_node(
        self, guest: Guest, serial: str, node: int, cpus: str
    ) -> None:
        drive = guest.check(f"dirname $(grep -l {serial} /sys/class/nvme/*/serial)")
        assert guest.read(f"{drive}/device/numa_node") == str(node)
        assert guest.read(f"{drive}/device/local_cpulist") == cpus
        assert guest.check(f"cat {drive}/nvme*n1/size") == str((4 << 30) // 512)

    def test_has_a_display_controller_on_each_node(self, guest: Guest) -> None:
        found = guest.check(
            "for d in /sys/bus/pci/devices/*; do"
            " grep -q 0x0380 $d/class && cat $d/numa_node; done | sort"
        )
        assert found.split() == ["0", "1"]

    def test_makes_xfs_with_project_quota_on_nvme(self, guest: Guest) -> None:
        out = guest.check(
            "drive=/dev/$(basename $(ls -d $(dirname $(grep -l CRATER0 /sys/class/nvme/*/serial))"
            "/nvme*n1)) && mkfs.xfs -q -f $drive && mount -o prjquota $drive /mnt"
            " && grep -c prjquota /proc/mounts; umount /mnt && wipefs -qa $drive"
        )
        assert out == "1"

    def test_has_cgroup_v2_with_cpuset_and_memory(self, guest: Guest) -> None:
        assert guest.check("stat -f -c %T /sys/fs/cgroup") == "cgroup2fs"
        controllers = guest.read("/sys/fs/cgroup/cgroup.controllers").split()
        assert {"cpuset", "cpu", "memory", "io", "pids"} <= set(controllers)

    def test_runs_the_slurm_release_it_is_named_after(self, guest: Guest) -> None:
        assert guest.check("slurmd -V").startswith(f"slurm-wlm {guest.release}.")

    def test_lets_slurmd_see_the_sockets(self, guest: Guest) -> None:
        seen = guest.check("slurmd -C").split()
        assert {"CPUs=8", "SocketsPerBoard=2", "CoresPerSocket=4", "ThreadsPerCore=1"} <= set(seen)

    def test_can_import_what_the_daemons_need(self, guest: Guest) -> None:
        modules = "yaml, click, pydantic, psutil, jinja2, sqlalchemy, rich, prometheus_client"
        version = guest.check(f"/usr/bin/python3 -c 'import {modules}; print(pydantic.VERSION)'")
        assert version.startswith("2.")


class TestCommands:
    def test_result_has_status_and_both_outputs(self, guest: Guest) -> None:
        result = guest.run("echo out; echo err >&2; exit 3")
        assert (result.rc, result.stdout, result.stderr) == (3, "out\n", "err\n")

    def test_check_raises_with_the_output(self, guest: Guest) -> None:
        with pytest.raises(GuestError, match=r"(?s)ended with 7.*broken"):
            guest.check("echo broken >&2; exit 7")

    def test_users_have_a_home_and_a_shell(self, guest: Guest) -> None:
        for user in ("alice", "bob"):
            said = guest.check('echo "$(id -un) $PWD $HOME $SHELL"', user=user)
            assert said == f"{user} /home/{user} /home/{user} /bin/bash"

    def test_script_out_of_time_is_killed_with_its_children(self, guest: Guest) -> None:
        result = guest.run("sleep 4711 & sleep 4712", timeout=2)
        assert result.timed_out
        assert result.rc == -9
        assert guest.run("pgrep -f 'sleep 471[12]'").rc == 1

    def test_script_does_not_wait_for_what_it_leaves_behind(self, guest: Guest) -> None:
        begin = time.monotonic()
        pid = guest.check("sleep 60 & echo $!")
        assert time.monotonic() - begin < 30
        guest.check(f"kill {pid}")

    def test_scripts_run_side_by_side(self, guest: Guest) -> None:
        guest.check("rm -f /tmp/met")
        waiting = threading.Thread(target=guest.wait_for, args=("[ -e /tmp/met ]",))
        waiting.start()
        guest.check("touch /tmp/met")
        waiting.join(timeout=60)
        assert not waiting.is_alive()

    def test_pushed_trees_keep_content_and_modes(self, guest: Guest, tmp_path: Path) -> None:
        (tmp_path / "tree" / "__pycache__").mkdir(parents=True)
        (tmp_path / "tree" / "bytes").write_bytes(bytes(range(256)))
        (tmp_path / "tree" / "hook").write_text("#!/bin/sh\necho ran\n")
        (tmp_path / "tree" / "hook").chmod(0o755)
        guest.push([tmp_path / "tree"], "/opt/pushed")
        assert guest.check("/opt/pushed/tree/hook", user="alice") == "ran"
        assert guest.check("stat -c %U%s /opt/pushed/tree/bytes") == "root256"
        assert guest.check("ls /opt/pushed/tree").split() == ["bytes", "hook"]

    def test_wait_for_says_what_did_not_come(self, guest: Guest) -> None:
        with pytest.raises(
            GuestError, match=r"(?s)in vain for the moon; now it ended with 1.*no moon"
        ):
            guest.wait_for("echo no moon; false", 1, what="the moon")


class TestSlurm:
    def test_job_gets_two_gpus_and_the_four_cores_beside_them(self, slurm: Slurm) -> None:
        job = slurm.run(
            f"grep Cpus_allowed_list /proc/self/status; echo gpus=$SLURM_JOB_GPUS\n{OPEN_GPUS}",
            *TWO_GPUS,
        )
        assert (job.state, job.exit_code) == ("COMPLETED", "0:0")
        assert job.output.splitlines() == [
            "Cpus_allowed_list:\t0-3",
            "gpus=0,1",
            f"gpu 0 errno {errno.ENXIO}",
            f"gpu 1 errno {errno.ENXIO}",
            f"gpu 2 errno {errno.EPERM}",
            f"gpu 3 errno {errno.EPERM}",
        ]

    def test_two_such_jobs_share_the_node_by_sockets(
        self, guest: Guest, slurm: Slurm, release: str
    ) -> None:
        script = (
            "grep Cpus_allowed_list /proc/self/status | cut -f2; echo $SLURM_JOB_GPUS;"
            f" until [ -e {release} ]; do sleep 0.3; done"
        )
        jobs = [slurm.submit(script, *TWO_GPUS, user=user) for user in ("alice", "bob")]
        for job in jobs:
            slurm.wait_state(job, "RUNNING")
        guest.check(f"touch {release}")
        first, second = (
            slurm.finish(job, user=user) for job, user in zip(jobs, ("alice", "bob"), strict=True)
        )
        assert first.output.split() == ["0-3", "0,1"]
        assert second.output.split() == ["4-7", "2,3"]

    def test_step_cgroups_are_found_without_the_job_number(
        self, guest: Guest, slurm: Slurm, release: str
    ) -> None:
        hold = f"until [ -e {release} ]; do sleep 0.3; done"
        job = slurm.submit(f"srun --overlap -n1 -c2 bash -c '{hold}' & {hold}; wait", *TWO_GPUS)
        slurm.wait_state(job, "RUNNING")
        cpus_of_step = {}
        for step in ("batch", "extern", "0"):
            folder = slurm.step_cgroup(job, step)
            assert folder.endswith(f"/step_{step}")
            assert guest.read(f"{folder}/user/cpuset.mems") == "0-1"
            cpus_of_step[step] = guest.read(f"{folder}/user/cpuset.cpus.effective")
        guest.check(f"touch {release}")
        assert slurm.finish(job).state == "COMPLETED"
        assert cpus_of_step == {"batch": "0-3", "extern": "0-3", "0": "0-1"}

    def test_user_cannot_write_the_cpuset_of_a_step(self, slurm: Slurm) -> None:
        job = slurm.run("echo 0-1 >/sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)/cpuset.mems")
        assert job.state == "FAILED"
        assert "Permission denied" in job.output


class TestMemory:
    def test_lies_on_the_node_of_the_cores_that_touch_it(self, slurm: Slurm) -> None:
        (control,) = self.placements(slurm, f"{alloc.COMMAND} --anon-mib 100")
        assert control.cpus == "0-3"
        assert control.mems == "0-1"
        assert control.anon_pages == {0: 100 * alloc.PAGES_PER_MIB}

    def test_follows_a_cpuset_narrowed_at_the_user_level(
        self, guest: Guest, slurm: Slurm, release: str
    ) -> None:
        """Narrowed to the node that its cores are not on, or first touch would do it as well."""
        go = f"{release}-go"
        job = slurm.submit(
            f"until [ -e {go} ]; do sleep 0.2; done;"
            f" {alloc.COMMAND} --anon-mib 100 --file /var/tmp/cached --file-mib 20",
            *TWO_GPUS,
        )
        guest.check(f"echo 1 >{slurm.step_cgroup(job)}/user/cpuset.mems")
        guest.check(f"touch {go}")
        (placed,) = alloc.placements(slurm.finish(job).output)
        assert placed.cpus == "0-3"
        assert placed.mems == "1"
        assert placed.anon_pages == {1: 100 * alloc.PAGES_PER_MIB}
        assert placed.file_mib(1) == pytest.approx(20, abs=2)
        assert placed.file_mib(0) < 1

    def test_moves_when_the_cpuset_is_narrowed_later(
        self, guest: Guest, slurm: Slurm, release: str
    ) -> None:
        job = slurm.submit(f"{alloc.COMMAND} --anon-mib 50 --hold {release}", *TWO_GPUS)
        guest.wait_for(f"grep cpus /home/alice/job-{job}.out", what="the first report")
        guest.check(f"echo 1 >{slurm.step_cgroup(job)}/user/cpuset.mems; touch {release}")
        before, after = alloc.placements(slurm.finish(job).output)
        assert before.anon_pages == {0: 50 * alloc.PAGES_PER_MIB}
        assert after.anon_pages == {1: 50 * alloc.PAGES_PER_MIB}

    def test_beyond_the_limit_of_the_job_is_not_to_be_had(self, slurm: Slurm) -> None:
        job = slurm.run(f"{alloc.COMMAND} --anon-mib 300", "--mem=100M", *TWO_GPUS)
        assert job.state == "OUT_OF_MEMORY"

    @staticmethod
    def placements(slurm: Slurm, script: str) -> list[alloc.Placement]:
        job = slurm.run(script, *TWO_GPUS)
        assert job.state == "COMPLETED", job.output
        return alloc.placements(job.output)


class TestHelpers:
    def test_skip_library_ends_the_named_program_only(
        self, guest: Guest, skip_library: str
    ) -> None:
        assert skip_library == LIBRARY
        skip = f"LD_PRELOAD={skip_library} SKIP_PROGRAM=unwanted"
        assert guest.check(f"{skip} /bin/echo unwanted; {skip} /bin/echo wanted") == "wanted"
