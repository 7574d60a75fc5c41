"""The steps that start a lab: its folder, its pid 1, its services."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import psutil

from crater_slurm import paths
from crater_slurm.errors import LabError
from crater_slurm.lab import accounting, cgroups, conf, ready, services
from crater_slurm.lab.cluster import Cluster
from crater_slurm.lab.inventory import Inventory
from crater_slurm.lab.places import USERS
from crater_slurm.lab.roots import SlurmRoot
from crater_slurm.lab.runtime import identity
from crater_slurm.lab.services import tail


def prepare(lab: Cluster, slurm: SlurmRoot, nodes: Inventory) -> None:
    """Fill the lab's folder: configuration, keys, device files, homes."""
    spec, f = lab.spec, lab.folders
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
    _make_homes(lab)
    for part in ("run", "lib"):
        (f.controller / part).mkdir()
    if not spec.controller_only:
        for name in nodes.names:
            for part in ("run", "lib", "spool"):
                (f.node(name) / part).mkdir(parents=True)
        conf.write_profiles(nodes, f)
    if spec.accounting:
        accounting.prepare(lab, slurm)
    conf.write_slurm(spec, nodes, f, slurm.version, slurm.slurm_user)
    conf.write_crater(spec, f)
    conf.write_devices(nodes, f)
    conf.write_commands(f, slurm.commands(), rooted=slurm.folder is not None)
    needed = [paths.PACKAGE.parent, Path(sys.prefix), Path(sys.base_prefix)]
    conf.init_file(spec, nodes, f, slurm.folder, needed)
    spec.save(f.base / "lab.json")


def _make_homes(lab: Cluster) -> None:
    lab.home("root").mkdir(mode=0o700)
    for user in USERS:
        lab.home(user.name).mkdir(mode=0o755)
        os.chown(lab.home(user.name), user.uid, user.uid)


def start_init(lab: Cluster, slurm: SlurmRoot) -> subprocess.Popen[bytes]:
    """Start pid 1 in new namespaces and wait until it has built what the lab sees."""
    groups = cgroups.create(lab.spec.name) if lab.spec.cgroup else None
    output = lab.folders.log / "init.out"
    receive, send = os.pipe()
    with output.open("wb") as file:
        holder = subprocess.Popen(
            [*_init_command(lab), str(send)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
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
    facts = {"unshare": identity(psutil.Process(holder.pid))}
    lab.runtime.note(**facts)
    with os.fdopen(receive, "rb") as told:
        said = told.read(5)
    children = psutil.Process(holder.pid).children() if said == b"ready" else []
    if not children:
        raise LabError(f"the lab can't be set up: {tail(output, 5)}")
    if groups:
        cgroups.join(groups.enter, holder.pid)
    lab.runtime.note(
        **facts,
        init=identity(children[0]),
        rooted=slurm.folder is not None,
        version=slurm.version,
        groups=[str(group) for group in groups.enter] if groups else [],
        cgroup=cgroups.hierarchy() if groups else None,
    )
    return holder


def _init_command(lab: Cluster) -> list[str]:
    command = ["unshare", "--mount", "--pid", "--net", "--uts", "--ipc"]
    command += ["--cgroup"] if lab.spec.cgroup else []
    command += ["--fork", "--kill-child=KILL", "--propagation", "private"]
    return [*command, sys.executable, "-m", "crater_slurm.lab.init", str(lab.folders.base)]


def start_services(lab: Cluster, nodes: Inventory, timeout: float) -> None:
    """Start Slurm and crater, and wait until both answer."""
    deadline = time.monotonic() + timeout
    supervisor = lab.supervisor
    supervisor.start(services.munged())
    if lab.spec.accounting:
        accounting.start(lab, deadline)
    supervisor.start(services.slurmctld(clean=True))
    if not lab.spec.controller_only:
        for node in nodes.names:
            supervisor.start(services.slurmd(node))
    ready.controller(lab, deadline)
    if not lab.spec.controller_only:
        ready.nodes(lab, nodes.names, deadline)
    if lab.spec.crater:
        if lab.spec.seeded:
            conf.seed_store(nodes, lab.folders)
        _start_crater(lab, nodes, deadline)


def _start_crater(lab: Cluster, nodes: Inventory, deadline: float) -> None:
    """crater's daemons, as far as this installation has them."""
    wanted = [services.scheduler()] if "scheduler" in lab.spec.daemons else []
    if "node" in lab.spec.daemons and not lab.spec.controller_only:
        wanted += [services.node_daemon(node) for node in nodes.names]
    daemons = [daemon for daemon in wanted if daemon is not None]
    for daemon in daemons:
        lab.supervisor.start(daemon)
    for daemon in daemons:
        ready.socket(lab, daemon, deadline)
    if any(daemon.name == "scheduler" for daemon in daemons):
        ready.scheduler(lab, deadline)
