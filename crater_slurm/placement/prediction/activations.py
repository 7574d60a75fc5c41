"""Bytes that come and go within a step: kept activations, one layer's work, logits, KV cache.

Counted per layer from what autograd keeps (after Korthikanti et al., arXiv 2205.05198, with
gated MLPs and grouped heads). A step has three high points, and its peak is the highest:
the loss (kept activations and all copies of the logits), the backward pass through a layer (kept
activations and that layer's own), and the optimiser's step (nothing kept).
"""

from __future__ import annotations

from dataclasses import dataclass

from crater_slurm.placement.prediction.settings import PREQUANTISED, Settings
from crater_slurm.placement.prediction.states import Term

#: Bytes of one score of eager attention (query x key x head): kept for backward (soft-max,
#: dropout's mask and result), and at most at once while a layer goes backward (scores, mask
#: added, soft-max and its copy, and the gradients of two of these).
_SCORE_KEPT, _SCORE_WORK = 5.0, 12.0
#: A layer that goes backward holds its activations and, beside them, gradients of a part.
_WORK_FACTOR = 1.2
#: Bytes of dropout's mask, and of the input of a quantised matrix as bitsandbytes keeps it.
_MASK, _QUANTISED_INPUT = 1.0, 4.8
#: A chunked loss holds this part of the fp32 copies at once.
_CHUNK = 1 / 8
#: Diffusion over 64 x 64 latents (512 px): bytes that one sample keeps in fp32, from the sizes
#: of Stable Diffusion 1's feature maps and its eager attention; with layers computed again.
_DIFFUSION_KEPT, _DIFFUSION_AGAIN = 10.5e9, 2.7e9


_FRAGMENTING = frozenset({"logits", "one layer's work", "prefill"})


@dataclass(frozen=True, slots=True)
class Dynamic:
    """The highest point of a step: its terms, and which point it is."""

    terms: tuple[Term, ...]
    point: str

    @property
    def bytes(self) -> float:
        return sum(term.bytes for term in self.terms)

    @property
    def fragmenting(self) -> float:
        """Bytes of blocks that come and go with each sample's own length."""
        return sum(term.bytes for term in self.terms if term.name in _FRAGMENTING)


def kept_per_token(s: Settings) -> float:
    """Bytes that one layer keeps of one token, nothing computed again.

    Block inputs and norms (4 hidden), query, key and value before and after rotation, attention's
    result, and in the MLP gate, up, their activation and product (two of these where not gated).
    """
    a = s.architecture
    mlp = (4 if a.gated_mlp else 2) * a.intermediate * a.active_experts
    values = 4 * a.hidden / s.tensor + (3 * a.query_width + 3 * a.kv_width + mlp) / s.tensor
    return values * s.compute_bytes


def adapter_inputs(s: Settings) -> float:
    """Bytes that one layer keeps of one token for its adapters and its quantised matrices.

    A frozen matrix needs no input for its gradient; an adapter's dropout keeps its own copy of
    it and the mask, and bitsandbytes keeps (and casts) the input of each matrix.
    """
    if not s.adapters:
        return 0.0
    a = s.architecture
    attention, mlp = float(a.hidden), 2.0 * a.hidden + a.intermediate * a.active_experts
    adapted = attention + (a.query_width + mlp if s.targets == "all" else 0.0)
    kept = (s.compute_bytes + _MASK) * adapted
    if s.quantisation is not None and s.quantisation not in PREQUANTISED:
        kept += _QUANTISED_INPUT * (attention + a.hidden + a.intermediate * a.active_experts)
    return kept / s.tensor


def dynamic(s: Settings, step_bytes: float, fragmentation: float = 1.0) -> Dynamic:
    """What a step takes beside the states at the point that is highest with its fragments."""
    if s.architecture.family == "diffusion":
        return _diffusion(s, step_bytes)
    if not s.trains:
        return _serving(s)
    kept = _kept(s)
    points = [
        Dynamic((*kept, _logits(s)), "the loss"),
        Dynamic((*kept, _layer(s)), "the backward pass"),
    ]
    if step_bytes:
        why = "copies that the optimiser makes while it steps"
        points.append(Dynamic((Term("optimiser step", step_bytes, why),), "the optimiser's step"))
    return max(points, key=lambda p: p.bytes + (fragmentation - 1) * p.fragmenting)


def _kept(s: Settings) -> list[Term]:
    """What forward keeps for backward. Of a pipeline the first stage holds as many micro-batches
    as there are stages, so that the pipeline's depth cancels out."""
    a, tokens = s.architecture, s.tokens
    if s.checkpointing:
        if s.recipe.offloads_checkpoints or "activations" in s.said.offload:
            return [Term("kept activations", 0.0, "each layer's input goes to the host")]
        total = a.layers * a.hidden * s.compute_bytes * tokens / s.tensor
        why = f"{a.layers} layers x {a.hidden} x {s.compute_bytes:g} B x {tokens} tokens"
        return [Term("kept activations", total, why + ", the rest is computed again")]
    per = kept_per_token(s) + adapter_inputs(s)
    total = a.layers * per * tokens
    why = f"{a.layers} layers x {per / 1e3:.0f} kB x {tokens} tokens"
    if "activations" in s.said.offload:
        two = total / max(1, a.layers) * 2
        return [Term("kept activations", two, "of two layers, the rest is on the host")]
    terms = [Term("kept activations", total, why + ", nothing is computed again")]
    if s.eager:
        scores = a.layers * _SCORE_KEPT / 2 * s.compute_bytes * _scores(s)
        terms.append(Term("attention scores", scores, "eager attention keeps 5 B per score"))
    return terms


def _scores(s: Settings) -> float:
    samples = s.batch * (2 if s.method == "dpo" else 1)
    return samples * s.architecture.heads / s.tensor * float(s.length) ** 2


def _layer(s: Settings) -> Term:
    factor = _WORK_FACTOR if s.checkpointing else _WORK_FACTOR - 1
    work = factor * kept_per_token(s) * s.tokens
    why = "activations and gradients of one layer"
    if s.eager:
        work += _SCORE_WORK / 2 * s.compute_bytes * _scores(s)
        why += ", with its score matrix (eager attention)"
    return Term("one layer's work", work, why)


def _logits(s: Settings) -> Term:
    recipe = s.recipe
    quantised = s.quantisation is not None and recipe.logit_bytes_quantised is not None
    per = recipe.logit_bytes_quantised if quantised else recipe.logit_bytes
    assert per is not None
    why = "with its copies, soft-max and gradient"
    if s.fused_loss:
        per = min(
            per, recipe.whole_logit_bytes + _CHUNK * per if recipe.whole_logit_bytes else 0.25
        )
        why = "in 16 bit, its loss in chunks" if recipe.whole_logit_bytes else "fused, never whole"
    if s.compute_bytes == 4:
        per = max(per, 0.75 * 2 * per)
    entries = s.architecture.vocabulary / s.tensor
    return Term("logits", per * entries * s.tokens,
                f"{entries:g} entries x {per:g} B x {s.tokens} tokens, {why}")  # fmt: skip


def _serving(s: Settings) -> Dynamic:
    a = s.architecture
    per = 2 * (a.layers + a.cross_layers) / s.pipeline * a.kv_width / s.tensor * s.compute_bytes
    cache = per * s.batch * s.length
    tokens = s.batch * s.length
    work = (2 * a.hidden + 2 * a.intermediate * a.active_experts / s.tensor) * s.compute_bytes
    return Dynamic(
        (
            Term("KV cache", cache, f"{per / 1e3:.1f} kB per token x {tokens} tokens"),
            Term("prefill", work * tokens, "one layer's activations over the prompt"),
            Term("logits", 6.0 * a.vocabulary * s.batch, "of the last token, with a fp32 copy"),
        ),
        "prefill",
    )


def _diffusion(s: Settings, step_bytes: float) -> Dynamic:
    again = s.checkpointing
    per = (_DIFFUSION_AGAIN if again else _DIFFUSION_KEPT) * s.compute_bytes / 4
    if not s.trains:
        per = 1.5e9 * s.compute_bytes / 4
    term = Term("kept activations", per * s.batch, "feature maps and attention of 512 px samples")
    if step_bytes > term.bytes:
        return Dynamic((Term("optimiser step", step_bytes, "copies while it steps"),), "the step")
    return Dynamic((term,), "the backward pass")
