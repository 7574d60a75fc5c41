"""A lab that is up, as something to use: run commands in it, submit jobs, look at them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crater_slurm.errors import LabError
from crater_slurm.lab import cgroups, inventory, services
from crater_slurm.lab.inventory import Inventory
from crater_slurm.lab.namespaces import Namespaces
from crater_slurm.lab.places import INSIDE, Folders
from crater_slurm.lab.runtime import Runtime
from crater_slurm.lab.services import ServiceName, Supervisor
from crater_slurm.lab.spec import LabSpec
from crater_slurm.slurm.records import parse_record

#: States in which a job does not change any more.
ENDED = frozenset(
    {
        *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"),
        *("PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
    }
)


class Cluster:
    """What can be done with a lab while it is up."""

    def __init__(self, spec: LabSpec | None = None, **fields: Any) -> None:
        self.spec = spec or LabSpec(**fields)
        self.folders = Folders(self.spec.folder)
        self.runtime = Runtime(self.folders.base / "runtime.json")

    @property
    def supervisor(self) -> Supervisor:
        """Starts, stops and finds the services of the lab while it is up."""
        groups = [Path(group) for group in self.runtime.facts().get("groups", [])]
        join = (lambda: cgroups.join(groups, os.getpid())) if groups else None
        return Supervisor(self.folders, self.namespaces, join)

    @property
    def namespaces(self) -> Namespaces:
        init = self.runtime.pid("init")
        if init is None:
            raise LabError(f"the lab {self.spec.name!r} is not up; crater lab up {self.spec.name}")
        facts = self.runtime.facts()
        return Namespaces(init, facts["rooted"], facts["cgroup"])

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "alice",
        node: str | None = None,
        input: str | None = None,
        timeout: float | None = 60,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        machine_side: bool = False,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the lab and return it with its text output.

        On the controller, or with a node's mounts and name. ``machine_side`` takes the machine's
        programs instead of the lab's Slurm's root. ``check``: LabError when it fails.
        """
        command = self.command(
            argv, user=user, node=node, cwd=cwd, environment=environment, machine_side=machine_side
        )
        try:
            done = subprocess.run(
                command,
                input=input if input is not None else "",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
                preexec_fn=self.supervisor.before_start,
            )
        except subprocess.TimeoutExpired as error:
            raise LabError(f"{argv[0]} did not end within {timeout:g} s in the lab") from error
        if check and done.returncode:
            said = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
            raise LabError(f"{' '.join(argv)}: {said}")
        return done

    def command(self, argv: Sequence[str], **how: Any) -> list[str]:
        """The command line that runs ``argv`` in the lab, for callers with pipes of their own."""
        user = how.get("user", "root")
        if not self.home(user).is_dir():
            raise LabError(f"a lab has no user {user!r}; there are alice, bob and root")
        return self.namespaces.command(argv, **how)

    def node_run(
        self, node: str, argv: Sequence[str], **how: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, as root unless ``user`` says otherwise."""
        return self.run(argv, node=node, **{"user": "root", **how})

    def sbatch(
        self,
        *options: str,
        script: str | None = None,
        wrap: str | None = None,
        user: str = "alice",
        **how: Any,
    ) -> int:
        """Submit a batch script (or a command) and return its job id; LabError when refused."""
        text = script if script is not None else f"#!/bin/sh\n{wrap or 'true'}\n"
        done = self.run(["sbatch", "--parsable", *options], user=user, input=text, **how)
        if done.returncode:
            raise LabError(f"sbatch refused the job: {done.stderr.strip()}")
        return int(done.stdout.strip().splitlines()[-1].split(";")[0])

    def job(self, job_id: int | str) -> dict[str, str]:
        """What slurmctld knows of a job, by Slurm's own names."""
        done = self.run(["scontrol", "-d", "-o", "show", "job", str(job_id)], user="root")
        if done.returncode:
            raise LabError(f"job {job_id}: {done.stderr.strip()}")
        return parse_record(done.stdout.splitlines()[0])

    def wait_job(
        self,
        job_id: int | str,
        states: Sequence[str] | frozenset[str] = ENDED,
        timeout: float = 30,
    ) -> dict[str, str]:
        """Wait until a job is in one of the states; LabError when it ended otherwise or is late."""
        deadline = time.monotonic() + timeout
        wanted = {states} if isinstance(states, str) else set(states)
        while True:
            job = self.job(job_id)
            state = job.get("JobState", "").split(" ")[0]
            if state in wanted:
                return job
            if state in ENDED or time.monotonic() > deadline:
                raise LabError(
                    f"job {job_id} is {state} ({job.get('Reason', '')}), not "
                    f"{' or '.join(sorted(wanted))}"
                )
            time.sleep(0.05)

    def node(self, name: str) -> dict[str, str]:
        """What slurmctld knows of a node, by Slurm's own names."""
        done = self.run(["scontrol", "-o", "show", "node", name], user="root", check=True)
        return parse_record(done.stdout.splitlines()[0])

    def node_states(self) -> dict[str, str]:
        """State of every node, in lower case and without flags."""
        done = self.run(["sinfo", "--noheader", "--Node", "--format=%N %T"], user="root")
        states = {}
        for line in done.stdout.splitlines():
            name, _, state = line.strip().partition(" ")
            states[name] = state.strip().rstrip("*~#!%$@^-").lower()
        return states

    @property
    def nodes(self) -> Inventory:
        return inventory.load(self.spec.inventory)

    @property
    def version(self) -> tuple[int, int]:
        """Slurm's release."""
        major, minor = self.runtime.facts().get("version", (0, 0))
        return int(major), int(minor)

    def can_work_in(self, folder: Path, user: str) -> bool:
        """Whether a folder of the machine is there in the lab too, and the user may write in it."""
        seen = Path(f"/proc/{self.namespaces.init}/root") / folder.relative_to("/")
        if not seen.exists() or not seen.samefile(folder):
            return False
        test = ["test", "-w", str(folder), "-a", "-x", str(folder)]
        return self.run(test, user=user, cwd="/").returncode == 0

    def bring(self, file: Path, user: str = "alice") -> str:
        """Copy a file of the machine to a user's home, theirs; returns its name there."""
        target = self.home(user) / file.name
        shutil.copy(file, target)
        owner = self.home(user).stat()
        os.chown(target, owner.st_uid, owner.st_gid)
        return file.name

    def path(self, inside: str | Path) -> Path:
        """Where a file below /crater-lab lies on the machine."""
        return self.folders.base / Path(inside).relative_to(INSIDE)

    def home(self, user: str = "alice") -> Path:
        """A user's home folder on the machine; jobs start there."""
        return self.folders.home(user)

    def log(self, service: ServiceName) -> str:
        """Everything a service has logged and printed; a node's name means its slurmd."""
        name = services.key(service)
        name = f"slurmd@{name}" if self.folders.node(name).is_dir() else name
        texts = [
            file.read_text(errors="replace")
            for file in (self.folders.log / f"{name}.log", self.supervisor.output(name))
            if file.exists()
        ]
        if not texts:
            known = sorted({f.stem for f in self.folders.log.iterdir()})
            raise LabError(f"{name!r} has no log; there are {', '.join(known)}")
        return texts[0] or texts[-1]
