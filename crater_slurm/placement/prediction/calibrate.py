"""Corrects a formula by what was seen: peaks of the same kind of work, or one traced step.

A seen peak says by how much the formula is off for this model, method and framework; the more
there are, and the nearer in batch and length, the more they count. Peaks never make a bound
lower than what was seen of these very settings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from crater_slurm.model.workload import Workload
from crater_slurm.placement.prediction.states import Term

if TYPE_CHECKING:
    from crater_slurm.placement.prediction.memory import Prediction

#: Peaks that weigh as much as the formula.
_PRIOR = 0.5
#: A ratio beyond these is another job's peak or another unit, and is not believed.
_BELIEVED = (0.2, 5.0)


@dataclass(frozen=True, slots=True)
class Peak:
    """One seen peak of a GPU, in bytes as the driver counts, and the work that it was seen of."""

    bytes: float
    workload: Workload


#: Bytes of one step by category, as a memory profile of the training library names them.
Trace = Mapping[str, float]
#: A trace's categories, and the terms that each stands for.
CATEGORIES: dict[str, tuple[str, ...]] = {
    "parameter": ("weights", "embeddings and head", "adapters", "gathered weights"),
    "gradient": ("gradients",),
    "optimizer_state": ("optimiser state",),
    "activation": ("kept activations", "one layer's work", "attention scores", "KV cache"),
    "temporary": ("logits", "optimiser step", "prefill"),
}
#: All of them at once, where only the peak is known.
CATEGORIES["step"] = tuple(term for terms in CATEGORIES.values() for term in terms)


def traced(prediction: Prediction, trace: Trace) -> Prediction:
    """``prediction`` with its terms replaced by what a traced step took."""
    known = {name: value for name, value in trace.items() if name in CATEGORIES and value >= 0}
    if not known:
        return prediction
    gone = {term for name in known for term in CATEGORIES[name]}
    terms = [term for term in prediction.terms if term.name not in gone]
    terms += [Term(name.replace("_", " "), value, "traced") for name, value in known.items()]
    expected = sum(term.bytes for term in terms)
    left = 1 - sum(known.values()) / max(expected, 1.0)
    wide = (prediction.upper - prediction.expected) * max(0.15, min(1.0, left))
    return replace(
        prediction,
        expected=expected,
        lower=max(0.0, expected - wide),
        upper=expected + wide,
        needed=expected + wide,
        terms=tuple(terms),
        decided_by="traced",
    )


def corrected(
    prediction: Prediction,
    workload: Workload,
    peaks: Sequence[Peak],
    formula: Callable[[Workload], float],
) -> Prediction:
    """``prediction`` shrunk toward the ratio of seen to predicted peaks of the same key."""
    ratios, weights, same = [], [], []
    for peak in peaks:
        if peak.workload.key != workload.key or not math.isfinite(peak.bytes) or peak.bytes <= 0:
            continue
        ratio = peak.bytes / formula(peak.workload)
        if _BELIEVED[0] <= ratio <= _BELIEVED[1]:
            ratios.append(ratio)
            weights.append(_nearness(peak.workload, workload))
            if peak.workload == workload:
                same.append(peak.bytes)
    if not ratios:
        return prediction
    count = sum(weights)
    logs = [math.log(r) for r in ratios]
    mean = sum(w * x for w, x in zip(weights, logs, strict=True)) / (count + _PRIOR)
    factor = math.exp(mean)
    noise = statistics.pstdev(logs) if len(logs) > 1 else 0.0
    return _scaled(prediction, factor, count, noise, max(same, default=0.0))


def _scaled(
    prediction: Prediction, factor: float, count: float, noise: float, seen: float
) -> Prediction:
    expected = prediction.expected * factor
    shrink = math.sqrt(_PRIOR / (_PRIOR + count))
    wide = max((prediction.upper - prediction.expected) * factor * shrink,
               2 * noise * expected, 0.03 * expected)  # fmt: skip
    correction = Term("correction", expected - prediction.expected, "by the peaks that were seen")
    return replace(
        prediction,
        expected=expected,
        lower=max(0.0, expected - wide),
        upper=max(expected + wide, 1.02 * seen),
        needed=max(min(prediction.needed * factor, expected + wide), 1.02 * seen),
        terms=(*prediction.terms, correction),
        decided_by="observed" if count >= _PRIOR else prediction.decided_by,
    )


def _nearness(seen: Workload, asked: Workload) -> float:
    """1 for the same settings; less the further batch x length and the number of GPUs are."""

    def tokens(w: Workload) -> float:
        return float((w.micro_batch or 1) * (w.sequence_length or 512))

    apart = abs(math.log2(tokens(seen) / tokens(asked))) + abs(math.log2(seen.gpus / asked.gpus))
    changed = sum(
        getattr(seen, name) != getattr(asked, name)
        for name in (
            "activation_checkpointing",
            "optimizer",
            "precision",
            "quantization",
            "sharding",
        )
    )
    return float(1 / (1 + 0.5 * apart + 2 * changed))
