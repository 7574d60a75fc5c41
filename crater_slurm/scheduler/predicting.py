"""Predicts a submission's workload, once for all that are alike, from memory alone.

The formula is corrected by the peaks that jobs of the same model, method and framework showed. A
card below the lower bound can't hold the work and is left out; the upper bound is what a card is
preferred for. A model whose size nobody knows is told, and nothing is asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from crater_slurm.errors import UsageError
from crater_slurm.model.job import Job
from crater_slurm.model.observation import Observation
from crater_slurm.model.request import Request
from crater_slurm.model.units import format_mib
from crater_slurm.model.workload import Workload, workload_from, workload_of
from crater_slurm.placement.need import Expected
from crater_slurm.placement.prediction.calibrate import Peak
from crater_slurm.placement.prediction.host import HostNeed, host_needs
from crater_slurm.placement.prediction.memory import Prediction, predict

#: Workloads whose prediction is kept; a cluster's users repeat themselves far below this.
_MOST_KEPT = 4096
#: Peaks of a workload that are looked at, the newest.
_MOST_PEAKS = 16

Peaks = Callable[[Workload], tuple[Observation, ...]]
#: The prognosis of a submission.
Predict = Callable[[Request, Job], "Prognosis"]


@dataclass(frozen=True, slots=True)
class Prognosis:
    """What is expected of a job: for the planner, for the record, and in words for its user."""

    expected: Expected | None = None
    record: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


NOTHING = Prognosis()


class Predictor:
    """Prognoses by workload and what was seen of it. ``require`` leaves too small cards out."""

    def __init__(self, peaks: Peaks, *, require: bool = True) -> None:
        self._peaks = peaks
        self._require = require
        self._kept: dict[Hashable, Prognosis] = {}

    def __call__(self, request: Request, job: Job) -> Prognosis:
        """The prognosis of one submission; never raises for a request that parsed."""
        gpus = job.gpus_per_node or request.gpus or 0
        workload = workload_of(request, (gpus or 1) * job.nodes)
        if workload is None:
            return NOTHING
        seen = self._peaks(workload)[:_MOST_PEAKS]
        pattern = request.io_pattern or "random"
        # An observation never changes: who made it when stands for it.
        key = (workload, pattern, tuple((one.job_id, one.node, one.time) for one in seen))
        found = self._kept.get(key)
        if found is None:
            found = self._prognosis(workload, pattern, seen)
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = found
        return _compared(found, request)

    def _prognosis(
        self, workload: Workload, io_pattern: str, seen: Sequence[Observation]
    ) -> Prognosis:
        peaks = [
            Peak(one.gpu_memory_peak_mib * 2.0**20, workload_from(one.workload))
            for one in seen
            if one.gpu_memory_peak_mib and one.workload
        ]
        try:
            found = predict(workload, peaks=peaks)
            host = host_needs(workload, io_pattern=io_pattern)
        except UsageError as error:
            return Prognosis(notes=(f"no prediction: {error}",))
        lower, wanted = found.mib(found.lower), found.mib(found.needed)
        least = lower if self._require and _is_certain(workload, found) else 0
        note = (
            f"predicted for each GPU: {format_mib(found.mib(found.expected))} "
            f"({format_mib(lower)} to {format_mib(found.mib(found.upper))}, by {_source(found)})"
        )
        return Prognosis(
            Expected(least, wanted),
            _record(found, host, len(peaks)) | {"least_mib": least},
            (note,),
        )


def _is_certain(workload: Workload, found: Prediction) -> bool:
    """Whether the lower bound may leave cards out: a guess about what nobody said may not.

    How a model is trained decides most of it; what an unknown framework does, and what sharding
    may keep on the host, nobody can tell.
    """
    if found.decided_by in ("observed", "traced"):
        return True
    alone = workload.gpus == 1 and workload.sharding is None
    return (
        workload.method is not None
        and found.recipe != "generic"
        and (alone or workload.sharding in ("none", "ddp"))
    )


def expected_of(record: dict[str, Any]) -> Expected | None:
    """What a decision's record says was expected, so that it can be planned again alike."""
    if "wanted_mib" not in record:
        return None
    return Expected(int(record.get("least_mib", 0)), int(record["wanted_mib"]))


def _source(found: Prediction) -> str:
    if found.decided_by == "observed":
        return "what such jobs took"
    if found.decided_by == "traced":
        return "a traced step"
    return f"the formula for {found.model} with {found.recipe}"


def _compared(found: Prognosis, request: Request) -> Prognosis:
    """With a word where the user asks for less memory than is expected."""
    own, wanted = request.gpu_memory_mib, found.expected.wanted_mib if found.expected else 0
    if own is None or own >= wanted:
        return found
    note = f"gpu-memory={format_mib(own).replace(' ', '')} may be too little"
    return Prognosis(found.expected, found.record, (*found.notes, note))


def _record(found: Prediction, host: Sequence[HostNeed], peaks: int) -> dict[str, object]:
    return {
        "model": found.model,
        "recipe": found.recipe,
        "certainty": found.certainty,
        "decided_by": found.decided_by,
        "peaks": peaks,
        "expected_mib": found.mib(found.expected),
        "lower_mib": found.mib(found.lower),
        "upper_mib": found.mib(found.upper),
        "wanted_mib": found.mib(found.needed),
        "assumed": list(found.assumed),
        "terms": [
            {"name": term.name, "mib": found.mib(term.bytes), "why": term.why}
            for term in found.terms
            if term.bytes
        ],
        "host": [
            {
                "name": need.name,
                "unit": need.unit,
                "expected": round(need.expected, 2),
                "lower": round(need.lower, 2),
                "upper": round(need.upper, 2),
            }
            for need in host
        ],
    }
