"""A job's CPUs on this node as slurmctld tells them, for node.cpu_source = slurm.

Meant for labs whose nodes pretend to have more cores than the machine, where a task's own
affinity says nothing. Slurm prints its abstract ids (block order); they equal the kernel's
numbers on a machine with one thread per core and are taken as such here.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import threading
from pathlib import Path

from crater_slurm.config.settings import Slurm
from crater_slurm.errors import UsageError
from crater_slurm.model.cpuset import parse_cpulist
from crater_slurm.slurm.hostlist import expand

_log = logging.getLogger("crater.node.slurmcpus")
_GROUP = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S+)")
#: Shorter than the hooks' deadline, so that a slow slurmctld costs the variables, not the answer.
_TIMEOUT_SECONDS = 1.5


def parse(text: str, node: str) -> tuple[int, ...]:
    """CPUs of a node in the output of ``scontrol show job -d -o``; none when it isn't there."""
    cpus: set[int] = set()
    for nodes, ids in _GROUP.findall(text):
        try:
            if node in expand(nodes):
                cpus |= set(parse_cpulist(ids))
        except (UsageError, ValueError):
            continue
    return tuple(sorted(cpus))


class SlurmCpus:
    """Asks once per job and remembers; ``forget`` when the job ends."""

    def __init__(self, slurm: Slurm) -> None:
        self._command = str(Path(slurm.bin_dir or "") / "scontrol")
        self._environment = {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")}
        for name in ("SLURM_CONF", "MUNGE_SOCKET"):
            if name in os.environ:
                self._environment[name] = os.environ[name]
        if slurm.conf:
            self._environment["SLURM_CONF"] = str(slurm.conf)
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], tuple[int, ...]] = {}

    def cpus(self, job_id: str, node: str) -> tuple[int, ...]:
        """CPUs of a job on a node; none, with a log line, when Slurm doesn't say."""
        with self._lock:
            if (job_id, node) in self._known:
                return self._known[job_id, node]
        try:
            done = subprocess.run(
                [self._command, "show", "job", "-d", "-o", job_id],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_SECONDS,
                env=self._environment,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("slurmcpus: couldn't ask Slurm for the CPUs of job %s: %s", job_id, error)
            return ()
        # Asked for an array's or a het job's first job, scontrol shows all of them.
        lines = [
            line
            for line in done.stdout.splitlines()
            if line.startswith(f"JobId={job_id} ") or not line.startswith("JobId=")
        ]
        found = parse("\n".join(lines), node)
        if found:
            with self._lock:
                self._known[job_id, node] = found
        return found

    def forget(self, job_id: str) -> None:
        with self._lock:
            self._known = {key: cpus for key, cpus in self._known.items() if key[0] != job_id}
