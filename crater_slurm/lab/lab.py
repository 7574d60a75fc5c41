"""A throwaway Slurm cluster with many nodes on this machine.

``Lab(spec).up()`` starts it in seconds in its own mount, process, network, IPC and host name
namespaces; ``down()`` leaves nothing. Everything in between goes through this class, for the
command line and for tests alike.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal as signals
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from crater_slurm import paths
from crater_slurm.errors import LabError
from crater_slurm.lab import cgroups, conf, inventory, roots, services
from crater_slurm.lab.inventory import Inventory
from crater_slurm.lab.namespaces import Namespaces
from crater_slurm.lab.places import INSIDE, USERS, Folders
from crater_slurm.lab.services import ServiceName, Supervisor, tail
from crater_slurm.lab.spec import LabSpec, labs_folder
from crater_slurm.slurm.client import parse_record

_TOOLS = ("unshare", "nsenter", "mount", "umount", "setpriv", "ip", "chroot")
#: States in which a job does not change any more.
ENDED = frozenset(
    {
        *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"),
        *("PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
    }
)


class Lab:
    """One lab, running or not. ``Lab(name="x", inventory="demo", ...)`` takes LabSpec's fields."""

    def __init__(self, spec: LabSpec | None = None, **fields: Any) -> None:
        self.spec = spec or LabSpec(**fields)
        self.folders = Folders(self.spec.folder)
        self.seconds_to_up = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def attach(cls, name: str) -> Lab:
        """The lab of that name that is up; LabError when there is none."""
        file = labs_folder() / name / "lab.json"
        if not file.exists():
            known = ", ".join(lab.spec.name for lab in cls.all()) or "none"
            raise LabError(f"there is no lab {name!r}; up are: {known}")
        return cls(LabSpec.load(file))

    @classmethod
    def all(cls) -> list[Lab]:
        """Every lab that was started and not taken down."""
        return [cls(LabSpec.load(file)) for file in sorted(labs_folder().glob("*/lab.json"))]

    # --- life ---------------------------------------------------------------------------------

    def up(self, say: Callable[[str], None] = lambda _: None, timeout: float = 60) -> Lab:
        """Start it, and return when its nodes take jobs; LabError says why it can't."""
        _require_root()
        begin = time.monotonic()
        slurm = roots.find(self.spec.slurm, say)
        nodes = inventory.load(self.spec.inventory)
        if self.spec.cgroup and (why := cgroups.refusal()):
            raise LabError(f"this machine allows no lab with --cgroup: {why}")
        self._claim()
        try:
            self._prepare(slurm, nodes)
            self._start_init(slurm)
            self._start_services(nodes, timeout)
        except BaseException:
            self.down()
            raise
        self.seconds_to_up = time.monotonic() - begin
        return self

    def down(self) -> None:
        """End every process of the lab and remove all that it left; fine if it is not up."""
        base = self.folders.base
        known = any((base / name).exists() for name in ("lab.json", "runtime.json"))
        if base.exists() and not known and any(base.iterdir()):
            raise LabError(f"{base} is no lab's folder, and will not be removed; use another name")
        runtime = self._runtime()
        if "unshare" in runtime:
            _end(runtime["unshare"], runtime["unshare_time"])
            if self._process:
                self._process.wait()
                self._process = None
        if "init" in runtime:
            _wait_gone(runtime["init"], runtime["init_time"])
        if self.spec.cgroup:
            cgroups.remove(self.spec.name)
        if base.exists():
            shutil.rmtree(base)
        with contextlib.suppress(OSError):
            labs_folder().rmdir()

    def __enter__(self) -> Lab:
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.down()

    @property
    def is_up(self) -> bool:
        runtime = self._runtime()
        return "init" in runtime and _alive(runtime["init"], runtime["init_time"])

    def _claim(self) -> None:
        """Make the lab's folder, ours alone; what a crash left of an older one is removed."""
        name = self.spec.name
        labs_folder().mkdir(parents=True, exist_ok=True)
        handle = os.open(labs_folder(), os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if self.is_up:
                raise LabError(f"the lab {name!r} is up already; crater lab down {name}")
            runtime = self._runtime()
            if "starter" in runtime and _alive(runtime["starter"], runtime["starter_time"]):
                raise LabError(f"the lab {name!r} is being started by process {runtime['starter']}")
            self.down()
            self.folders.base.mkdir(parents=True, mode=0o755)
            starter = psutil.Process()
            self._note(starter=starter.pid, starter_time=starter.create_time())
        finally:
            os.close(handle)

    def _note(self, **facts: Any) -> None:
        """Remember how the lab runs, for every process that asks later."""
        file = self.folders.base / "runtime.json"
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(facts))
        fresh.replace(file)

    def _prepare(self, slurm: roots.SlurmRoot, nodes: Inventory) -> None:
        f = self.folders
        for folder in (f.etc, f.crater_etc, f.log, f.state, f.pids, f.slurm_pids, f.bin, f.devices):
            folder.mkdir(mode=0o755)
        for folder in (f.tmp, f.munge, f.view, f.root, f.controller, f.base / "home"):
            folder.mkdir(mode=0o755)
        f.tmp.chmod(0o1777)
        f.munge.chmod(0o700)
        (f.munge / "munge.key").write_bytes(secrets.token_bytes(128))
        (f.munge / "munge.key").chmod(0o600)
        for owned in (f.state, f.slurm_pids, f.log):
            os.chown(owned, slurm.slurm_uid, 0)
        f.home("root").mkdir(mode=0o700)
        for user in USERS:
            f.home(user.name).mkdir(mode=0o755)
            os.chown(f.home(user.name), user.uid, user.uid)
        for name in nodes.names if not self.spec.controller_only else ():
            for part in ("run", "lib", "spool"):
                (f.node(name) / part).mkdir(parents=True)
        for part in ("run", "lib"):
            (f.controller / part).mkdir()
        conf.write_slurm(self.spec, nodes, f, slurm.version, slurm.slurm_user)
        conf.write_crater(self.spec, f)
        conf.write_devices(nodes, f)
        if not self.spec.controller_only:
            conf.write_profiles(nodes, f)
        conf.write_commands(f, slurm.commands(), rooted=slurm.folder is not None)
        needed = [paths.PACKAGE.parent, Path(sys.prefix), Path(sys.base_prefix)]
        conf.init_file(self.spec, nodes, f, slurm.folder, needed)
        self.spec.save(f.base / "lab.json")

    def _start_init(self, slurm: roots.SlurmRoot) -> None:
        _require_tools()
        groups = cgroups.create(self.spec.name) if self.spec.cgroup else None
        command = ["unshare", "--mount", "--pid", "--net", "--uts", "--ipc"]
        command += ["--cgroup"] if groups else []
        command += ["--fork", "--kill-child=KILL", "--propagation", "private"]
        command += [sys.executable, "-m", "crater_slurm.lab.init", str(self.folders.base)]
        receive, send = os.pipe()
        with (self.folders.log / "init.out").open("wb") as output:
            process = subprocess.Popen(
                [*command, str(send)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[send],
                start_new_session=True,
                cwd="/",
                env={
                    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                    "PYTHONPATH": str(paths.PACKAGE.parent),
                    "PYTHONDONTWRITEBYTECODE": "1",
                },
                preexec_fn=(lambda: cgroups.join(groups.start, os.getpid())) if groups else None,
            )
        os.close(send)
        self._process = process
        runtime: dict[str, Any] = {
            "unshare": process.pid,
            "unshare_time": psutil.Process(process.pid).create_time(),
        }
        self._note(**runtime)
        with os.fdopen(receive, "rb") as ready:
            said = ready.read(5)
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        if said != b"ready" or not children:
            raise LabError(f"the lab can't be set up: {tail(self.folders.log / 'init.out', 5)}")
        if groups:
            cgroups.join(groups.services, process.pid)
        self._note(
            **runtime,
            init=children[0].pid,
            init_time=children[0].create_time(),
            rooted=slurm.folder is not None,
            version=list(slurm.version),
            services=[str(group) for group in groups.services] if groups else [],
        )

    def _runtime(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folders.base / "runtime.json").read_text()))
        except (OSError, ValueError):
            return {}

    # --- services -----------------------------------------------------------------------------

    def _start_services(self, nodes: Inventory, timeout: float) -> None:
        supervisor = self.supervisor
        supervisor.start(services.munged())
        deadline = time.monotonic() + timeout
        supervisor.start(services.slurmctld(clean=True))
        if not self.spec.controller_only:
            for node in nodes.names:
                supervisor.start(services.slurmd(node))
        self._wait_controller(deadline)
        if not self.spec.controller_only:
            self._wait_nodes(nodes.names, deadline)
        if self.spec.crater:
            if self.spec.seeded:
                conf.seed_store(nodes, self.folders)
            self._start_crater(nodes, deadline)

    def _start_crater(self, nodes: Inventory, deadline: float) -> None:
        """crater's daemons, as far as this installation has them; all answer on return."""
        daemons = [services.scheduler()] if "scheduler" in self.spec.daemons else []
        if "node" in self.spec.daemons and not self.spec.controller_only:
            daemons += [services.node_daemon(node) for node in nodes.names]
        started = [daemon for daemon in daemons if daemon is not None]
        for daemon in started:
            self.supervisor.start(daemon)
        for daemon in started:
            run = self.folders.node(daemon.node) if daemon.node else self.folders.controller
            socket = run / "run" / ("node.sock" if daemon.node else "filter.sock")
            self._wait_socket(daemon.name, socket, deadline)

    def _wait_socket(self, service: str, socket: Path, deadline: float) -> None:
        while not socket.exists():
            ended = self.supervisor.pid(service) is None
            if ended or time.monotonic() > deadline:
                what = "ended at its start" if ended else f"does not listen on {socket.name}"
                raise LabError(f"{service} {what}:\n{self._why(service)}")
            time.sleep(0.05)

    @property
    def supervisor(self) -> Supervisor:
        """Starts, stops and finds the services of the lab while it is up."""
        runtime = self._runtime()
        groups = [Path(g) for g in runtime.get("services", [])]
        join = (lambda: cgroups.join(groups, os.getpid())) if groups else None
        return Supervisor(self.folders, self.namespaces, join)

    @property
    def namespaces(self) -> Namespaces:
        runtime = self._runtime()
        if "init" not in runtime or not _alive(runtime["init"], runtime["init_time"]):
            raise LabError(f"the lab {self.spec.name!r} is not up; crater lab up {self.spec.name}")
        return Namespaces(runtime["init"], runtime["rooted"], self.spec.cgroup)

    def _wait_controller(self, deadline: float) -> None:
        while True:
            if self.supervisor.pid("slurmctld") is None:
                raise LabError(f"slurmctld ended at its start:\n{self._why('slurmctld')}")
            if "UP" in self.run(["scontrol", "ping"], user="root").stdout:
                return
            if time.monotonic() > deadline:
                raise LabError(f"slurmctld does not answer:\n{self._why('slurmctld')}")
            time.sleep(0.05)

    def _wait_nodes(self, names: Sequence[str], deadline: float) -> None:
        while True:
            states = self.node_states()
            waiting = [n for n in names if states.get(n) not in ("idle", "mixed", "allocated")]
            if not waiting:
                return
            first = waiting[0]
            refused = any(w in states.get(first, "") for w in ("inval", "drain"))
            if refused or time.monotonic() > deadline:
                reason = self.node(first).get("Reason", "")
                raise LabError(
                    f"node {first} is {states.get(first, 'unknown to slurmctld')}"
                    f"{f' ({reason})' if reason else ''}:\n{self._why(f'slurmd@{first}')}"
                )
            time.sleep(0.05)

    def _why(self, service: str) -> str:
        """The lines that tell most about a service that failed."""
        return tail(self.folders.log / f"{service}.log", 5) or tail(
            self.folders.log / f"{service}.out", 5
        )

    def start(self, service: ServiceName) -> None:
        """Start a service that was stopped or killed."""
        self.supervisor.start(self._service(services.key(service)))

    def stop(self, service: ServiceName) -> None:
        """End a service in order and wait for it."""
        self.supervisor.stop(services.key(service))

    def kill(self, service: ServiceName) -> None:
        """End a service as a crash would."""
        self.supervisor.stop(services.key(service), signals.SIGKILL)

    def signal(self, service: ServiceName, number: signals.Signals) -> None:
        """Send a signal to a service, SIGSTOP for instance."""
        self.supervisor.signal(services.key(service), number)

    def restart_slurmctld(self, timeout: float = 30) -> None:
        """Restart slurmctld, which keeps its jobs, and wait until it answers."""
        self.stop("slurmctld")
        self.start("slurmctld")
        self._wait_controller(time.monotonic() + timeout)

    def _service(self, name: str) -> services.Service:
        kind, _, node = name.partition("@")
        made: Mapping[str, Callable[[], services.Service | None]] = {
            "munged": services.munged,
            "slurmctld": services.slurmctld,
            "scheduler": services.scheduler,
            "slurmd": lambda: services.slurmd(node),
            "node": lambda: services.node_daemon(node),
        }
        service = made[kind]() if kind in made else None
        if service is None:
            raise LabError(f"a lab has no service {name!r}; there are {', '.join(made)}")
        return service

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

    # --- use ----------------------------------------------------------------------------------

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
        major, minor = self._runtime().get("version", (0, 0))
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


def _require_root() -> None:
    if os.geteuid() != 0:
        raise LabError("a lab makes namespaces and device files, so it must be started as root")


def _require_tools() -> None:
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        raise LabError(f"a lab needs {', '.join(missing)}; install util-linux and iproute2")


def _alive(pid: int, created: float) -> bool:
    """Whether that very process runs. A zombie does not: its parent may take its time."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) < 1
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _end(pid: int, created: float) -> None:
    if _alive(pid, created):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signals.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _wait_gone(pid: int, created: float, seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while _alive(pid, created):
        if time.monotonic() > deadline:
            raise LabError(f"the lab's process {pid} can't be ended; is a job stuck in the kernel?")
        time.sleep(0.01)
