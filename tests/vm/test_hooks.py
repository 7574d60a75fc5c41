# SPDX-License-Identifier: Apache-2.0
"""The bed runs hooks and the node daemon as the tests of the product will ask it to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .errors import GuestError
from .guest import Guest
from .node import SOCKET, crater_node
from .slurm import Hooks, Slurm, slurm_up

FOLDER = "/opt/hooks"
LOG = "/var/log/hooks.log"

STAND_IN = """\
import json, os, signal, socket, sys
settings = json.load(open("/etc/crater/crater.yaml"))
if settings.get("broken"):
    sys.exit("stand-in: broken by its settings")
print("stand-in: in", open("/proc/self/cgroup").read().strip(), flush=True)
listening = socket.socket(socket.AF_UNIX)
path = settings.get("node", {}).get("socket", "/run/crater/node.sock")
listening.bind(path)
listening.listen()
signal.pause()
"""
"""A node daemon that does nothing, so that the bed's own part in starting one is tried alone."""


@pytest.fixture(scope="module")
def slurm(guest: Guest) -> Iterator[Slurm]:
    """A Slurm whose prolog and epilog log a line and whose task prolog sets a variable."""
    for hook in ("prolog", "epilog"):
        line = f"{hook} $(id -un) job=$SLURM_JOB_ID gpus=$SLURM_JOB_GPUS"
        guest.write(f"{FOLDER}/{hook}", f'#!/bin/sh\necho "{line}" >>{LOG}\n', 0o755)
    task_prolog = '#!/bin/sh\necho "export FROM_TASK_PROLOG=$(id -un)"\n'
    guest.write(f"{FOLDER}/task_prolog", task_prolog, 0o755)
    hooks = Hooks(
        prolog=f"{FOLDER}/prolog", epilog=f"{FOLDER}/epilog", task_prolog=f"{FOLDER}/task_prolog"
    )
    guest.check(f"rm -f {LOG}")
    running = slurm_up(guest, hooks, settings={"DefMemPerNode": "123"}, extra=["# the end"])
    yield running
    running.down()


def test_hooks_run_around_a_job(guest: Guest, slurm: Slurm) -> None:
    job = slurm.run(
        "echo $FROM_TASK_PROLOG; srun -n1 sh -c 'echo $FROM_TASK_PROLOG'", "--gres=gpu:1"
    )
    assert job.output.split() == ["alice", "alice"]
    logged = guest.wait_for(f"grep -q epilog {LOG} && cat {LOG}")
    assert logged.splitlines() == [
        f"prolog root job={job.id} gpus=0",
        f"epilog root job={job.id} gpus=0",
    ]


def test_settings_and_extra_lines_reach_slurm(guest: Guest, slurm: Slurm) -> None:
    assert slurm.guest.read("/etc/slurm/slurm.conf").endswith("\n# the end")
    assert guest.check("scontrol show config | awk '/^DefMemPerNode/ {print $3}'") == "123"


def test_task_prolog_can_be_skipped_by_the_owner_of_a_job(slurm: Slurm, skip_library: str) -> None:
    """Slurm runs TaskProlog with the job's environment: it is a service, not a boundary."""
    job = slurm.run(
        "unset FROM_TASK_PROLOG\n"
        f"LD_PRELOAD={skip_library} SKIP_PROGRAM=task_prolog"
        " srun -n1 sh -c 'echo from=$FROM_TASK_PROLOG'"
    )
    assert job.output == "from="


class TestNodeDaemon:
    @pytest.fixture(autouse=True)
    def stand_in(self, guest: Guest) -> None:
        guest.write("/usr/lib/python3/dist-packages/node_stand_in.py", STAND_IN)

    def test_starts_with_its_settings_and_is_stopped(self, guest: Guest) -> None:
        with crater_node(guest, {"node": {}}, module="node_stand_in") as daemon:
            assert daemon.socket == SOCKET
            assert daemon.alive()
            in_cgroup = "stand-in: in 0::/system.slice/crater-io-daemon.service"
            assert daemon.log() == in_cgroup
            pid = daemon.pid
        assert guest.run(f"grep -q stand_in /proc/{pid}/cmdline").rc != 0

    def test_is_waited_for_at_the_socket_of_its_settings(self, guest: Guest) -> None:
        settings = {"node": {"socket": "/run/elsewhere/node.sock"}}
        with crater_node(guest, settings, module="node_stand_in") as daemon:
            assert guest.run("[ -S /run/elsewhere/node.sock ]").rc == 0
            daemon.stop("KILL")
            assert not daemon.alive()

    def test_that_ends_at_its_start_is_an_error_with_its_log(self, guest: Guest) -> None:
        with (
            pytest.raises(GuestError, match=r"(?s)ended at its start.*broken by its settings"),
            crater_node(guest, {"broken": True}, module="node_stand_in"),
        ):
            pass

    def test_gets_the_source_tree(self, guest: Guest) -> None:
        with crater_node(guest, {}, module="node_stand_in"):
            found = guest.check(
                "cd / && PYTHONPATH=/opt/crater /usr/bin/python3 -c"
                " 'import crater_slurm; print(crater_slurm.__file__)'"
            )
        assert found == "/opt/crater/crater_slurm/__init__.py"

    def test_of_this_tree_starts_with_its_defaults(self, guest: Guest) -> None:
        with crater_node(guest, {}) as daemon:
            assert daemon.alive()
