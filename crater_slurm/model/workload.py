"""What a job trains or serves, as far as its user says: what a prediction of its needs is made of.

``None`` means that the user did not say; a prediction then assumes what is usual for the method
and framework, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from crater_slurm.model.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A transformer's sizes. ``parameters`` counts all of them; heads are query and key/value."""

    parameters: float
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied_embeddings: bool = False
    gated_mlp: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One workload. ``micro_batch`` counts the samples of one GPU, ``sequence_length`` tokens;
    ``gpus`` are those of the whole job, which sharding divides by."""

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

    @property
    def key(self) -> str:
        """By this, peaks seen of one job are compared with another: model, method, framework."""
        parts = (self.model or self.parameters or "", self.method or "", self.framework or "")
        return "|".join(str(part).strip().lower() for part in parts)


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
        gpus=max(1, gpus),
    )
