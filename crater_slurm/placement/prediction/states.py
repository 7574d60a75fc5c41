"""Bytes that live for the whole run: weights, adapters, gradients, optimiser state.

ZeRO's stages divide as its paper says (arXiv 1910.02054): stage 1 the optimiser's state, stage 2
also gradients, stage 3 also weights. FSDP is stage 3. Tensor and pipeline parallelism divide all.
"""

from __future__ import annotations

from dataclasses import dataclass

from crater_slurm.model.workload import Architecture
from crater_slurm.placement.prediction.settings import PREQUANTISED, WEIGHT_BYTES, Settings

#: Moments of each optimiser and bytes of one, where they don't follow the weight's format.
MOMENTS: dict[str, tuple[float, float | None]] = {
    "adamw": (2, None),
    "adamw_8bit": (2, 1.02),
    "paged_adamw_8bit": (2, 1.02),
    "paged_adamw": (2, None),
    "adafactor": (0.01, 4.0),
    "sgd": (1, None),
    "lion": (1, None),
}
#: ZeRO-3 keeps at most this many parameters gathered (stage3_max_live_parameters).
_LIVE_PARAMETERS = 1e9
#: ZeRO-3 steps this many parameters at a time (sub_group_size).
_SUB_GROUP = 1e9


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a prediction, of one GPU: bytes, and the formula or source in words."""

    name: str
    bytes: float
    why: str


def lora_parameters(architecture: Architecture, rank: int, targets: str) -> float:
    """Parameters of the adapters: rank x (inputs + outputs) of each adapted matrix."""
    a = architecture
    if a.family == "diffusion":
        return 0.004 * a.parameters * rank / 16
    query, key = a.hidden + a.query_width, a.hidden + a.kv_width
    mlp = (3 if a.gated_mlp else 2) * (a.hidden + a.intermediate) * a.experts
    width = {
        "qv": query + key,
        "qkv": a.hidden + a.query_width + 2 * a.kv_width,
        "attention": 2 * query + 2 * key,
    }.get(targets, 2 * query + 2 * key + mlp)
    return float(rank * width * a.layers)


def trained_parameters(s: Settings) -> float:
    """Parameters that have a gradient."""
    if not s.trains:
        return 0.0
    if not s.adapters:
        return s.architecture.parameters
    extra = s.architecture.vocabulary * s.architecture.hidden * 2 if s.train_embeddings else 0
    return lora_parameters(s.architecture, s.rank, s.targets) + extra


def weights(s: Settings) -> list[Term]:
    a, share = s.architecture, _weight_share(s)
    if s.quantisation is None:
        total, why = a.parameters * s.weight_bytes, f"{_b(a.parameters)} x {s.weight_bytes:g} B"
        terms = [Term("weights", total * share, why + _divided(share))]
    else:
        outside = min(a.embedding_parameters, a.parameters)
        per = WEIGHT_BYTES[s.quantisation]
        wide = 4.0 if _upcast(s) else s.compute_bytes
        total = (a.parameters - outside) * per
        terms = [
            Term("weights", total * share, f"{_b(a.parameters - outside)} x {per:.3g} B "
                 f"({s.quantisation} with its blocks' scales)" + _divided(share)),
            Term("embeddings and head", outside * wide * share,
                 f"{_b(outside)} x {wide:g} B, not quantised" + _divided(share)),
        ]  # fmt: skip
    return terms + _gathered(s) + _other_models(s)


def _upcast(s: Settings) -> bool:
    """Whether what is not quantised is raised to fp32: peft does so, but not over GPTQ."""
    return s.trains and s.recipe.upcasts_quantised and s.quantisation not in PREQUANTISED


def _weight_share(s: Settings) -> float:
    """Part of the weights that lies on one GPU all the time."""
    if "parameters" in s.said.offload:
        return 0.0
    return 1 / (s.tensor * s.pipeline * (s.replicas if s.stage == 3 else 1))


def _gathered(s: Settings) -> list[Term]:
    """Weights that sharding brings back for the moment of their use."""
    offloaded = "parameters" in s.said.offload
    if not offloaded and (s.stage < 3 or s.replicas == 1):
        return []
    a = s.architecture
    per = s.weight_bytes if s.quantisation is None else WEIGHT_BYTES[s.quantisation]
    whole = a.parameters / (s.tensor * s.pipeline)
    outside = a.embedding_parameters * s.weight_bytes / s.tensor
    if s.fully_sharded:
        gathered = min(whole * per, 2 * a.layer_parameters / s.tensor * per + outside)
        why = "two layers and the embeddings gathered (FSDP prefetch)"
    else:
        gathered = min(whole, _LIVE_PARAMETERS) * per + outside
        why = "up to 10^9 live parameters (ZeRO-3's default) and the embeddings gathered"
    return [Term("gathered weights", gathered, why)]


def _other_models(s: Settings) -> list[Term]:
    """Reference, reward and value models of preference training."""
    per = s.architecture.parameters * s.weight_bytes / (s.tensor * s.pipeline)
    per /= s.replicas if s.stage == 3 else 1
    if s.method == "dpo" and not s.adapters:
        return [Term("reference model", per, "a frozen copy of the policy")]
    if s.method == "rlhf":
        frozen = 1 if s.adapters else 2
        return [
            Term("frozen models", frozen * per,
                 "reward model" if s.adapters else "reference and reward models"),
            Term("value model", per, "a critic of the policy's size"),
        ]  # fmt: skip
    return []


def trained(s: Settings) -> tuple[list[Term], float]:
    """Adapters, gradients and optimiser state; and what the step itself takes for a moment."""
    count = trained_parameters(s)
    if not count:
        return [], 0.0
    doubled = 2 if s.method == "rlhf" and not s.adapters else 1
    count *= doubled / (s.tensor * s.pipeline)
    own = _own_bytes(s)
    terms = []
    if s.adapters:
        terms.append(Term("adapters", count * own, f"{_b(count)} trained x {own:g} B"))
    gradient = _gradients(s, count, own)
    optimizer, transient = _optimizer(s, count, own)
    return [*terms, gradient, optimizer], transient


def _own_bytes(s: Settings) -> float:
    """Bytes of a trained weight, as it is multiplied."""
    if not s.adapters:
        return s.weight_bytes
    if s.train_embeddings:  # copies of whole matrices keep the base's format
        return s.weight_bytes
    return float(s.recipe.adapter_bytes)


def _gradients(s: Settings, count: float, own: float) -> Term:
    if s.said.optimizer_in_backward and not s.adapters:
        layer = s.architecture.layer_parameters or count
        return Term("gradients", min(count, layer) * own, "of one layer: the step runs in backward")
    if s.stage >= 2 and s.said.offload & {"optimizer", "parameters"}:
        layer = min(count, s.architecture.layer_parameters or count)
        return Term("gradients", layer * own, "of one layer: the rest goes to the host")
    share = 1 / s.replicas if s.stage >= 2 else 1.0
    return Term("gradients", count * own * share, f"{_b(count)} x {own:g} B" + _divided(share))


def _optimizer(s: Settings, count: float, own: float) -> tuple[Term, float]:
    """State, and bytes that the step takes beside it (both 0 where the host does it)."""
    moments, fixed = MOMENTS.get(s.optimizer, MOMENTS["adamw"])
    share = 1 / s.replicas if s.stage >= 1 else 1.0
    mixed = s.training == "mixed" and not (s.adapters and s.stage == 0 and s.replicas == 1)
    per_moment = fixed if fixed is not None else (4.0 if mixed else own)
    master = 4.0 if mixed else 0.0
    state = count * (moments * per_moment + master) * share
    why = f"{_b(count)} x ({moments:g} x {per_moment:g} B" + (" + 4 B master)" if mixed else ")")
    if s.said.offload & {"optimizer", "parameters"}:
        return Term("optimiser state", 0.0, "on the host"), 0.0
    if s.said.optimizer_in_backward:
        transient = 0.0
    elif mixed:
        transient = s.recipe.mixed_step_bytes * (
            min(count * share, _SUB_GROUP) if s.stage == 3 else count * share
        )
    else:
        eight_bit = fixed is not None
        transient = 0.0 if eight_bit else s.recipe.step_copies * own * count * share
    return Term("optimiser state", state, why + f", {s.optimizer}" + _divided(share)), transient


def _b(count: float) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e8 else f"{count / 1e6:.3g} M"


def _divided(share: float) -> str:
    return f" / {1 / share:g}" if 0 < share < 1 else ""
