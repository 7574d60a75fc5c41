"""What a node offers as gres: its GPUs with cores and links, their shards, and counted resources.

Slurm counts the same things twice, in ``Gres=`` of a node's line and in the lines of gres.conf, and
takes a node out of service where the two differ, so both come from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from crater_slurm.errors import UsageError
from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import NodeProfile
from crater_slurm.model.slices import Rounding, Slicing, slicing
from crater_slurm.slurm import words
from crater_slurm.slurm.layout import Layout, gpu_sockets

#: CountOnly gres that crater adds to a node; the settings' ``filter.consume`` may ask for fewer.
COUNT_ONLY = ("membw", "nviops", "nvme")
DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What an admin may choose of the rendered text.

    ``shard_reserve`` is how many slices of each card are kept back, None for no shards at all, and
    ``shard_rounding`` how the size of a slice is rounded.
    ``features`` publishes facts that no job consumes, ``weights`` lets Slurm take nodes with few
    GPUs first, ``memory_margin`` keeps RealMemory below what slurmd will count.
    """

    consume: Sequence[str] = COUNT_ONLY
    shard_reserve: int | None = None
    shard_rounding: Rounding = "ceil"
    features: bool = False
    weights: bool = False
    memory_margin: bool = False


#: Everything jobs consume, and nothing that has to be asked for.
PLAIN = Choices()


def unwritable(profile: NodeProfile) -> str | None:
    """Why the lines of a node's GPUs can't be written from its profile; None when they can.

    A MIG instance is opened through capability files whose numbers the driver gives out anew
    whenever the card is cut, and no profile holds them.
    """
    cut = [gpu.index for gpu in profile.gpus if gpu.mig_instances]
    if cut:
        return (
            f"{profile.name}: GPU {format_cpulist(cut)} is cut into MIG instances, whose device "
            "files change with every cut, so Slurm has to find them itself: build Slurm with NVML "
            "and write 'AutoDetect=nvml' for this node, or switch MIG off; --node leaves it out"
        )
    other = [g.index for g in profile.gpus if (g.compute_capability or "").startswith("gfx")]
    if other:
        return (
            f"{profile.name}: GPU {format_cpulist(other)} is AMD's, and which /dev/dri file is its "
            "own is not in the profile: write 'AutoDetect=rsmi' for this node; --node leaves it out"
        )
    return None


def count_only(profile: NodeProfile) -> dict[str, int]:
    """CountOnly gres of a node: ``membw`` GB/s, ``nviops`` random reads/s, ``nvme`` GB of cache.

    Rounded down, because a job must never be promised what is not there; unknown is left out.
    """
    sizes = [drive.size_gb for drive in profile.nvmes if drive.size_gb]
    counts = {
        "membw": int(round(profile.memory_bandwidth_gb_s or 0, 6)),
        "nviops": sum(drive.random_read_iops or 0 for drive in profile.nvmes),
        "nvme": profile.cache_gb if profile.cache_gb is not None else sum(sizes),
    }
    return {name: count for name, count in counts.items() if count > 0}


def shards(profile: NodeProfile, choices: Choices) -> dict[int, Slicing]:
    """How each GPU is cut, by index; none unless asked for. UsageError for one that can't be."""
    if choices.shard_reserve is None:
        return {}
    found = {}
    for gpu in profile.gpus:
        if gpu.memory_mib is None:
            raise UsageError(
                f"{profile.name}: the memory of GPU {gpu.index} is not known, so it can't be cut "
                "into shards; run crater-probe there"
            )
        found[gpu.index] = slicing(gpu.memory_mib, choices.shard_reserve, choices.shard_rounding)
        if found[gpu.index].usable < 1:
            raise UsageError(
                f"{profile.name}: GPU {gpu.index} has no slice left for jobs "
                f"({found[gpu.index].sentence()}); ask for a smaller reserve"
            )
    return found


def node_gres(profile: NodeProfile, choices: Choices = PLAIN) -> str:
    """``Gres=`` of a node's line in slurm.conf; ``""`` for a node that has none."""
    types: dict[str | None, int] = {}
    for gpu in profile.gpus:
        kind = _kind(gpu.gres_type)
        types[kind] = types.get(kind, 0) + 1
    found = [f"gpu:{name}:{count}" if name else f"gpu:{count}" for name, count in types.items()]
    if cut := shards(profile, choices):
        found.append(f"shard:{sum(slices.usable for slices in cut.values())}")
    counts = count_only(profile).items()
    return ",".join(
        found + [f"{name}:{count}" for name, count in counts if name in choices.consume]
    )


def gres_lines(
    names: str, profile: NodeProfile, form: Layout, choices: Choices, devices: Path = DEVICES
) -> list[str]:
    """Lines of gres.conf for nodes of one make; ``names`` ``""`` is for all nodes."""
    lines = _gpu_lines(names, profile, form, devices)
    for index, slices in shards(profile, choices).items():
        found = {"Name": "shard", "Count": str(slices.usable), "File": f"{devices}/nvidia{index}"}
        lines.append(words.line({"NodeName": names} | found))
    for name, count in count_only(profile).items():
        if name in choices.consume:
            found = {"Name": name, "Count": str(count), "Flags": "CountOnly"}
            lines.append(words.line({"NodeName": names} | found))
    return lines


def shard_sentences(profile: NodeProfile, choices: Choices) -> list[str]:
    """For each kind of card, how it is cut and what that loses."""
    cut = shards(profile, choices)
    models = {gpu.index: words.comment(gpu.model) for gpu in profile.gpus}
    return list(dict.fromkeys(f"{models[i]}: {slices.sentence()}" for i, slices in cut.items()))


def _kind(gres_type: str | None) -> str | None:
    return None if gres_type is None else words.name("a gres type", gres_type)


def _gpu_lines(names: str, profile: NodeProfile, form: Layout, devices: Path) -> list[str]:
    links = _links(profile)
    facts = [
        (_kind(gpu.gres_type), gpu_sockets(gpu, profile, form), links.get(gpu.index))
        for gpu in profile.gpus
    ]
    lines = []
    for (kind, sockets, link), same in groupby(
        zip(facts, profile.gpus, strict=True), key=lambda pair: pair[0]
    ):
        numbers = format_cpulist(gpu.index for _, gpu in same)
        bracketed = f"[{numbers}]" if not numbers.isdigit() else numbers
        found: Mapping[str, str | None] = {
            "NodeName": names,
            "Name": "gpu",
            "Type": kind,
            "File": f"{devices}/nvidia{bracketed}",
            "Cores": form.cores(sockets),
            "Links": link,
        }
        lines.append(words.line(found))
    return lines


def _links(profile: NodeProfile) -> dict[int, str]:
    """``Links=`` by GPU index: how many times the weakest link each peer has, -1 for itself.

    Left out where every pair is linked alike: then there is nothing for Slurm to choose.
    """
    size = len(profile.gpus)
    widths = {g.index: {n.peer: n.bandwidth_gb_s or 1.0 for n in g.nvlinks} for g in profile.gpus}
    present = [width for row in widths.values() for width in row.values()]
    if not present or (len(present) == size * (size - 1) and len(set(present)) == 1):
        return {}
    unit = min(present)
    order = [gpu.index for gpu in profile.gpus]
    return {
        index: ",".join(
            "-1" if peer == index else str(round(row.get(peer, 0) / unit)) for peer in order
        )
        for index, row in widths.items()
    }
