"""What jobs have of every node now, from one ``sinfo``: cores, memory, GPUs, counted gres.

The text is the same in 22.05 to 26.05, but that 22.05 does not say on which GPUs shards are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from crater_slurm.errors import SlurmError
from crater_slurm.model.cluster import NodeUse
from crater_slurm.model.cpuset import parse_cpulist
from crater_slurm.slurm import gres
from crater_slurm.slurm.client import Client

_FORMAT = "NodeList:|,CPUsState:|,AllocMem:|,GresUsed:|"
#: ``shard:l4:5(3/10,2/10)``: shards in use and there are, GPU by GPU; 22.05 tells no such thing.
_PER_GPU = re.compile(r"shard[^,(]*\(((?:\d+/\d+,?)+)\)")


#: ``gpu:l4:3(IDX:0-1,5)``: whole GPUs in use.
_WHOLE = re.compile(r"gpu[^,(]*\(IDX:([0-9,-]+)\)")


def read(client: Client) -> dict[str, NodeUse]:
    """What is in use, by node. Raises SlurmError."""
    text = client.run("sinfo", "--all", "--noheader", "--Node", "--Format", _FORMAT)
    return dict(_nodes(text))


def _nodes(text: str) -> Iterator[tuple[str, NodeUse]]:
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) < 4:
            continue
        name, cpus, memory, used = (part.strip() for part in fields[:4])
        try:
            counts = gres.totals(used)
            yield (
                name,
                NodeUse(
                    cpus=int(cpus.split("/")[0]),
                    memory_mib=int(memory) if memory.isdecimal() else 0,
                    gres={n: count for n, count in counts.items() if count},
                    gpus=_gpus(used),
                    shards=_shards(used),
                ),
            )
        except ValueError as error:
            raise SlurmError(f"sinfo's line {line[:120]!r} can't be read: {error}") from error


def _gpus(used: str) -> tuple[int, ...]:
    lists = (parse_cpulist(found) for found in _WHOLE.findall(used))
    return tuple(index for indexes in lists for index in indexes)


def _shards(used: str) -> tuple[tuple[int, int], ...]:
    found = _PER_GPU.search(used)
    if found is None:
        return ()
    pairs = (part.split("/") for part in found.group(1).split(",") if part)
    return tuple((int(taken), int(there)) for taken, there in pairs)
