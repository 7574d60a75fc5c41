"""The rule that keeps hard memory binding from killing anyone: pure arithmetic over all jobs.

A job that is narrowed to a NUMA node which is full makes the kernel kill the biggest process that
may use that node, whoever owns it (docs: memory binding). So a job may be narrowed to a set of
nodes only if everything that may put memory there fits: the memory limits of all jobs that can
touch the set, up to what the set has left beside a reserve and the use by others. A job that is
not narrowed can touch every node, so its limit counts everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """One job on the machine. ``limit_mib`` None is no limit. ``masks`` are the sets of NUMA nodes
    that its steps and tasks would be narrowed to; empty for a job that must not be narrowed."""

    name: str
    limit_mib: int | None
    masks: frozenset[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Ruling:
    """Whether a job may be narrowed, and the reason, in words for ``crater explain``."""

    hard: bool
    reason: str


def decide(claims: Collection[Claim], capacity_mib: Mapping[int, int]) -> dict[str, Ruling]:
    """Ruling for each claim that has masks, by name.

    ``capacity_mib`` is what each NUMA node has for jobs: its memory less the reserve and the use
    by others. Starts with every claim narrowed and drops, round by round, those that could meet a
    full node; each round only widens, so it ends, and the result doesn't depend on the order.
    """
    everywhere = frozenset(capacity_mib)
    hard = {claim.name for claim in claims if claim.masks}
    rulings: dict[str, Ruling] = {}
    while True:
        touched = {
            c.name: frozenset().union(*c.masks) if c.name in hard else everywhere for c in claims
        }
        refused = {}
        for claim in claims:
            if claim.name in hard:
                reason = _why_not(claim, claims, touched, capacity_mib)
                if reason:
                    refused[claim.name] = Ruling(False, reason)
        if not refused:
            break
        rulings |= refused
        hard -= set(refused)
    rulings |= {name: Ruling(True, "the memory limits of all jobs fit") for name in hard}
    return rulings


def _why_not(
    claim: Claim,
    claims: Collection[Claim],
    touched: Mapping[str, frozenset[int]],
    capacity_mib: Mapping[int, int],
) -> str:
    """Why a claim can't be narrowed to its masks; empty when it can."""
    for mask in sorted(claim.masks, key=sorted):
        if mask >= frozenset(capacity_mib):
            continue  # every node: nothing is taken away, so nothing can go wrong
        nodes = "NUMA node " + "+".join(str(n) for n in sorted(mask))
        room = sum(capacity_mib.get(node, 0) for node in mask)
        if claim.limit_mib is None:
            return "the job has no memory limit"
        if claim.limit_mib > room:
            return f"its limit of {claim.limit_mib} MiB is more than the {room} MiB of {nodes}"
        rivals = [c for c in claims if touched[c.name] & mask]
        unlimited = [c.name for c in rivals if c.limit_mib is None]
        if unlimited:
            return f"{unlimited[0].rpartition('/')[2]} has no memory limit and could fill {nodes}"
        total = sum(c.limit_mib or 0 for c in rivals)
        if total > room:
            return f"{len(rivals)} jobs could put {total} MiB on {nodes}, which has {room} MiB"
    return ""
