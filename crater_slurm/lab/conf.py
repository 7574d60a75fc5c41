"""Writes a lab's configuration: Slurm's, through the same renderer as production, and crater's."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import Any

import yaml

from crater_slurm import paths
from crater_slurm.config.sharing import Sharing
from crater_slurm.lab import accounting, cgroups
from crater_slurm.lab.inventory import Inventory
from crater_slurm.lab.places import CONTROLLER, INSIDE, INSIDE_ROOT, LIBRARY, Folders
from crater_slurm.lab.spec import LabSpec
from crater_slurm.slurm import node_gres, render
from crater_slurm.store.codec import profile_to_dict

_FIRST_PORT = 27101
#: Major number of NVIDIA's device files. Without the driver, opening one fails with ENXIO where
#: a job may use it and EPERM where it may not, so enforcement can be tried without a GPU.
_NVIDIA_MAJOR = 195

_SETTINGS = {
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core_Memory",
    # A job that names no memory would take all of its node's.
    "DefMemPerCPU": "64",
    "ReturnToService": "2",
    "MpiDefault": "none",
    "MailProg": "/bin/true",
    "SlurmctldDebug": "verbose",
    "SlurmdDebug": "verbose",
    # No forwarding of messages from slurmd to slurmd: all of them are on one machine.
    "TreeWidth": "65533",
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1",
    "KillWait": "2",
    "MinJobAge": "86400",
    "MaxJobCount": "200000",
    "MessageTimeout": "30",
}
_WITHOUT_SLURMD = {"SlurmdTimeout": "0", "SlurmctldDebug": "info"}
_CLOUD = {
    "ResumeProgram": "/bin/true",
    "ResumeTimeout": "36000",
    "ResumeRate": "0",
}
#: The lab's daemons share a machine with its nodes and jobs, so an answer may take longer there.
_FILTER = "-- See etc/filter.lua of crater-slurm for all settings.\nreturn { deadline_ms = 1000 }\n"
_HOOKS = {
    "Prolog": f"{LIBRARY}/prolog/prolog.sh",
    "Epilog": f"{LIBRARY}/prolog/epilog.sh",
    "TaskProlog": f"{LIBRARY}/prolog/task_prolog.sh",
}


def write_slurm(
    spec: LabSpec, inventory: Inventory, folders: Folders, version: render.Version, user: str
) -> None:
    """slurm.conf, gres.conf, cgroup.conf and, with crater, job_submit.lua."""
    groups = _groups(spec, inventory)
    conf = render.SlurmConf(
        version=version,
        groups=groups,
        choices=_choices(spec),
        # The machine has fewer cores than the nodes: what the file says counts.
        slurmd_parameters=("config_overrides",),
    )
    text = render.template(
        "lab.conf.j2",
        name=spec.name,
        inside=str(INSIDE),
        controller=CONTROLLER,
        slurm_user=user,
        settings=_settings(spec, version),
        crater=conf.render(),
        partitions=_partitions(inventory),
    )
    folders.slurm_conf.write_text(text)
    inside = Folders(INSIDE)
    (folders.etc / "gres.conf").write_text(
        render.gres_conf(
            groups, _choices(spec), devices=inside.devices, everywhere=len(groups) == 1
        )
    )
    kind = cgroups.hierarchy() if spec.cgroup else "none"
    (folders.etc / "cgroup.conf").write_text(
        # v1's memory hierarchy stays the machine's own, see cgroups.
        render.cgroup_conf(version, kind or "none", systemd=False, memory=kind == "v2")  # type: ignore[arg-type]
    )
    if spec.crater:
        shutil.copy(paths.share("job_submit") / "job_submit.lua", folders.etc)


def _choices(spec: LabSpec) -> node_gres.Choices:
    """As crater render writes them: a plan prefers nodes by their features.

    GPUs are in shards where crater's settings for this lab share them.
    """
    sharing = Sharing.model_validate(spec.crater_conf.get("sharing", {}))
    return node_gres.Choices(
        features=True,
        weights=spec.weights,
        shard_reserve=None if sharing.allow == "off" else sharing.reserve,
        shard_rounding=sharing.rounding,
    )


def _groups(spec: LabSpec, inventory: Inventory) -> list[render.NodeGroup]:
    groups = []
    port = _FIRST_PORT
    for entry in inventory.entries:
        count = len(entry.names)
        attributes = {"NodeAddr": "127.0.0.1", "Port": f"{_FIRST_PORT}"}
        if not spec.controller_only:
            attributes["Port"] = f"[{port}-{port + count - 1}]" if count > 1 else str(port)
            port += count
        if spec.cloud:
            attributes["State"] = "CLOUD"
        groups.append(render.NodeGroup(entry.hostlist, entry.profile, attributes))
    return groups


def _settings(spec: LabSpec, version: render.Version) -> dict[str, str]:
    settings = dict(_SETTINGS)
    flags = "Contain" if spec.cgroup else "Alloc"
    settings["ProctrackType"] = "proctrack/cgroup" if spec.cgroup else "proctrack/linuxproc"
    settings["PrologFlags"] = flags
    if spec.cgroup:
        # task/affinity would bind to cores that the machine does not have.
        settings["TaskPlugin"] = "task/cgroup"
    elif version < (23, 11):
        settings["TaskPlugin"] = "task/none"  # the default; later releases have no such plugin
    if spec.controller_only:
        settings |= _WITHOUT_SLURMD
    if spec.cloud:
        settings |= _CLOUD
        if version < (23, 2):
            settings["PrivateData"] = "cloud"  # shows nodes that are not powered up
    if spec.accounting:
        settings |= accounting.SETTINGS
    if spec.crater:
        settings |= {"JobSubmitPlugins": "lua"} | _HOOKS
    return settings | dict(spec.slurm_conf)


def _partitions(inventory: Inventory) -> list[str]:
    """Partition ``gpu``, the default where there is one, and ``cpu`` for nodes without GPUs."""
    parts = {
        "gpu": [e.hostlist for e in inventory.entries if e.profile.gpus],
        "cpu": [e.hostlist for e in inventory.entries if not e.profile.gpus],
    }
    present = [name for name, nodes in parts.items() if nodes]
    return [
        f"PartitionName={name} Nodes={','.join(parts[name])} MaxTime=INFINITE State=UP"
        + (" Default=YES" if name == present[0] else "")
        for name in present
    ]


def write_crater(spec: LabSpec, folders: Folders) -> None:
    """/etc/crater of the lab: settings that differ from production, and the plan's key."""
    inside = Folders(INSIDE)
    tree: dict[str, Any] = {
        "slurm": {"conf": str(inside.slurm_conf), "bin_dir": str(inside.bin)},
        "filter": {"mode": spec.mode},
        "scheduler": {"refresh_seconds": 2},
        # Nodes have more cores than the machine, so no cpuset could tell a job's cores. They
        # share its network, so only one could have a port for metrics.
        "node": {"cpu_source": "slurm", "listen": ""},
    }
    _merge(tree, spec.crater_conf)
    (folders.crater_etc / "crater.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    (folders.crater_etc / "filter.lua").write_text(_FILTER)
    key = folders.crater_etc / "plan.key"
    key.touch(mode=0o400)
    key.chmod(0o400)
    with key.open("w") as file:
        file.write(secrets.token_hex(32) + "\n")


def _merge(tree: dict[str, Any], more: Any) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def write_profiles(inventory: Inventory, folders: Folders) -> None:
    """On each node what crater-probe would have found there."""
    for name in inventory.names:
        profile = profile_to_dict(inventory.profile_of(name))
        (folders.node(name) / "lib" / "profile.json").write_text(json.dumps(profile, indent=1))


def seed_store(inventory: Inventory, folders: Folders) -> None:
    """Put all profiles into the controller's store, as if every probe had reported."""
    from crater_slurm.store.repository import Store

    file = folders.controller / "lib" / "crater.db"
    with Store.open(f"sqlite:///{file}", create=True) as store:
        store.save_profiles(inventory.profiles())


def write_devices(inventory: Inventory, folders: Folders) -> None:
    """One device file for each GPU index; nodes share them, their Slurm does not look inside."""
    count = max((len(entry.profile.gpus) for entry in inventory.entries), default=0)
    for index in range(count):
        device = folders.devices / f"nvidia{index}"
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(_NVIDIA_MAJOR, index))
        device.chmod(0o666)


def write_commands(folders: Folders, commands: list[str], *, rooted: bool) -> None:
    """Slurm's commands of the lab's version, for programs on the machine's side of the lab."""
    # chroot leaves the working folder, which a script's path may be relative to.
    enter = f'chroot {INSIDE_ROOT} /bin/sh -c \'cd "$0" 2>/dev/null; exec "$@"\' "$PWD" '
    prefix = enter if rooted else ""
    for name in commands:
        file = folders.bin / name
        file.write_text(
            f"#!/bin/sh\nPATH=/usr/sbin:/usr/bin:/sbin:/bin\nexport PATH\n"
            f'exec {prefix}{name} "$@"\n'
        )
        file.chmod(0o755)


def init_file(
    spec: LabSpec, inventory: Inventory, folders: Folders, root: Path | None, needed: list[Path]
) -> None:
    """What pid 1 is told; it reads nothing else."""
    shared = [(paths.PACKAGE, paths.PACKAGE)]
    if spec.crater:
        shared += [
            (paths.share("job_submit"), LIBRARY / "job_submit"),
            (paths.share("prolog"), LIBRARY / "prolog"),
            (paths.hooks(), LIBRARY / "hooks"),
        ]
    tree = {
        "root": str(root) if root else None,
        "nodes": inventory.names,
        "node_namespaces": not spec.controller_only,
        "cache_mib": spec.cache_mib,
        "cgroup": cgroups.hierarchy() if spec.cgroup else None,
        "shared": [(str(a), str(b)) for a, b in shared],
        "needed": [str(path) for path in needed],
    }
    (folders.base / "init.json").write_text(json.dumps(tree))
