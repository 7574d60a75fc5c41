"""Asks Slurm through its commands: nodes and partitions for the snapshot, jobs for people.

Text formats are used where they are the same in 22.05 to 26.05 and cost slurmctld least: one
grouped ``sinfo`` for the whole cluster instead of a JSON document of every node. Never called
while a submission waits for an answer.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crater_slurm.errors import SlurmError
from crater_slurm.model.cluster import SlurmCluster, SlurmNode
from crater_slurm.slurm import gres, hostlist, limits
from crater_slurm.slurm.records import parse_record

#: The reason comes last, since an admin may write anything there.
_FORMAT = "%R|%T|%f|%G|%w|%z|%m|%N|%E"


@dataclass(frozen=True, slots=True)
class Identity:
    """Another user, whom root runs a command as."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Client:
    """Runs Slurm commands with a time limit. ``environment`` is added to the process's own."""

    bin_dir: Path | None = None
    conf: Path | None = None
    timeout_seconds: float = 15
    environment: dict[str, str] = field(default_factory=dict)
    run_as: Identity | None = None

    def run(self, command: str, *arguments: str) -> str:
        """Standard output of a Slurm command; SlurmError with its own words when it fails."""
        program = str(self.bin_dir / command) if self.bin_dir else command
        other = self.run_as
        try:
            done = subprocess.run(
                [program, *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.timeout_seconds,
                env=self._environ(),
                stdin=subprocess.DEVNULL,
                user=other.uid if other else None,
                group=other.gid if other else None,
                extra_groups=other.groups if other else None,
                cwd="/" if other else None,
            )
        except PermissionError as error:
            raise SlurmError(f"{program} can't be run: {error.strerror}") from error
        except FileNotFoundError as error:
            raise SlurmError(
                f"the Slurm command {program!r} is not there; install Slurm's client commands "
                "or set slurm.bin_dir"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise SlurmError(
                f"{command} did not answer within {self.timeout_seconds:g} s; "
                "is slurmctld up? (scontrol ping)"
            ) from error
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise SlurmError(f"{command} failed: {said[-1] if said else done.returncode}")
        return done.stdout

    def _environ(self) -> dict[str, str]:
        # Inside a job SLURM_* and SQUEUE_* variables change what commands print.
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SLURM_", "SQUEUE_", "SINFO_", "SCONTROL_")) or k == "SLURM_CONF"
        }
        if self.conf:
            clean["SLURM_CONF"] = str(self.conf)
        return clean | {"SLURM_TIME_FORMAT": "standard"} | self.environment

    def cluster(self) -> SlurmCluster:
        """Snapshot of nodes, partitions and reservations; a few commands, whatever its size."""
        config = self.config()
        # The picture is as old as the question: what is changed meanwhile may not be in it.
        begin = time.time()
        found = parse_sinfo(
            # Without --exact nodes of several weights share a line, and it says "1+".
            self.run("sinfo", "--all", "--exact", "--noheader", "--format", _FORMAT),
            name=config.get("ClusterName", ""),
            version=parse_version(config.get("SLURM_VERSION", "")),
            gres_types=frozenset(filter(None, config.get("GresTypes", "").split(","))),
            select_parameters=frozenset(
                filter(None, config.get("SelectTypeParameters", "").upper().split(","))
            ),
            default_partition=self.default_partition(),
            now=begin,
        )
        return dataclasses.replace(
            found,
            partitions=limits.partitions(self._shown("partition")),
            reservations=limits.reservations(self._shown("reservation")),
            enforce_limits=config.get("EnforcePartLimits", "NO").upper(),
        )

    def _shown(self, what: str) -> str:
        return self.run("scontrol", "--all", "--oneliner", "show", what)

    def default_partition(self) -> str | None:
        """Name of the default partition; %P marks it with a star."""
        for name in self.run("sinfo", "--all", "--noheader", "--format", "%P").split():
            if name.endswith("*"):
                return name[:-1]
        return None

    def config(self) -> dict[str, str]:
        """slurmctld's configuration as ``scontrol show config`` prints it."""
        result: dict[str, str] = {}
        for line in self.run("scontrol", "show", "config").splitlines():
            key, equals, value = line.partition("=")
            if equals:
                result.setdefault(key.strip(), value.strip().replace("(null)", ""))
        return result

    def version(self) -> tuple[int, int]:
        """Version of the commands, which is the cluster's or one near it."""
        return parse_version(self.run("sinfo", "--version"))

    def node(self, name: str) -> dict[str, str]:
        """Fields of a node; SlurmError when Slurm has none of that name."""
        if not re.fullmatch(r"[\w.-]+", name):
            raise SlurmError(f"{name!r} is no node name")
        return parse_record(self.run("scontrol", "--oneliner", "show", "node", name))

    def job(self, job_id: str) -> dict[str, str]:
        """Fields of a job that slurmctld still knows; SlurmError when it does not."""
        if not re.fullmatch(r"\d+([_+]\d+)?", job_id):
            raise SlurmError(f"{job_id!r} is no job id; write 123, 123_4 or 123+1")
        return parse_record(self.run("scontrol", "--oneliner", "--details", "show", "job", job_id))


def parse_version(text: str) -> tuple[int, int]:
    """``slurm-wlm 22.05.8`` -> ``(22, 5)``; (0, 0) when there is no version in the text."""
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def parse_sinfo(
    text: str,
    *,
    name: str = "",
    version: tuple[int, int] = (0, 0),
    gres_types: frozenset[str] = frozenset(),
    select_parameters: frozenset[str] = frozenset(),
    default_partition: str | None = None,
    now: float | None = None,
) -> SlurmCluster:
    """Cluster from ``sinfo -eh -o '%R|%T|%f|%G|%w|%z|%m|%N|%E'``; lines of one node are merged."""
    nodes: dict[str, SlurmNode] = {}
    for line in text.splitlines():
        fields = line.split("|", 8)
        if len(fields) != 9:
            continue
        partition, *about, names, reason = fields
        like = _node(about, reason)
        for node in hostlist.expand(names):
            known = nodes.get(node)
            partitions = (known.partitions if known else frozenset()) | {partition}
            nodes[node] = dataclasses.replace(known or like, name=node, partitions=partitions)
    return SlurmCluster(
        name=name,
        version=version,
        default_partition=default_partition,
        gres_types=gres_types,
        time=time.time() if now is None else now,
        nodes=tuple(node for _, node in sorted(nodes.items())),
        select_parameters=select_parameters,
    )


def _node(about: Sequence[str], reason: str) -> SlurmNode:
    """What one line of sinfo says of each of its nodes: state, features, gres, weight, S:C:T,
    memory, reason."""
    state, features, gres_text, weight, shape, memory = about
    try:
        counts = gres.totals(gres_text)
        types = frozenset(g.type for g in gres.parse(gres_text) if g.name == "gpu" and g.type)
    except ValueError as error:
        raise SlurmError(f"sinfo prints a gres that can't be read: {error}") from error
    return SlurmNode(
        name="",
        state=state,
        features=frozenset(filter(None, features.replace("(null)", "").split(","))),
        gres=counts,
        gpu_types=types,
        weight=int(weight) if weight.isdecimal() else None,
        cores=_cores(shape),
        memory_mib=int(memory) if memory.isdecimal() else None,
        reason="" if reason.strip() in ("none", "(null)") else reason.strip(),
    )


def _cores(shape: str) -> int | None:
    """Cores of ``sockets:cores:threads``; None where nodes differ (a ``+``) or it is none."""
    parts = shape.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return None
    return int(parts[0]) * int(parts[1])
