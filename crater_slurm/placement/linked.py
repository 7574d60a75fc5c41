"""Which GPUs of a machine are linked by NVLink, told for jobs of several GPUs; Slurm chooses.

Slurm prefers well linked GPUs by ``Links=`` of gres.conf, which ``crater render`` writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement.inventory import Inventory, NodeClass
from crater_slurm.placement.need import Need
from crater_slurm.placement.rules import Result

_MOST = 5


def groups(profile: NodeProfile, among: Iterable[int]) -> list[tuple[int, ...]]:
    """GPUs that are all linked with each other, the largest groups first; each in one group."""
    gpus = set(among)
    peers = {g.index: {n.peer for n in g.nvlinks} & gpus for g in profile.gpus if g.index in gpus}
    found = []
    while peers:
        best = max((_clique(first, peers) for first in sorted(peers)), key=len)
        found.append(best)
        peers = {index: near for index, near in peers.items() if index not in best}
    return [group for group in found if len(group) > 1]


def _clique(first: int, peers: dict[int, set[int]]) -> tuple[int, ...]:
    members = [first]
    for other in sorted(peers[first]):
        if all(other in peers.get(m, ()) and m in peers.get(other, ()) for m in members):
            members.append(other)
    return tuple(sorted(members))


def facts(
    inventory: Inventory, passing: Sequence[tuple[NodeClass, Result]], need: Need, passed: int
) -> tuple[str, ...]:
    """For each kind of machine, which of its GPUs the job may get are linked; none if none are."""
    if need.gpus < 2 or not any(g.nvlinks for c, _ in passing for g in c.profile.gpus):
        return ()
    by_text: dict[str, int] = {}
    for node_class, result in passing:
        if nodes := node_class.nodes & passed:
            text = _sentence(node_class.profile, result, need.gpus)
            by_text[text] = by_text.get(text, 0) | nodes
    return tuple(
        f"{_who(inventory, nodes)}: {text}" for text, nodes in list(by_text.items())[:_MOST]
    )


def _sentence(profile: NodeProfile, result: Result, wanted: int) -> str:
    linked = groups(profile, result.eligible)
    if not linked:
        return "no NVLink between its GPUs is known"
    text = f"GPUs {' and '.join(format_cpulist(group) for group in linked)} are linked by NVLink"
    return text if len(linked[0]) >= wanted else f"{text}, no {wanted} of them all"


def _who(inventory: Inventory, nodes: int) -> str:
    (example,) = inventory.names_of(nodes, 1)
    count = nodes.bit_count()
    return example if count == 1 else f"{count} nodes such as {example}"
