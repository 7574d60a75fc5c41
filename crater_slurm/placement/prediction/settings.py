"""A workload with nothing left open: what was said, and for the rest what its framework does.

Every value that was not said is in ``assumed``, in words, because the person who reads a
prediction must see what it rests on. Nothing here computes memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from crater_slurm.catalogue.llms import Known
from crater_slurm.model.workload import Architecture, Workload
from crater_slurm.placement.prediction.recipes import Recipe, recipe_for

#: Bytes of one weight. A quantised one carries its block's scales: 16 bit per 64 (nf4, as fp32
#: per 64 in bitsandbytes), 16 bit scale and 4 bit zero per 128 (gptq, awq), fp32 per row (int8).
WEIGHT_BYTES = {
    "fp32": 4.0,
    "tf32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.004,
    "nf4": 0.5 + 4 / 64,
    "nf4-double": 0.5 + 1 / 64 + 4 / (64 * 256),
    "int4": 0.5 + 4 / 64,
    "gptq": 0.5 + 2.5 / 128,
    "gptq8": 1.0 + 3 / 128,
    "awq": 0.5 + 2.5 / 128,
}
#: Quantised before they are loaded, with an own layer type that nobody casts.
PREQUANTISED = frozenset({"gptq", "gptq8", "awq"})
#: Mean by longest length, where the lengths vary and nobody said how: the worst of all.
_USUAL_SHARE = 1.0
TRAINING = frozenset({"full", "lora", "qlora", "rlhf", "dpo", "pretrain"})


@dataclass(slots=True, kw_only=True)
class Settings:
    """What the formulas take. ``replicas`` is the data-parallel degree that states shard over,
    ``said`` the workload as it was given."""

    name: str
    architecture: Architecture
    recipe: Recipe
    certainty: str
    method: str
    adapters: bool
    quantisation: str | None
    compute_bytes: float
    weight_bytes: float
    training: str
    optimizer: str
    rank: int
    targets: str
    batch: int
    length: int
    length_known: bool
    checkpointing: bool
    eager: bool
    attention_known: bool
    fused_loss: bool
    stage: int
    fully_sharded: bool
    replicas: int
    tensor: int
    pipeline: int
    said: Workload
    varying: bool
    typical_share: float
    assumed: list[str] = field(default_factory=list)

    @property
    def trains(self) -> bool:
        return self.method in TRAINING

    @property
    def train_embeddings(self) -> bool:
        return self.said.train_embeddings or self.recipe.trains_embeddings

    @property
    def tokens(self) -> int:
        """Tokens of one GPU at once; preference pairs are two samples."""
        return self.batch * self.length * (2 if self.method == "dpo" else 1)


def settle(workload: Workload, known: Known) -> Settings:
    """``workload`` with its framework's defaults where nothing was said."""
    recipe = recipe_for(workload.framework)
    assumed: list[str] = []
    if known.certainty != "catalogue":
        assumed.append(known.note)
    if recipe.name == "generic":
        named = f"framework {workload.framework} is unknown" if workload.framework else (
            "no framework was said")  # fmt: skip
        assumed.append(f"{named}: usual settings, and a wide interval")
    method, adapters, quantisation = _method(workload, recipe, assumed)
    compute, weight, training = _formats(workload, recipe, adapters, assumed)
    batch, length, known_length = _size(workload, recipe, method, assumed)
    stage, replicas = _sharding(workload, assumed)
    return Settings(
        name=known.name,
        architecture=_as_built(known.architecture, recipe),
        recipe=recipe,
        certainty=known.certainty,
        method=method,
        adapters=adapters,
        quantisation=quantisation,
        compute_bytes=compute,
        weight_bytes=weight,
        training=training,
        optimizer=workload.optimizer or _default(assumed, method, "adamw"),
        rank=workload.lora_rank or recipe.lora_rank,
        targets=workload.lora_targets or recipe.lora_targets,
        batch=batch,
        length=length,
        length_known=known_length,
        checkpointing=_checkpointing(workload, recipe, method, quantisation, assumed),
        eager=_eager(workload, recipe, known.architecture),
        attention_known=_attention_known(workload, recipe, known.architecture),
        fused_loss=recipe.fused_loss if workload.fused_loss is None else workload.fused_loss,
        stage=stage,
        fully_sharded=(workload.sharding or "").lower() == "fsdp",
        replicas=replicas,
        tensor=max(1, workload.tensor_parallel),
        pipeline=max(1, workload.pipeline_parallel),
        said=workload,
        varying=bool(workload.varying_lengths) or recipe.varying_lengths,
        typical_share=_typical_share(workload, length),
        assumed=assumed,
    )


def _as_built(architecture: Architecture, recipe: Recipe) -> Architecture:
    if not (recipe.unties and architecture.tied_embeddings):
        return architecture
    head = architecture.vocabulary * architecture.hidden
    return replace(architecture, parameters=architecture.parameters + head, tied_embeddings=False)


def _default(assumed: list[str], method: str, optimizer: str) -> str:
    if method in TRAINING:
        assumed.append(f"optimizer={optimizer}")
    return optimizer


def _method(workload: Workload, recipe: Recipe, assumed: list[str]) -> tuple[str, bool, str | None]:
    """Method, whether only adapters are trained, and the base's quantisation."""
    method = workload.method
    if method is None:
        served = workload.task == "inference" or recipe.preallocates is not None
        method = "inference" if served else "pretrain" if workload.task == "llm_pretrain" else None
        if method is None:
            method = "rlhf" if workload.task == "rlhf" else "full"
        assumed.append(f"method={method}")
    quantisation = workload.quantization
    if quantisation in {None, "none"}:
        stated = workload.precision if workload.precision in {"int8", "int4"} else None
        quantisation = stated or ("nf4" if method == "qlora" else None)
    if quantisation and method in {"full", "pretrain"}:
        assumed.append(f"no {quantisation} weights, since all of them are trained")
        quantisation = None
    if quantisation == "nf4" and recipe.double_quant:
        quantisation = "nf4-double"
    by_rank = workload.lora_rank is not None and method in {"dpo", "rlhf"}
    return method, method in {"lora", "qlora"} or by_rank, quantisation


def _formats(
    workload: Workload, recipe: Recipe, adapters: bool, assumed: list[str]
) -> tuple[float, float, str]:
    """Bytes of an activation and of an unquantised weight, and how trained weights are kept."""
    if workload.precision in {"fp32", "tf32"}:
        return 4.0, 4.0, "pure"
    if workload.precision == "fp8" and workload.method == "inference":
        return 2.0, 1.0, "pure"
    if workload.precision is None:
        assumed.append("precision=fp32" if recipe.weight_bytes == 4 else "precision=bf16")
        if recipe.weight_bytes == 4:
            return 4.0, 4.0, "pure"
    if (workload.sharding or "").startswith("zero") and not adapters:
        return 2.0, 2.0, "mixed"  # DeepSpeed's own engine, whatever the framework above it
    if recipe.training == "autocast" and not adapters and workload.method != "inference":
        return 2.0, 4.0, "autocast"
    return 2.0, 2.0, recipe.training


def _size(
    workload: Workload, recipe: Recipe, method: str, assumed: list[str]
) -> tuple[int, int, bool]:
    batch = workload.micro_batch
    if batch is None:
        batch = recipe.micro_batch if method != "inference" else 1
        assumed.append(f"micro-batch={batch}")
    length = workload.sequence_length
    if length is None:
        length = recipe.typical_length
        assumed.append(f"sequence-length={length}")
    return batch, length, workload.sequence_length is not None


def _typical_share(workload: Workload, longest: int) -> float:
    """Mean length of the samples after they are cut, as a part of the longest.

    Lengths are taken as log-normal; of an unknown distribution all are long.
    """
    mean = workload.mean_length
    if not mean or mean <= 0:
        return _USUAL_SHARE
    spread = (workload.length_deviation or 0.8 * mean) / mean
    sigma = math.sqrt(math.log1p(spread * spread))
    middle = math.log(mean) - sigma * sigma / 2
    z = (math.log(longest) - middle) / sigma
    cut = mean * _normal(z - sigma) + longest * (1 - _normal(z))
    return min(1.0, cut / longest)


def _normal(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def _checkpointing(
    workload: Workload, recipe: Recipe, method: str, quantisation: str | None, assumed: list[str]
) -> bool:
    if workload.activation_checkpointing is not None:
        return workload.activation_checkpointing
    if method == "inference":
        return False
    usual = recipe.checkpointing or (recipe.checkpointing_quantised and quantisation is not None)
    assumed.append(f"activation-checkpointing={'yes' if usual else 'no'}")
    return usual


def _eager(workload: Workload, recipe: Recipe, architecture: Architecture) -> bool:
    """Whether attention keeps the whole score matrix."""
    return (workload.attention or architecture.attention or recipe.attention) == "eager"


def _attention_known(workload: Workload, recipe: Recipe, architecture: Architecture) -> bool:
    return bool(workload.attention or architecture.attention) or recipe.attention_sure


def _sharding(workload: Workload, assumed: list[str]) -> tuple[int, int]:
    """Stage as ZeRO counts (FSDP is 3) and the replicas that share the states."""
    replicas = max(
        1, workload.gpus // max(1, workload.tensor_parallel * workload.pipeline_parallel)
    )
    word = (workload.sharding or "").lower()
    stage = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}.get(word, 0)
    if not word and replicas > 1:
        assumed.append("sharding=none: every GPU holds the whole state")
    return stage, replicas
