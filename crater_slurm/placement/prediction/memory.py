"""Peak memory of one GPU for a workload: terms that add up, an interval, and why.

Pure arithmetic: states (weights, gradients, optimiser), what a step takes at its highest point,
the CUDA context, and what the allocator holds beside that. Seen peaks of the same kind of work
correct the formula. It never says that something fits; that is ``fit.py``'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from crater_slurm.catalogue.llms import Known, describe, nearest_models
from crater_slurm.errors import UsageError
from crater_slurm.model.workload import Architecture, Workload
from crater_slurm.placement.prediction.activations import Dynamic, dynamic
from crater_slurm.placement.prediction.calibrate import Peak, Trace, corrected, traced
from crater_slurm.placement.prediction.recipes import Recipe
from crater_slurm.placement.prediction.settings import PREQUANTISED, Settings, settle
from crater_slurm.placement.prediction.states import Term, trained, weights

#: Context, kernels and libraries of a process, as nvidia-smi counts them (CUDA 11 and 12).
CONTEXT_BYTES = 0.55e9
#: Half width of what no part's share covers: contexts differ by driver, card and libraries.
_DOUBT_BYTES = 0.5e9
#: Part of a card that a process can fill.
_LIMIT = 0.985
#: Relative half width that a guessed shape adds to the static part.
_GUESSED_SHAPE = {"catalogue": 0.0, "stated": 0.05, "name": 0.10}
#: Relative half width of all where nobody said the precision and no recipe tells it: it may be
#: fp32, twice as much.
_GUESSED_PRECISION = 1.0
#: Half width of what moves and is in use: at the limit of a card, where the cache is empty, the
#: peaks of recipes that were not fitted lay within an eighth of it.
_IN_USE = 0.35
#: Beyond this length nobody trains without a kernel: the scores of one layer would fill a card.
_EAGER_LENGTH = 8192
#: What counts what: the driver sees all; torch's reserved no context; its allocated no cache
#: either. ``tight`` is the driver at a card's limit, where the allocator has given its cache back.
METERS = ("driver", "reserved", "allocated", "tight")
_STEP = "the optimiser's step"
_CACHED = frozenset({"driver", "reserved"})
#: Packed samples are nearly of one length: this part of the fragments is left.
_PACKED = 0.5
#: Of lengths that are known to vary, at least so much (GMLake, ASPLOS 2024, reports reserved
#: memory up to half as much again as what is in use).
_VARYING = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Bytes of one GPU. ``lower`` and ``upper`` hold the peak with 95 %; ``needed`` is the upper
    bound without what the allocator would give back before it runs out of memory. ``decided_by``
    is ``formula``, ``traced`` or ``observed``."""

    expected: float
    lower: float
    upper: float
    needed: float
    terms: tuple[Term, ...]
    point: str
    decided_by: str
    model: str
    recipe: str
    certainty: str
    assumed: tuple[str, ...]

    def mib(self, value: float) -> int:
        """``value`` bytes in MiB, rounded up, as the driver states a card's memory."""
        return math.ceil(value / 2**20)


def predict(
    workload: Workload,
    architecture: Architecture | Known | None = None,
    peaks: Sequence[Peak] = (),
    *,
    trace: Trace | None = None,
    meter: str = "driver",
    card_bytes: float | None = None,
    recipe: Recipe | None = None,
) -> Prediction:
    """The peak of one GPU of ``workload``; UsageError when its model's size can't be told.

    ``card_bytes`` is the memory of the card, at which the allocator gives its cache back;
    ``meter`` what is to be predicted (``METERS``); ``recipe`` stands in for the framework's.
    """
    settings = settle(workload, _known(workload, architecture))
    if recipe is not None:
        settings.recipe = recipe
    formula = _formula(settings, meter, card_bytes)
    if trace is None and workload.traced_bytes:
        trace = {"step": workload.traced_bytes}
    if trace is not None:
        formula = traced(formula, trace)
    return corrected(formula, workload, peaks, lambda w: predict(w, meter=meter).expected)


def _known(workload: Workload, architecture: Architecture | Known | None) -> Known:
    if isinstance(architecture, Known):
        return architecture
    if architecture is not None:
        return Known(name=workload.model or "this model", architecture=architecture,
                     certainty="catalogue", note="sizes as given")  # fmt: skip
    if (known := describe(workload)) is not None:
        return known
    close = ", ".join(nearest_models(workload.model or ""))
    hint = f"; near to it are {close}" if close else ""
    raise UsageError(
        f"the size of model {workload.model!r} is unknown{hint}; say model-params=8.03B"
    )


def _formula(s: Settings, meter: str, card_bytes: float | None) -> Prediction:
    lasting, step_bytes = trained(s)
    if s.optimizer.startswith("paged") and meter in {"reserved", "allocated"}:
        # managed memory, which torch's allocator does not see
        lasting = [term for term in lasting if term.name != "optimiser state"]
    static = [*weights(s), *lasting, *_buffers(s, lasting)]
    own = CONTEXT_BYTES if meter in {"driver", "tight"} else 0.0
    fixed = max(0.0, s.recipe.overhead_gb * 1e9 - CONTEXT_BYTES) if meter != "allocated" else 0.0
    base = sum(term.bytes for term in static)
    slim = dynamic(s, step_bytes)
    work, held = slim, fixed
    if meter in _CACHED:
        if (fragmentation := _fragmentation(s)) > 1:
            work = dynamic(s, step_bytes, fragmentation)
        held += (fragmentation - 1) * work.fragmenting + _residue(s)
    free, least = base + own + work.bytes + held, base + own + slim.bytes
    stepping = base + own + step_bytes + _step_width(s, base + step_bytes)  # may be the peak too
    own_wide = 0.0 if work.point == _STEP else _half_width(s, base, work, meter)
    wide = max(own_wide, stepping + fixed - free)
    eager = math.hypot(own_wide, min(_eager_doubt(s, step_bytes, work, meter), 1.5 * free))
    upper = free + max(wide, eager)
    expected, kept = free, fixed
    if card_bytes is not None:  # before it runs out of memory, the allocator gives its cache back
        limit = _LIMIT * card_bytes
        kept = max(0.0, min(fixed, limit - least))
        if free > limit:
            work, expected = slim, max(least, limit)
        upper = min(upper, max(card_bytes, least + wide, stepping))
    held = max(0.0, expected - base - own - work.bytes)
    terms = [*static, *work.terms, Term("CUDA context", own, "context, kernels and libraries")]
    terms.append(Term("allocator's cache", held, "reserved and not in use: blocks, fragments"))
    if s.recipe.preallocates and not s.trains and card_bytes:
        return _preallocated(s, card_bytes, least, terms, work.point)
    lower = min(expected, max(expected - wide, (1 - s.recipe.spread_static) * (base + own)))
    needed = min(upper, kept + max(stepping, least + _half_width(s, base, slim, "tight")))
    return _told(s, (expected, lower, upper, needed), terms, work.point)


def _told(
    s: Settings, figures: tuple[float, float, float, float], terms: Sequence[Term], point: str
) -> Prediction:
    expected, lower, upper, needed = figures
    return Prediction(
        expected=expected, lower=lower, upper=upper, needed=needed,
        terms=tuple(term for term in terms if term.bytes or term.name == "kept activations"),
        point=point, decided_by="formula", model=s.name, recipe=s.recipe.name,
        certainty=s.certainty, assumed=tuple(s.assumed),
    )  # fmt: skip


def _fragmentation(s: Settings) -> float:
    """What the cache holds by what is in use, of blocks whose size follows a sample's length:
    the blocks of other samples lie unused, and are as large as these samples are long."""
    most = s.recipe.fragmentation
    if s.said.packed:
        return 1 + _PACKED * (most - 1)
    if s.varying and s.recipe.name == "generic":
        most = max(most, _VARYING)
    return 1 + (most - 1) * s.typical_share if s.varying else most


def _eager_doubt(s: Settings, step_bytes: float, work: Dynamic, meter: str) -> float:
    """What the peak rises by where attention is eager after all: nobody said which it is, and
    the framework asks for a kernel that not every model's code follows."""
    if s.attention_known or s.eager or not s.trains:
        return 0.0
    eager = replace(s, eager=True, length=min(s.length, _EAGER_LENGTH))
    fragmentation = _fragmentation(s) if meter in _CACHED else 1.0
    slow = dynamic(eager, step_bytes, fragmentation)

    def held(point: Dynamic) -> float:
        return point.bytes + (fragmentation - 1) * point.fragmenting

    return max(0.0, held(slow) - held(work))


def _residue(s: Settings) -> float:
    """Cache that is left over from quantising each matrix while the model was loaded."""
    if s.quantisation is None or s.quantisation in PREQUANTISED:
        return 0.0
    a = s.architecture
    body = (a.parameters - min(a.embedding_parameters, a.parameters)) / (s.tensor * s.pipeline)
    return s.recipe.load_residue * body


def _half_width(s: Settings, static: float, work: Dynamic, meter: str) -> float:
    """Half of the 95 % interval: independent doubts in the static and the moving part. Of what
    is in use at a card's limit a known recipe says more."""
    if work.point == _STEP:
        return _step_width(s, static + work.bytes)
    moving, spread = work.bytes, s.recipe.spread_dynamic
    if meter in _CACHED:
        moving += (_fragmentation(s) - 1) * work.fragmenting
    elif meter == "tight" and s.recipe.name != "generic":
        spread = min(spread, _IN_USE)
    doubled = _guessed(s) * (static + moving)
    of_length = 0.0 if s.length_known or s.architecture.family == "diffusion" else 0.8
    of_moving = math.hypot(spread, of_length)
    return math.hypot(_relative(s) * static, of_moving * moving, doubled, _DOUBT_BYTES)


def _step_width(s: Settings, static: float) -> float:
    return math.hypot(_relative(s) * static, _guessed(s) * static, _DOUBT_BYTES)


def _relative(s: Settings) -> float:
    return math.hypot(s.recipe.spread_static, _GUESSED_SHAPE[s.certainty])


def _guessed(s: Settings) -> float:
    return 0.0 if s.said.precision or s.recipe.name != "generic" else _GUESSED_PRECISION


def _buffers(s: Settings, lasting: Sequence[Term]) -> list[Term]:
    """What frameworks set aside for sending: ZeRO's buckets, DDP's copy of the gradients."""
    if not s.trains:
        return []
    gigabytes = s.recipe.buffers_gb
    if gigabytes and (not s.adapters or s.stage):
        return [Term("buckets", gigabytes * 1e9, "DeepSpeed's buffers for reduce and gather")]
    if s.replicas > 1 and s.stage == 0:
        gradients = next((t.bytes for t in lasting if t.name == "gradients"), 0.0)
        return [Term("buckets", gradients, "DDP's buckets, a copy of the gradients")]
    return []


def _preallocated(
    s: Settings, card: float, needed: float, terms: list[Term], point: str
) -> Prediction:
    """A server that takes its share of the card at once, however much it needs."""
    share = s.recipe.preallocates or 0.0
    taken = max(needed, share * card)
    terms = [term for term in terms if term.name != "allocator's cache"]
    terms.append(Term("set aside", taken - needed, f"{s.recipe.name} takes {share:.0%} of a card"))
    figures = (taken, 0.95 * taken, max(1.05 * taken, 1.1 * needed), 1.1 * needed)
    return _told(s, figures, terms, point)
