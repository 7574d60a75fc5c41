"""Asks Slurm through its commands: nodes and partitions for the snapshot, jobs for people.

Text formats are used where they are the same in 22.05 to 26.05 and cost slurmctld least: one
grouped ``sinfo`` for the whole cluster instead of a JSON document of every node. Never called
while a submission waits for an answer.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from crater_slurm.errors import SlurmError
from crater_slurm.model.cluster import SlurmCluster, SlurmNode
from crater_slurm.slurm import gres, hostlist

_PAIR = re.compile(r"(?:^|\s)([A-Z][\w:/]*)=")
#: A job's comment may be full of ``gpus=2``; Slurm prints the output files right behind it.
_COMMENT = re.compile(r".*\sComment=(.*)\sStdErr=")
_FORMAT = "%R|%T|%f|%G|%N"


@dataclass(frozen=True, slots=True)
class Client:
    """Runs Slurm commands with a time limit. ``environment`` is added to the process's own."""

    bin_dir: Path | None = None
    conf: Path | None = None
    timeout_seconds: float = 15
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, command: str, *arguments: str) -> str:
        """Standard output of a Slurm command; SlurmError with its own words when it fails."""
        program = str(self.bin_dir / command) if self.bin_dir else command
        try:
            done = subprocess.run(
                [program, *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.timeout_seconds,
                env=self._environ(),
                stdin=subprocess.DEVNULL,
            )
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
        """Snapshot of nodes and partitions; two commands, whatever the size of the cluster."""
        config = self.config()
        return parse_sinfo(
            self.run("sinfo", "--all", "--noheader", "--format", _FORMAT),
            name=config.get("ClusterName", ""),
            version=parse_version(config.get("SLURM_VERSION", "")),
            gres_types=frozenset(filter(None, config.get("GresTypes", "").split(","))),
            select_parameters=frozenset(
                filter(None, config.get("SelectTypeParameters", "").upper().split(","))
            ),
            default_partition=self.default_partition(),
        )

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
) -> SlurmCluster:
    """Cluster from ``sinfo -h -o '%R|%T|%f|%G|%N'``; lines of one node are merged."""
    nodes: dict[str, tuple[set[str], str, frozenset[str], dict[str, int]]] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 5:
            continue
        partition, state, features, gres_text, names = fields
        parsed_features = frozenset(filter(None, features.replace("(null)", "").split(",")))
        try:
            counts = gres.totals(gres_text)
        except ValueError as error:
            raise SlurmError(f"sinfo prints a gres that can't be read: {error}") from error
        for node in hostlist.expand(names):
            if node in nodes:
                nodes[node][0].add(partition)
            else:
                nodes[node] = ({partition}, state, parsed_features, counts)
    return SlurmCluster(
        name=name,
        version=version,
        default_partition=default_partition,
        gres_types=gres_types,
        select_parameters=select_parameters,
        time=time.time(),
        nodes=tuple(
            SlurmNode(
                name=node,
                partitions=frozenset(partitions),
                state=state,
                features=features_of,
                gres=counts,
            )
            for node, (partitions, state, features_of, counts) in sorted(nodes.items())
        ),
    )


def parse_record(line: str) -> dict[str, str]:
    """``Key=value`` fields of one ``scontrol -o`` line; values may hold spaces.

    A free-text value (name, command) that itself contains ``Word=`` is cut there, and the first
    occurrence of a key counts, so that a user's text never replaces a field of Slurm's. The
    comment, which carries the plan, is read whole where Slurm shows what ends it.
    """
    record: dict[str, str] = {}
    matches = list(_PAIR.finditer(line))
    for match, following in itertools.zip_longest(matches, matches[1:]):
        end = following.start() if following else len(line)
        record.setdefault(match.group(1), line[match.end() : end].strip())
    if comment := _COMMENT.match(line):
        record["Comment"] = comment.group(1).strip()
    return record
