"""Which step goes to the destination next, and which is needless there; pure rules.

The newest is worth most and goes first, except that one which another node of the job has brought
there already goes before it, so that steps get complete there.
"""

from __future__ import annotations

from crater_slurm.checkpoint import keep
from crater_slurm.checkpoint.flush_state import Step
from crater_slurm.checkpoint.remote.catalogue import Catalogue
from crater_slurm.checkpoint.spec import Spec


def choose(waiting: list[Step], known: Catalogue, spec: Spec) -> tuple[Step | None, list[Step]]:
    """The next of the steps that wait, and those that newer ones there make needless. Raises
    RemoteError, for it may have to ask what is there."""
    urgent = [step for step in waiting if step.urgent]
    newest = sorted(waiting, key=lambda s: (s.manifest.step, s.manifest.time), reverse=True)
    if urgent:
        return urgent[0], []
    alone = all(set(s.manifest.ranks) >= set(range(s.manifest.world_size)) for s in waiting)
    if len(newest) == 1 and alone:
        return newest[0], []
    there = known.steps()
    complete = [s.item for s in there if s.complete and s.job_id == spec.job_id]
    needless = [step for step in newest if _superseded(step, complete, spec)]
    wanted = [step for step in newest if step not in needless]
    begun = {(s.name, s.step, s.run) for s in there if not s.complete}
    next_ = next((s for s in wanted if s.key in begun), wanted[0] if wanted else None)
    return next_, needless


def _superseded(step: Step, complete: list[keep.Item], spec: Spec) -> bool:
    manifest = step.manifest
    item = keep.Item(manifest.name, manifest.step, manifest.run, manifest.time)
    return keep.superseded(item, complete, spec.keep_last, spec.keep_every)
