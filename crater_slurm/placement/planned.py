"""A plan from what passed: what the job gets, how Slurm is told, and what its user should know."""

from __future__ import annotations

import math

from crater_slurm.model.plan import Placement, Plan
from crater_slurm.model.request import Request
from crater_slurm.placement import sharing
from crater_slurm.placement.inventory import Inventory, NodeClass
from crater_slurm.placement.need import Need
from crater_slurm.placement.outcome import Outcome
from crater_slurm.placement.rules import Result
from crater_slurm.placement.selection import kinds


def plan(plan_id: str, request: Request, outcome: Outcome) -> Plan:
    """What the job is to get on each of its nodes."""
    need, share = outcome.need, outcome.share
    return Plan(
        id=plan_id,
        gpus=need.gpus,
        gpu_type=outcome.placement.gpu_type if outcome.placement else None,
        cpus=need.cpus,
        memory_mib=need.memory_mib,
        memory_bandwidth_gb_s=need.memory_bandwidth_gb_s,
        ssd_iops=need.ssd_iops,
        cache_gb=need.cache_gb,
        numa="strict" if need.strict else "best_effort",
        domains=outcome.domains,
        precision=request.precision,
        checkpoint=request.checkpoint,
        shards=share.shards if share else 0,
        slices=share.slices if share else 0,
        gpu_memory_mib=share.memory_mib if share else None,
        card=share.card if share else None,
        checkpoint_keep=request.checkpoint_keep or 0,
        checkpoint_keep_every=request.checkpoint_keep_every or 0,
        checkpoint_credentials=request.checkpoint_credentials,
        stage=request.stage,
        ring_gb=request.ring_gb,
    )


def placement(
    need: Need,
    passing: list[tuple[NodeClass, Result]],
    gres_type: str | None,
    share: sharing.Share | None,
) -> Placement:
    """How Slurm must be told it."""
    consume = {
        "membw": math.ceil(need.memory_bandwidth_gb_s or 0),
        "nviops": need.ssd_iops or 0,
        "nvme": need.cache_gb or 0,
    }
    keep_together = need.strict and not _whole_node(passing)
    return Placement(
        gpus=need.gpus,
        shards=share.shards if share and need.shared else 0,
        gpu_type=gres_type,
        cores=0 if need.cpus is None or need.cpus_in_options else need.cpus,
        threads_per_core=max(c.profile.cpu.threads_per_core for c, _ in passing),
        cores_are_threads=need.physical_cores is False,
        options_are_cores=need.physical_cores is True,
        nodes=need.nodes,
        domains=max((r.fit.count for _, r in passing if r.fit), default=0) if keep_together else 0,
        domain_gpus=_domain_gpus(passing) if keep_together else 0,
        consume={name: amount for name, amount in consume.items() if amount},
    )


def _domain_gpus(passing: list[tuple[NodeClass, Result]]) -> int:
    """GPUs per NUMA node when every machine shares them out alike, else 0."""
    shares = kinds(passing)
    return next(iter(shares))[1] if len(shares) == 1 else 0


def _whole_node(passing: list[tuple[NodeClass, Result]]) -> bool:
    """Whether the job uses all NUMA nodes of every machine anyway: nothing to keep together."""
    return all(r.fit is None or r.fit.count == len(c.profile.cpu_domains) for c, r in passing)


def notes(
    inventory: Inventory,
    passing: list[tuple[NodeClass, Result]],
    need: Need,
    passed: int,
    shared: sharing.Shared | None,
) -> tuple[str, ...]:
    """What a user should know of the nodes that can run the job."""
    found = list(sharing.notes(shared.share, need, shared.policy)) if shared else []
    if not passed & (inventory.usable | inventory.in_maintenance):
        found.append(
            f"all {passed.bit_count()} nodes that can run this job are down or drained now"
        )
    if partly := [c for c, r in passing if r.fit is not None and not r.fit.everywhere]:
        example = inventory.names_of(partly[0].nodes & passed, 1)[0]
        fits = next(r.fit for c, r in passing if c is partly[0] and r.fit)
        chosen = ", ".join(str(n) for n in fits.chosen)
        nodes, meet = ("node", "meets") if len(fits.chosen) == 1 else ("nodes", "meet")
        found.append(
            f"on {example} only NUMA {nodes} {chosen} {meet} the need and Slurm can't be told "
            "which one to use; crater explain shows which one the job got"
        )
    mixed = [(c, r) for c, r in passing if len(r.eligible) < len(c.profile.gpus)]
    if mixed and need.untyped:
        example = inventory.names_of(mixed[0][0].nodes & passed, 1)[0]
        types = ", ".join(sorted({g.gres_type or g.model for g in mixed[0][0].profile.gpus}))
        found.append(
            f"{example} has GPUs that do not meet the need ({types}) and your own option names "
            "no type: Slurm may give any of them"
        )
    return tuple(found)
