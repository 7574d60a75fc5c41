"""One node's profile, put together from its readers and the catalogue of GPUs.

Every reader takes a root folder, so that a captured /sys and /proc read like a live one. What
the kernel does not tell (bandwidth, IOPS, latency) stays unknown: it is measured, never guessed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from crater_slurm import catalogue
from crater_slurm.model.profile import Dimm, Method, NodeProfile, Nvme, Provenance
from crater_slurm.probe import cpus, files, gpus, limits, numa, nvme, pci
from crater_slurm.probe.limits import Limits
from crater_slurm.probe.tools import dmidecode, nvme_cli

_LIVE = Path("/")


@dataclass(frozen=True, slots=True)
class Scan:
    """A machine as it was read: its profile, what this process may use, what could not be read."""

    profile: NodeProfile
    limits: Limits
    notes: tuple[str, ...] = ()


def node_name() -> str:
    """This node's name in Slurm: slurmd's own word where it is given, else the short host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def scan(name: str, root: Path) -> Scan:
    """Read the machine below ``root``. Raises CraterError when it is no machine.

    Tools are asked only about the live machine; a captured one has what its files say.
    """
    notes: list[str] = []
    layout = cpus.topology(root)
    nodes = numa.nodes(root, layout, notes)
    drives = nvme.drives(root, notes)
    dimms: tuple[Dimm, ...] = ()
    if root == _LIVE:
        drives = _asked(drives, notes)
        dimms = dmidecode.read(notes)
    devices = pci.devices(root, drives, notes)
    found_gpus, software = gpus.read(root, devices, notes)
    profile = NodeProfile(
        name=name,
        cpu=cpus.cpu(root, layout, notes),
        numa_nodes=nodes,
        gpus=found_gpus,
        nvmes=drives,
        pci_devices=devices,
        dimms=dimms,
        software=dataclasses.replace(software, kernel=_kernel(root)),
        memory_mib=numa.memory_mib(root),
        source=Provenance(Method.MEASURED, datetime.now(UTC).replace(microsecond=0)),
    )
    usable = limits.limits(root, layout.online, tuple(n.id for n in nodes), notes)
    return Scan(catalogue.complete_profile(profile), usable, tuple(dict.fromkeys(notes)))


def _asked(drives: tuple[Nvme, ...], notes: list[str]) -> tuple[Nvme, ...]:
    """Drives with what nvme-cli adds: wear always, the rest where sysfs has nothing."""
    told = nvme_cli.read(notes) if drives else {}
    found = []
    for drive in drives:
        more = told.get(drive.name)
        if more is not None:
            drive = dataclasses.replace(
                drive,
                wear_percent=more.wear_percent,
                firmware=drive.firmware or more.firmware,
                model=drive.model or more.model,
                stable_id=drive.stable_id or more.serial,
            )
        found.append(drive)
    return tuple(found)


def _kernel(root: Path) -> str | None:
    release = files.read(root / "proc/sys/kernel/osrelease")
    if release:
        return release[:200]
    version = re.match(r"Linux version (\S+)", files.read(root / "proc/version") or "")
    return version.group(1) if version else None
