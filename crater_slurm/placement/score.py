"""How well a machine suits a need that it can meet: which of many to prefer, never whether.

A job takes GPUs, and with them their share of everything else on the node. What it then leaves of
that share is hard to sell to others, and what it takes beyond the share leaves other GPUs without
cores, bandwidth or IOPS. So each amount is compared with the share that belongs to the GPUs taken,
or to the part of one (all of the node, where no GPU is asked for), and counts as ``min / max`` of
both: 1 where the job takes just its share. The score is the mean over what was asked, by the site's
weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from crater_slurm.model import drives
from crater_slurm.model.plan import NodeScore, ScoreTerm
from crater_slurm.model.profile import NodeProfile, Nvme
from crater_slurm.model.units import format_mib, format_number
from crater_slurm.placement.inventory import NodeClass
from crater_slurm.placement.need import Need
from crater_slurm.placement.rules import Result, physical_cores

#: Slurm takes 1,024 characters of features; a preference that needs more words says little.
_MOST_FEATURES = 8
#: Groups of nodes that a record tells about.
_MOST_TOLD = 20
#: Features that are tried in pairs.
_MOST_PAIRED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What each amount counts; they sum to 1. Those of what was not asked are left out."""

    gpu_memory: float = 0.45
    cpu_cores: float = 0.20
    memory_bandwidth: float = 0.20
    ssd_iops: float = 0.15


@dataclass(frozen=True, slots=True)
class Term:
    """One amount: its weight among those that count (they sum to 1), its value, and why."""

    name: str
    weight: float
    value: float
    why: str


@dataclass(frozen=True, slots=True)
class Score:
    """0..1, more is better; 1 without terms, when nothing was asked that could tell."""

    value: float
    terms: tuple[Term, ...] = ()


def score(
    profile: NodeProfile, need: Need, result: Result, weights: Weights, part: float | None = None
) -> Score:
    """The score of a machine that ``result`` says can meet the need. ``part`` is what a job takes
    of the GPU that it shares with others; None where it has its GPUs alone."""
    found = list(_amounts(profile, need, result, weights, part))
    total = sum(weight for weight, *_ in found)
    if not total:
        return Score(1.0)
    terms = tuple(
        Term(name, weight / total, value, why) for weight, name, value, why in found if weight
    )
    return Score(sum(term.weight * term.value for term in terms), terms)


def _amounts(
    profile: NodeProfile, need: Need, result: Result, weights: Weights, part: float | None
) -> Iterator[tuple[float, str, float, str]]:
    """Weight, name, value and reason of each amount that was asked for."""
    gpus = need.gpus if part is None else part
    share = gpus / len(profile.gpus) if gpus and profile.gpus else 1.0
    if need.gpus and (need.gpu_memory_mib or need.gpu_memory_wanted_mib):
        value, why = _gpu_memory(profile, need, result)
        yield weights.gpu_memory, "gpu-memory", value, why
    cores = physical_cores(profile, need)
    if cores:
        own = profile.cpu.cores * share
        why = f"asks {cores} of the {format_number(own)} cores that are its share"
        yield weights.cpu_cores, "cpu-cores", match(cores, own), why
    if need.memory_bandwidth_gb_s and profile.memory_bandwidth_gb_s:
        own = profile.memory_bandwidth_gb_s * share
        why = (
            f"asks {format_number(need.memory_bandwidth_gb_s)} of the {format_number(own)} GB/s "
            "that are its share"
        )
        value = match(need.memory_bandwidth_gb_s, own)
        yield weights.memory_bandwidth, "memory-bandwidth", value, why
    if need.ssd_iops and profile.nvmes:
        drive = max(profile.nvmes, key=lambda d: d.random_read_iops or 0)
        own = (drive.random_read_iops or 0) * share
        quality, blemish = _quality(drive)
        why = (
            f"asks {format_number(need.ssd_iops)} of the {format_number(own)} IOPS that are its "
            f"share{blemish}"
        )
        yield weights.ssd_iops, "ssd-iops", quality * match(need.ssd_iops, own), why


def _gpu_memory(profile: NodeProfile, need: Need, result: Result) -> tuple[float, str]:
    """The job may get any of the GPUs that qualify: the largest is what it may waste, and with the
    smallest it may run out of memory."""
    memories = [g.memory_mib or 0 for g in profile.gpus if g.index in result.eligible]
    asked = max(need.gpu_memory_mib or 0, need.gpu_memory_wanted_mib or 0)
    if min(memories) < asked:
        least = format_mib(min(memories))
        return 0.0, f"may take {format_mib(asked)} of each GPU, of which one has {least}"
    why = f"asks {format_mib(asked)} of each GPU's {format_mib(max(memories))}"
    return match(asked, max(memories)), why


def match(asked: float, own: float) -> float:
    """An amount against the share that is the job's own: 1 where it takes just that."""
    return min(asked, own) / max(asked, own) if own > 0 else 0.0


def _quality(drive: Nvme) -> tuple[float, str]:
    """What the drive's value is multiplied with, and the words for a poor one."""
    weight = drives.weight(drive.iops_stability_ratio, drive.read_latency_us)
    if weight == 1.0:
        return weight, ""
    if drives.steadiness(drive.iops_stability_ratio) == "unsteady":
        return weight, f", counted {weight:g}: its slowest second is below {drives.UNSTEADY_RATIO}"
    return weight, f", counted {weight:g}: reads take over {drives.SLOW_LATENCY_US:g} µs"


@dataclass(frozen=True, slots=True)
class Ranked:
    """Nodes with one score, and one of them."""

    nodes: int
    example: str
    score: Score


def rank(
    passing: Sequence[tuple[NodeClass, Result]],
    need: Need,
    candidates: int,
    weights: Weights,
    part: float | None = None,
) -> tuple[Ranked, ...]:
    """The machines that pass, best first; equal scores are told together."""
    groups: dict[Score, Ranked] = {}
    for node_class, result in passing:
        nodes = node_class.nodes & candidates
        if not nodes:
            continue
        value = score(node_class.profile, need, result, weights, part)
        known = groups.get(value)
        groups[value] = Ranked(
            nodes | (known.nodes if known else 0),
            known.example if known else node_class.example,
            value,
        )
    return tuple(sorted(groups.values(), key=lambda r: (-r.score.value, r.nodes & -r.nodes)))


def preferred(ranked: Sequence[Ranked], tolerance: float) -> int:
    """The nodes that suit best: within ``tolerance`` of the best score. 0 when all do."""
    if not ranked:
        return 0
    least = ranked[0].score.value - tolerance
    chosen = everything = 0
    for group in ranked:
        everything |= group.nodes
        if group.score.value >= least:
            chosen |= group.nodes
    return 0 if chosen == everything else chosen


def told(ranked: Sequence[Ranked], preferred_nodes: int) -> tuple[NodeScore, ...]:
    """The scores for a record; none where there is nothing to tell nodes apart."""
    return tuple(
        NodeScore(
            example=group.example,
            count=group.nodes.bit_count(),
            value=round(group.score.value, 4),
            preferred=bool(group.nodes & preferred_nodes),
            terms=tuple(
                ScoreTerm(
                    name=term.name,
                    weight=round(term.weight, 4),
                    value=round(term.value, 4),
                    why=term.why,
                )
                for term in group.score.terms
            ),
        )
        for group in ranked[:_MOST_TOLD]
        if group.score.terms
    )


def expression_of(chosen: int, passed: int, sets: Sequence[tuple[frozenset[str], int]]) -> str:
    """An expression of node features that names ``chosen`` nodes, and no other that ``passed``.

    Any of a few features, or both of two, whichever names more; empty when features tell nothing
    apart, or name less than half. Never both kinds at once: Slurm releases differ in how they read
    that. ``sets`` are
    feature sets with their nodes.
    """
    nodes: dict[str, int] = {}
    for names, members in sets:
        for name in names:
            nodes[name] = nodes.get(name, 0) | members & passed
    inside = {n: m for n, m in nodes.items() if m and not m & ~chosen}
    found: list[str] = []
    left = chosen
    while left and inside and len(found) < _MOST_FEATURES:
        name = max(sorted(inside), key=lambda n: (inside[n] & left).bit_count())
        if not inside[name] & left:
            break
        left &= ~inside[name]
        found.append(name)
    both = _both(nodes, chosen) if left else None
    if both and (nodes[both[0]] & nodes[both[1]]).bit_count() > (chosen & ~left).bit_count():
        left = chosen & ~(nodes[both[0]] & nodes[both[1]])
        found = ["&".join(both)]
    # Names of single nodes would send every job to the same few.
    return "|".join(found) if 2 * left.bit_count() <= chosen.bit_count() else ""


def _both(nodes: Mapping[str, int], chosen: int) -> tuple[str, str] | None:
    """The two features that together name most of the chosen nodes, and none else."""
    pairs = {
        pair: nodes[pair[0]] & nodes[pair[1]]
        for pair in itertools.combinations(sorted(nodes)[:_MOST_PAIRED], 2)
    }
    able = [pair for pair, both in pairs.items() if both and not both & ~chosen]
    return max(able, key=lambda pair: pairs[pair].bit_count(), default=None)
