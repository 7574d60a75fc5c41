"""NVLinks of a node in few words: which GPUs are joined, each to each or in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from crater_slurm.topology.devices import Device, Kind, of_kind
from crater_slurm.topology.graph import nvlink_class, nvlink_gb_s

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """GPUs that links of one class join, by number; ``complete`` when each reaches each."""

    gpus: tuple[int, ...]
    pairs: tuple[Pair, ...]
    name: str
    bandwidth_gb_s: float | None

    @property
    def complete(self) -> bool:
        return len(self.pairs) == len(self.gpus) * (len(self.gpus) - 1) // 2


def link_groups(found: tuple[Device, ...]) -> list[LinkGroup]:
    """Groups of GPUs joined by NVLinks of one class and bandwidth, the lowest GPU first."""
    by_link: dict[tuple[str, float | None], list[Pair]] = {}
    for a, b in combinations(of_kind(found, Kind.GPU), 2):
        if name := nvlink_class(a, b):
            pair = (min(a.number, b.number), max(a.number, b.number))
            by_link.setdefault((name, nvlink_gb_s(a, b)), []).append(pair)
    groups = []
    for (name, gb_s), pairs in by_link.items():
        for gpus in _joined(pairs):
            own = tuple(pair for pair in pairs if pair[0] in gpus)
            groups.append(LinkGroup(tuple(sorted(gpus)), own, name, gb_s))
    return sorted(groups, key=lambda group: (group.gpus, group.name))


def _joined(pairs: list[Pair]) -> list[set[int]]:
    """The sets of GPUs that can reach each other over the pairs."""
    sets: list[set[int]] = []
    for pair in pairs:
        touched = [found for found in sets if found & set(pair)]
        sets = [found for found in sets if found not in touched]
        sets.append(set(pair).union(*touched))
    return sets
