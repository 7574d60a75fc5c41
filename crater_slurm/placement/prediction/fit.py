"""Whether a workload fits a card, and the smallest change with which it would.

A workload fits when the upper bound of what it needs lies within the card's memory, as the
driver states it, less a headroom. What the allocator holds without using it counts as little as
it does on a full card, where it is given back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from crater_slurm.catalogue.llms import Known, describe
from crater_slurm.model.workload import Workload
from crater_slurm.placement.prediction.memory import Prediction, predict
from crater_slurm.placement.prediction.settings import settle


@dataclass(frozen=True, slots=True)
class Fit:
    """``needed_mib`` is the upper bound of one GPU, ``usable_mib`` what the card leaves."""

    fits: bool
    needed_mib: int
    usable_mib: int
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Change:
    """Directives that make a workload fit, and what it needs then."""

    directives: tuple[str, ...]
    workload: Workload
    fit: Fit


def fit(
    workload: Workload, memory_mib: int, *, headroom: float = 0.0, known: Known | None = None
) -> Fit:
    """Whether ``workload`` fits a card of ``memory_mib``, of which ``headroom`` (a share) is
    left free. UsageError where the model's size can't be told."""
    prediction = predict(workload, known, card_bytes=memory_mib * 2.0**20)
    needed = prediction.mib(prediction.needed)
    usable = int(memory_mib * (1 - headroom))
    return Fit(needed <= usable, needed, usable, prediction)


#: One change: the directive in words, the workload then, and how much it costs its user.
_Step = tuple[str, Workload, float]


def smallest_change(workload: Workload, memory_mib: int, *, headroom: float = 0.0) -> Change | None:
    """The cheapest of all combinations of at most three changes with which it fits; None when
    none does. Without need for a change, one without directives.

    Costs follow what a user loses: time (checkpointing, smaller batches), cards (sharding), then
    what is trained (length, adapters, a quantised base).
    """
    known = describe(workload)
    found = fit(workload, memory_mib, headroom=headroom, known=known)
    if found.fits or known is None:
        return Change((), workload, found) if found.fits else None
    for _, names, changed in sorted(_combinations(workload, known), key=lambda each: each[0]):
        changed = replace(changed, traced_bytes=None)  # that step was another
        found = fit(changed, memory_mib, headroom=headroom, known=known)
        if found.fits:
            return Change(names, changed, found)
    return None


def _combinations(
    workload: Workload, known: Known
) -> Iterator[tuple[float, tuple[str, ...], Workload]]:
    for count in (1, 2, 3):
        for kinds in itertools.combinations(_KINDS, count):
            yield from _applied(0.2 * count, (), workload, known, kinds)


def _applied(
    cost: float,
    names: tuple[str, ...],
    workload: Workload,
    known: Known,
    kinds: tuple[Callable[[Workload, Known], list[_Step]], ...],
) -> Iterator[tuple[float, tuple[str, ...], Workload]]:
    if not kinds:
        yield cost, names, workload
        return
    for name, changed, more in kinds[0](workload, known):
        yield from _applied(cost + more, (*names, name), changed, known, kinds[1:])


def _checkpointing(w: Workload, known: Known) -> list[_Step]:
    settings = settle(w, known)
    if settings.checkpointing or not settings.trains:
        return []
    return [("activation-checkpointing=yes", replace(w, activation_checkpointing=True), 1.0)]


def _batch(w: Workload, known: Known) -> list[_Step]:
    batch, steps = settle(w, known).batch, []
    for halvings in range(1, 12):
        if (smaller := batch >> halvings) < 1:
            break
        steps.append((f"micro-batch={smaller}", replace(w, micro_batch=smaller), 0.6 * halvings))
    return steps


def _optimizer(w: Workload, known: Known) -> list[_Step]:
    settings = settle(w, known)
    if not settings.trains or settings.adapters or settings.optimizer not in {"adamw", "lion"}:
        return []
    return [("optimizer=adamw_8bit", replace(w, optimizer="adamw_8bit"), 2.0)]


def _more_gpus(w: Workload, known: Known) -> list[_Step]:
    settings = settle(w, known)
    if not settings.trains:
        return [
            (f"tensor-parallel={n} gpus={n}", replace(w, tensor_parallel=n, gpus=n), 2.5 + n / 4)
            for n in (2, 4, 8)
            if n > w.tensor_parallel
        ]
    steps: list[_Step] = []
    word = "zero3" if settings.recipe.training == "mixed" else "fsdp"
    if w.gpus > 1 and settings.stage < 3:
        steps.append((f"sharding={word}", replace(w, sharding=word), 1.5))
    for gpus in (2, 4, 8, 16, 32, 64):
        if gpus > w.gpus:
            name = f"sharding={word} gpus={gpus}"
            steps.append((name, replace(w, sharding=word, gpus=gpus), 2.0 + gpus / w.gpus / 4))
    return steps


def _length(w: Workload, known: Known) -> list[_Step]:
    length, steps = settle(w, known).length, []
    for halvings in range(1, 8):
        if (shorter := length >> halvings) < 128:
            break
        changed = replace(w, sequence_length=shorter)
        steps.append((f"sequence-length={shorter}", changed, 3.0 + halvings))
    return steps


def _method(w: Workload, known: Known) -> list[_Step]:
    method = settle(w, known).method
    if method == "inference":
        return [(f"quantization={q}", replace(w, quantization=q), cost) for q, cost in (
            ("int8", 3.0), ("awq", 4.0)) if w.quantization in {None, "none"}]  # fmt: skip
    steps: list[_Step] = []
    if method in {"full", "pretrain"}:
        steps.append(("method=lora", replace(w, method="lora", optimizer=None), 6.0))
    if method in {"full", "pretrain", "lora"}:
        steps.append(("method=qlora", replace(w, method="qlora", optimizer=None), 7.0))
    return steps


_KINDS = (_checkpointing, _batch, _optimizer, _more_gpus, _length, _method)
