"""The record of a decision: complete in itself, and of a user's words only what is fit to show."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from crater_slurm.model.job import GpuOption, Job
from crater_slurm.model.plan import Decision, Mode, Verdict
from crater_slurm.model.request import Request
from crater_slurm.placement.outcome import Outcome
from crater_slurm.scheduler.state import View
from crater_slurm.slurm.fields import planning_fields

#: Of the user's options this much is kept in a record; a node list may be longer than useful.
_LONGEST_OPTION = 500
_MOST_ITEMS = 50
#: All of them together that a job is planned again from; a list of 5,000 nodes fits.
_LONGEST_SUBMITTED = 65_536


def _options(job: Job) -> dict[str, Any]:
    """The user's own options that were stated, for the record."""
    shown: dict[str, Any] = {}
    for entry in dataclasses.fields(job):
        value = getattr(job, entry.name)
        if value in (None, "", (), {}, False) or entry.name in {"user_id", "user_name", "comment"}:
            continue
        if entry.name == "gpus":
            value = [" ".join(_gpu_words(g)) for g in value]
        shown[entry.name] = kept(value)
    return shown


def _gpu_words(option: GpuOption) -> Iterator[str]:
    yield f"{option.count} shards" if option.shards else str(option.count)
    yield f"per {option.scope}"
    if option.type:
        yield option.type


def kept(value: Any) -> Any:
    """A user's text as it may be kept and shown: short, and nothing that a terminal obeys."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "\ufffd" for c in value[:_LONGEST_OPTION])
    if isinstance(value, list | tuple):
        return [kept(item) for item in value[:_MOST_ITEMS]]
    if isinstance(value, dict):
        return {kept(name): item for name, item in list(value.items())[:_MOST_ITEMS]}
    return value


def _replayable(message: Mapping[str, str]) -> dict[str, str]:
    """What planning read, whole or not at all: half a node list would be another job."""
    found = planning_fields(message)
    size = sum(len(value) for value in found.values())
    return found if size <= _LONGEST_SUBMITTED else {}


def record(
    decision_id: str,
    mode: Mode,
    now: float,
    request: Request,
    job: Job,
    outcome: Outcome,
    view: View,
    message: Mapping[str, str],
    *,
    health: dict[str, object] | None = None,
    prediction: dict[str, object] | None = None,
) -> Decision:
    """The record of one submission's outcome."""
    return Decision(
        id=decision_id,
        verdict=Verdict.PLANNED if outcome.feasible else Verdict.REFUSED,
        mode=mode,
        time=now,
        user_id=job.user_id,
        user_name=kept(job.user_name),
        request=request.given(),
        options=_options(job),
        conditions=outcome.conditions,
        nodes_considered=(outcome.passed | outcome.failed).bit_count(),
        nodes_passed=outcome.passed.bit_count(),
        passed_nodes=view.hostlist(outcome.passed),
        excluded=outcome.excluded,
        scores=outcome.scores,
        nearest_node=outcome.nearest_node,
        smallest_change=outcome.smallest_change,
        plan=outcome.plan,
        submitted=_replayable(message),
        facts=outcome.facts,
        health=health or {},
        prediction=prediction or {},
    )
