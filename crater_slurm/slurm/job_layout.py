"""Where a job's cores and GPUs lie, by ``scontrol show job -d``: one job, one cheap question.

Core numbers are Slurm's own (block order) and need not be the kernel's; GPU indexes are those of
gres.conf. What a node's daemon reported from the cpuset is better, where there is one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from crater_slurm.errors import SlurmError, UsageError
from crater_slurm.model.cpuset import parse_cpulist
from crater_slurm.slurm import hostlist
from crater_slurm.slurm.client import Client

_ALL = re.compile(r"\sJOB_GRES=\S*((?:\s+Nodes=\S+ CPU_IDs=\S+ Mem=\S+ GRES=\S*)+)")
_GROUP = re.compile(r"Nodes=(\S+) CPU_IDs=(\S+) Mem=\S+ GRES=(\S*)")
_GPUS = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?::[^(),:]+)?:\d+\(IDX:([\d,-]+)\)")


@dataclass(frozen=True, slots=True)
class JobNode:
    """A job's part of one node: cores and GPUs by number."""

    name: str
    cpus: tuple[int, ...]
    gpus: tuple[int, ...] = ()


def read(client: Client, job_id: int) -> tuple[JobNode, ...]:
    """Nodes of a job that runs, or ran lately, in Slurm's order. Raises SlurmError."""
    text = client.run("scontrol", "--oneliner", "--details", "show", "job", str(job_id))
    return parse(text, job_id)


def parse(text: str, job_id: int) -> tuple[JobNode, ...]:
    """Nodes of a job in what ``scontrol show job -d -o`` prints; none while it has none."""
    # Asked for an array's or a het job's first job, scontrol shows all of them.
    lines = [line for line in text.splitlines() if line.startswith(f"JobId={job_id} ")]
    found = _ALL.search(lines[0]) if lines else None
    nodes = []
    for names, cpus, gres in _GROUP.findall(found.group(1)) if found else ():
        try:
            numbers = tuple(parse_cpulist(cpus))
            gpus = tuple(n for part in _GPUS.findall(gres) for n in parse_cpulist(part))
            nodes += [JobNode(name, numbers, gpus) for name in hostlist.expand(names)]
        except (UsageError, ValueError) as error:
            raise SlurmError(f"scontrol shows nodes of job {job_id} that can't be read") from error
    return tuple(nodes)
