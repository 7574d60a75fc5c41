"""What a job trains or serves, as far as its user says: what a prediction of its needs is made of.

``None`` means that the user did not say; a prediction then assumes what is usual for the method
and framework, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crater_slurm.model.request import Request

#: Settings of a workload that directives state.
STATED = (
    *("model", "parameters", "method", "task", "framework", "precision", "quantization"),
    *("optimizer", "lora_rank", "micro_batch", "sequence_length", "activation_checkpointing"),
    *("sharding", "tensor_parallel", "pipeline_parallel", "gpus", "traced_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model's sizes. ``parameters`` counts all of them; heads are query and key/value.

    ``experts`` are those that a layer holds and ``active_experts`` those that a token uses;
    ``cross_layers`` are the layers with a second attention (an encoder-decoder's decoder).
    ``attention`` is ``eager`` where the model's own code keeps the whole score matrix. A family
    ``diffusion`` is no transformer over tokens: only its parameters count, its sizes are 0.
    """

    parameters: float
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied_embeddings: bool = False
    gated_mlp: bool = True
    head_size: int | None = None
    experts: int = 1
    active_experts: int = 1
    cross_layers: int = 0
    attention: str | None = None
    family: str = ""

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * (self.head_size or self._head)

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, which is that of the value heads."""
        return self.kv_heads * (self.head_size or self._head)

    @property
    def _head(self) -> int:
        return self.hidden // self.heads if self.heads else 0

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding and, where it is another matrix, of the head."""
        return self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrices of one layer, without cross attention."""
        attention = self.hidden * (2 * self.query_width + 2 * self.kv_width)
        mlp = (3 if self.gated_mlp else 2) * self.hidden * self.intermediate
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + mlp * self.experts + router

    @property
    def counted_parameters(self) -> int:
        """Parameters by the sizes; norms, biases and position embeddings are left out."""
        cross = self.cross_layers * self.hidden * (2 * self.query_width + 2 * self.kv_width)
        return self.embedding_parameters + self.layers * self.layer_parameters + cross


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One workload. ``micro_batch`` counts the samples of one GPU, ``sequence_length`` tokens;
    ``gpus`` are those of the whole job, which sharding divides by.

    What no directive says is there for records of runs: ``attention`` (``flash`` or ``eager``),
    ``fused_loss`` (the logits are never whole), ``packed`` (all samples have full length),
    ``varying_lengths`` (samples are not padded to one length), ``mean_length`` and
    ``length_deviation`` of the samples before they are cut (tokens), ``lora_targets`` (``qv``,
    ``qkv``, ``attention`` or ``all``), ``train_embeddings`` (beside adapters),
    ``optimizer_in_backward`` (no gradient outlives its layer), ``offload`` (``optimizer``,
    ``parameters`` or ``activations``, to the host). ``traced_bytes`` is what a traced step of these
    settings took of one GPU.
    """

    model: str | None = None
    parameters: float | None = None
    architecture: Architecture | None = None
    method: str | None = None
    task: str | None = None
    framework: str | None = None
    precision: str | None = None
    quantization: str | None = None
    optimizer: str | None = None
    lora_rank: int | None = None
    micro_batch: int | None = None
    sequence_length: int | None = None
    activation_checkpointing: bool | None = None
    sharding: str | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    gpus: int = 1
    attention: str | None = None
    fused_loss: bool | None = None
    packed: bool | None = None
    varying_lengths: bool | None = None
    mean_length: float | None = None
    length_deviation: float | None = None
    lora_targets: str | None = None
    train_embeddings: bool = False
    traced_bytes: float | None = None
    optimizer_in_backward: bool = False
    offload: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """By this, peaks seen of one job are compared with another: model, method, framework."""
        parts = (self.model or self.parameters or "", self.method or "", self.framework or "")
        return "|".join(str(part).strip().lower() for part in parts)


def stated(workload: Workload) -> dict[str, object]:
    """What directives say of a workload, as JSON data: by this one run is compared with another."""
    return {name: value for name in STATED if (value := getattr(workload, name)) is not None}


def workload_from(settings: Mapping[str, object]) -> Workload:
    """The workload of such data; names that this version does not know are left out."""
    known: dict[str, Any] = {name: settings[name] for name in STATED if name in settings}
    return Workload(**known)


def workload_of(request: Request, gpus: int) -> Workload | None:
    """The workload that a request describes, on ``gpus`` GPUs in all; None when it names no
    model, from which nothing could be told."""
    if request.model is None and request.model_params is None:
        return None
    return Workload(
        model=request.model,
        parameters=request.model_params,
        method=request.method,
        task=request.task,
        framework=request.framework,
        precision=request.precision,
        quantization=request.quantization,
        optimizer=request.optimizer,
        lora_rank=request.lora_rank,
        micro_batch=request.micro_batch,
        sequence_length=request.sequence_length,
        activation_checkpointing=request.activation_checkpointing,
        sharding=request.sharding,
        tensor_parallel=request.tensor_parallel or 1,
        pipeline_parallel=request.pipeline_parallel or 1,
        traced_bytes=request.traced_memory_mib and request.traced_memory_mib * 2.0**20,
        gpus=max(1, gpus),
    )
