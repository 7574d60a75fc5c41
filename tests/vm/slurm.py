# SPDX-License-Identifier: Apache-2.0
"""A real one-node Slurm inside a guest: controller, node daemon, MUNGE, four GPUs that are none.

It lies where Debian puts Slurm (/etc/slurm, /var/log/slurm) and not in folders of the bed, so that
hooks, daemons and users' commands find it without any setting, as on a real node.

    n1   2 sockets x 4 cores   /dev/nvidia[0-1] at cores 0-3   /dev/nvidia[2-3] at cores 4-7

The device nodes have a real GPU's numbers and no driver: opening one that the job's device filter
allows fails with ENXIO, opening another one with EPERM. That tells the two apart without a GPU.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence

from .errors import GuestError
from .guest import Guest

LOGS = ("/var/log/slurm/slurmctld.log", "/var/log/slurm/slurmd.log")
CGROUP_ROOT = "/sys/fs/cgroup"
GPU_MAJOR = 195
JOB_SECONDS = 300
"""Patience for one short job: 8 to 12 s on two free cores, five times that on busy ones."""

ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"),
    *("BOOT_FAIL", "DEADLINE", "PREEMPTED"),
)

BASE_SETTINGS = {
    "ClusterName": "guest",
    "SlurmctldHost": "n1",
    "AuthType": "auth/munge",
    "SlurmUser": "root",
    "StateSaveLocation": "/var/spool/slurmctld",
    "SlurmdSpoolDir": "/var/spool/slurmd",
    "SlurmctldPidFile": "/run/slurmctld.pid",
    "SlurmdPidFile": "/run/slurmd.pid",
    "SlurmctldLogFile": LOGS[0],
    "SlurmdLogFile": LOGS[1],
    "SlurmctldDebug": "verbose",
    "SlurmdDebug": "verbose",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core_Memory",
    "DefMemPerNode": "400",
    "ReturnToService": "2",
    "GresTypes": "gpu",
    "MpiDefault": "none",
    "PrologFlags": "Alloc,Contain",
    "ProctrackType": "proctrack/cgroup",
    "TaskPlugin": "task/cgroup,task/affinity",
    "JobAcctGatherType": "jobacct_gather/cgroup",
    "JobAcctGatherFrequency": "0",
    "InactiveLimit": "0",
    "KillWait": "5",
    "MessageTimeout": "60",
    "NodeName": "n1 Sockets=2 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=3600 Gres=gpu:a100:4",
    "PartitionName": "main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
}

GRES_CONF = """\
AutoDetect=off
Name=gpu Type=a100 File=/dev/nvidia[0-1] Cores=0-3
Name=gpu Type=a100 File=/dev/nvidia[2-3] Cores=4-7
"""

CGROUP_CONF = """\
CgroupPlugin=cgroup/v2
IgnoreSystemd=yes
EnableControllers=yes
ConstrainCores=yes
ConstrainDevices=yes
ConstrainRAMSpace=yes
"""


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Paths in the guest of the scripts that Slurm runs around a job, '' for none."""

    prolog: str = ""
    epilog: str = ""
    task_prolog: str = ""
    task_epilog: str = ""

    def settings(self) -> dict[str, str]:
        """Return the hooks in slurm.conf's words."""
        named = {
            "Prolog": self.prolog,
            "Epilog": self.epilog,
            "TaskProlog": self.task_prolog,
            "TaskEpilog": self.task_epilog,
        }
        return {name: path for name, path in named.items() if path}


@dataclasses.dataclass(frozen=True)
class Job:
    """A job as it ended: its state and exit code in Slurm's words, and what it printed."""

    id: int
    state: str
    exit_code: str
    output: str


def slurm_conf(
    hooks: Hooks, settings: Mapping[str, str] | None = None, extra: Sequence[str] = ()
) -> str:
    """Return slurm.conf: the bed's settings, those of the caller instead, hooks, further lines."""
    merged = BASE_SETTINGS | hooks.settings() | dict(settings or {})
    last = {name: merged.pop(name) for name in ("NodeName", "PartitionName")}
    lines = [f"{name}={value}" for name, value in (merged | last).items()]
    return "\n".join([*lines, *extra]) + "\n"


def slurm_up(
    guest: Guest,
    hooks: Hooks | None = None,
    *,
    settings: Mapping[str, str] | None = None,
    extra: Sequence[str] = (),
) -> Slurm:
    """Start Slurm in the guest, in place of one that runs there, and wait until n1 is idle.

    `settings` replaces or adds single settings of slurm.conf, `extra` adds whole lines at its end.
    Files that these name must be in the guest already. Jobs and state of an earlier one are gone.
    """
    slurm = Slurm(guest)
    slurm.down()
    guest.write("/etc/slurm/slurm.conf", slurm_conf(hooks or Hooks(), settings, extra))
    guest.write("/etc/slurm/gres.conf", GRES_CONF)
    guest.write("/etc/slurm/cgroup.conf", CGROUP_CONF)
    guest.check(_START)
    guest.logs = [*guest.logs, *(path for path in LOGS if path not in guest.logs)]
    guest.wait_for('[ "$(sinfo -h -o %T)" = idle ]', 120, what="n1 to be idle")
    return slurm


_START = f"""
for gpu in 0 1 2 3; do
    [ -e /dev/nvidia$gpu ] || mknod -m 666 /dev/nvidia$gpu c {GPU_MAJOR} $gpu
done
install -d -o munge -g munge /run/munge /var/log/munge /var/lib/munge
install -d /var/spool/slurmctld /var/spool/slurmd /var/log/slurm
if ! munge -n >/dev/null 2>&1; then
    setpriv --reuid munge --regid munge --clear-groups munged --force || exit 1
fi
slurmctld -c && slurmd
"""

_STOP = f"""
[ -e /run/slurmctld.pid ] || [ -e /run/slurmd.pid ] || exit 0
scancel --signal=KILL --full --me 2>/dev/null
for daemon in slurmd slurmctld; do
    pid=$(cat /run/$daemon.pid 2>/dev/null) || continue
    kill "$pid"
    for _ in $(seq 100); do [ -d /proc/$pid ] || break; sleep 0.1; done
    kill -9 "$pid" 2>/dev/null
    rm -f /run/$daemon.pid
done
for scope in {CGROUP_ROOT}/system.slice/*slurmstepd.scope; do
    [ -d "$scope" ] || continue
    echo 1 >"$scope/cgroup.kill"
    for _ in $(seq 100); do
        grep -q 'populated 1' "$scope/cgroup.events" || break
        sleep 0.1
    done
    find "$scope" -depth -type d -exec rmdir {{}} + 2>/dev/null
done
rm -rf /var/spool/slurmctld /var/spool/slurmd /var/log/slurm
true
"""


class Slurm:
    """The running Slurm of a guest: submit, look, wait. Users are 'alice' and 'bob'."""

    def __init__(self, guest: Guest):
        self.guest = guest

    def down(self) -> None:
        """Kill all jobs and Slurm's daemons, and forget their state. MUNGE stays."""
        self.guest.check(_STOP)

    def submit(self, script: str, *options: str, user: str = "alice") -> int:
        """Submit a bash script (without its #! line) and return the job's number."""
        arguments = shlex.join(["--parsable", "--output=job-%j.out", *options])
        batch = f"#!/bin/bash\n{script}\n".encode()
        answer = self.guest.run(f"sbatch {arguments}", user=user, stdin=batch)
        if answer.rc != 0:
            raise GuestError(f"sbatch {arguments} {answer.describe()}")
        return int(answer.stdout.split(";")[0])

    def job(self, job: int) -> dict[str, str]:
        """Return what `scontrol show job` says, by its own names."""
        return parse_record(self.guest.check(f"scontrol -d show job --oneliner {job}"))

    def wait_state(self, job: int, *states: str, timeout: float = JOB_SECONDS) -> None:
        """Wait until the job is in one of the states (in any final one where none is given)."""
        wanted = "|".join(states or ENDED)
        condition = f"scontrol show job {job} | grep -E 'JobState=({wanted}) '"
        self.guest.wait_for(condition, timeout, what=f"job {job} to be {wanted}", interval=0.5)

    def finish(self, job: int, *, user: str = "alice", timeout: float = JOB_SECONDS) -> Job:
        """Wait for the end of a job and return how it ended, with its output."""
        self.wait_state(job, timeout=timeout)
        record = self.job(job)
        output = self.guest.check(f"cat job-{job}.out", user=user)
        return Job(job, record["JobState"], record["ExitCode"], output)

    def run(
        self, script: str, *options: str, user: str = "alice", timeout: float = JOB_SECONDS
    ) -> Job:
        """Submit a script and wait for its end, whatever that is."""
        return self.finish(self.submit(script, *options, user=user), user=user, timeout=timeout)

    def cancel(self, job: int) -> None:
        """Cancel a job and wait until it has left the node."""
        self.guest.check(f"scancel {job} || true")
        self.wait_state(job)

    def step_cgroup(self, job: int, step: str = "batch") -> str:
        """Return the folder `.../step_X` of a running step ('batch', 'extern', '0', ...).

        It is found through the step's processes: the path holds the job's number in some releases
        of Slurm and not in others.
        """
        of_step = f"awk '$3 == \"{step}\" && $1 > 0 {{print $1; exit}}'"
        pid = self.guest.wait_for(
            f"scontrol listpids {job} | {of_step} | grep .", what=f"a process of step {job}.{step}"
        )
        path = self.guest.check(f"sed -n 's/^0:://p' /proc/{pid}/cgroup")
        return CGROUP_ROOT + step_folder(path)


def parse_record(text: str) -> dict[str, str]:
    """Return the NAME=VALUE pairs of scontrol's one-line form; values may hold blanks."""
    pairs = re.split(r"\s+(?=[A-Za-z][\w:/]*=)", text.strip())
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def step_folder(path: str) -> str:
    """Return the part of a process's cgroup path that ends with its `step_X`."""
    found = re.match(r".*?/step_[^/]+(?=/|$)", path)
    if not found:
        raise GuestError(f"not in a Slurm step: {path}")
    return found.group(0)
