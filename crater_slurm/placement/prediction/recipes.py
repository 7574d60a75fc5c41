"""What each framework does that decides memory, as data.

One row says where the framework's own code differs: in which format weights, adapters and the
optimiser's state lie, how often the logits are copied, whether layers are computed again, what
its logs count. Where the rest of the prediction is a formula, these are facts of the code, but
for four figures that are fitted to measured peaks: ``overhead_gb`` and ``fragmentation`` shift
the expected value, ``spread_static`` and ``spread_dynamic`` are the half widths of the interval
(``bench/gpu_memory.py --cross-validate`` shows how they do on models they were not fitted to).
There is no figure for a single model. A framework that is not here gets ``generic``, whose
interval is wider.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One framework.

    ``training`` says what a trained 16-bit parameter takes: ``pure`` keeps weight, gradient and
    two moments in 16 bit; ``mixed`` keeps 16-bit weight and gradient and fp32 master weight and
    moments (DeepSpeed, Megatron); ``autocast`` keeps all in fp32.
    ``logit_bytes`` are the bytes that a token takes per entry of the vocabulary at the worst
    moment of the loss: its copies in 16 bit and fp32, the soft-max and the gradient;
    ``logit_bytes_quantised`` the same over a quantised base. ``whole_logit_bytes`` are those
    that are left when the loss is chunked (0 where the logits never exist, as in Liger or CCE).
    ``load_residue`` are bytes per weight that quantising while loading leaves in the cache.
    ``mixed_step_bytes`` is what a mixed step takes for a moment: the gradient flattened (2 B) and
    in fp32 (4 B). ``step_copies`` are copies of a trained weight that a pure step makes.
    ``checkpointing`` is its default, ``checkpointing_quantised`` that over a quantised base, where
    it is on in either case (peft's preparation for k-bit training turns it on).
    ``attention_sure`` says that all its models go through its own attention; another framework
    asks for a kernel that not every model's code follows.
    ``unties`` is set where the head is always a matrix of its own, though the model shares it.
    ``published`` is what the framework's own figures count: ``driver`` (nvidia-smi),
    ``reserved`` or ``allocated`` (torch's).
    """

    name: str
    words: tuple[str, ...] = ()
    published: str = "driver"
    weight_bytes: int = 2
    training: str = "pure"
    adapter_bytes: int = 4
    step_copies: float = 1.0
    mixed_step_bytes: float = 6.0
    double_quant: bool = False
    upcasts_quantised: bool = False
    checkpointing: bool = True
    checkpointing_quantised: bool = False
    offloads_checkpoints: bool = False
    attention: str = "flash"
    attention_sure: bool = False
    logit_bytes: float = 16.0
    logit_bytes_quantised: float | None = None
    fused_loss: bool = False
    whole_logit_bytes: float = 0.0
    load_residue: float = 0.0
    trains_embeddings: bool = False
    unties: bool = False
    lora_rank: int = 8
    lora_targets: str = "all"
    micro_batch: int = 1
    typical_length: int = 512
    varying_lengths: bool = False
    buffers_gb: float = 0.0
    preallocates: float | None = None
    overhead_gb: float = 1.25
    fragmentation: float = 1.0
    spread_static: float = 0.15
    spread_dynamic: float = 0.65


#: Of an unknown framework the usual 16 bytes of a fully trained parameter are assumed.
GENERIC = Recipe(
    name="generic", training="mixed", mixed_step_bytes=2.0, spread_static=0.21, spread_dynamic=1.25
)

#: Printed by ``bench/gpu_memory.py --fit``: overhead in GB, fragmentation, and the half widths of
#: the static and the moving part. A recipe that is not here was not measured.
FITTED: dict[str, tuple[float, float, float, float]] = {
    "torchtune": (1.8, 1.0, 0.15, 0.65),
    "ms-swift": (0.75, 2.85, 0.08, 0.395),
    "peft": (0.9, 1.0, 0.15, 0.75),
    "transformers": (0.9, 1.0, 0.29, 0.5),
    "unsloth": (0.55, 1.0, 0.15, 0.5),
    "qwen": (1.4, 1.0, 0.171, 0.2),
}

_HF = Recipe(
    name="transformers", words=("transformers", "trl", "huggingface", "hf", "accelerate"),
    upcasts_quantised=True, lora_targets="qv", training="autocast",
    checkpointing=False, checkpointing_quantised=True,
)  # fmt: skip

_FACTS: tuple[Recipe, ...] = (
    Recipe(
        name="torchtune", words=("torchtune",), published="allocated", adapter_bytes=2,
        double_quant=True, whole_logit_bytes=2.0, lora_targets="qv",
        micro_batch=2, load_residue=0.7, attention_sure=True,
    ),
    Recipe(
        name="ms-swift", words=("swift",), adapter_bytes=2, upcasts_quantised=True,
        lora_targets="qkv", varying_lengths=True, logit_bytes=16.0, load_residue=0.3,
    ),
    # Its own example loops: fp32 weights, an optimiser that works tensor by tensor.
    replace(_HF, name="peft", words=("peft",), weight_bytes=4, step_copies=0.0,
            training="pure"),
    # Kernels that never make the logits (CCE); checkpoints go to the host.
    Recipe(name="unsloth", words=("unsloth",), fused_loss=True, offloads_checkpoints=True,
           lora_rank=16, attention_sure=True),
    # The head's result is kept in 16 bit, and its loss is made in chunks.
    Recipe(
        name="litgpt", words=("litgpt", "lit gpt"), published="allocated",
        adapter_bytes=2, checkpointing=False, fused_loss=True, whole_logit_bytes=4.0,
        lora_targets="qv", attention_sure=True, unties=True,
    ),
    replace(_HF, name="axolotl", words=("axolotl",), training="pure", lora_targets="all",
            typical_length=2048, checkpointing=True),
    replace(_HF, name="llama-factory", words=("llama factory", "llamafactory"),
            lora_targets="all", typical_length=1024, checkpointing=True),
    Recipe(name="longlora", words=("longlora",), buffers_gb=0.8, trains_embeddings=True,
           lora_targets="attention", attention_sure=True),
    Recipe(name="deepspeed", words=("deepspeed",), training="mixed", buffers_gb=0.8),
    Recipe(name="megatron", words=("megatron",), training="mixed", logit_bytes=10.0,
           published="allocated", checkpointing=False, typical_length=2048,
           attention_sure=True),
    Recipe(name="nemo", words=("nemo",), training="mixed", logit_bytes=10.0, typical_length=2048,
           attention_sure=True),
    Recipe(name="vllm", words=("vllm",), preallocates=0.9),
    _HF,
    # Last: other frameworks' tables are named after its models too. Quantised runs are DeepSpeed
    # in fp16, where no copy of the logits is fp32.
    Recipe(
        name="qwen", words=("qwen",), training="mixed", lora_rank=64, logit_bytes=14.0,
        logit_bytes_quantised=8.0, buffers_gb=0.8, step_copies=2.0,
    ),
)  # fmt: skip


def _with_figures(recipe: Recipe) -> Recipe:
    if recipe.name not in FITTED:
        return recipe
    overhead, fragmentation, static, moving = FITTED[recipe.name]
    return replace(recipe, overhead_gb=overhead, fragmentation=fragmentation,
                   spread_static=static, spread_dynamic=moving)  # fmt: skip


RECIPES = tuple(_with_figures(recipe) for recipe in _FACTS)


@lru_cache(maxsize=256)  # names come from users
def recipe_for(framework: str | None) -> Recipe:
    """The recipe of a framework's name as people write it (``pytorch/torchtune 0.4``)."""
    words = re.sub(r"[^a-z0-9]+", " ", (framework or "").lower())
    for recipe in RECIPES:
        for word in recipe.words:
            if re.search(rf"\b{word}", words):
                return recipe
    return GENERIC
