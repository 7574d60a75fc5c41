"""What a workload needs of its host: memory, cores, SSD. Rules of thumb, with wide intervals.

Much of this lies in the user's own code, so that an interval spans a factor of two and more. It
is meant for a first request, which seen jobs then correct. One GPU's step time comes from the
arithmetic of a transformer (6 operations per parameter and token, 8 with layers computed again).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from crater_slurm.catalogue.llms import Known, describe
from crater_slurm.errors import UsageError
from crater_slurm.model.workload import Workload
from crater_slurm.placement.prediction.settings import Settings, settle
from crater_slurm.placement.prediction.states import trained_parameters

#: A process with Python, torch and CUDA's host side, before any model.
_PROCESS_BYTES = 4e9
#: A data loader's worker: a Python process with its part of the data set's index.
_WORKER_BYTES = 0.8e9
#: Arithmetic that a training step really gets, in TFLOP/s: an A100 at 40 % of its peak.
_REACHED_TFLOP_S = 125.0
#: Bytes of a token on disk (a 32-bit id, or four letters), and of an image (JPEG, 512 px).
_TOKEN_BYTES, _IMAGE_BYTES = 4.0, 110e3
#: Seconds of a core for a token (tokeniser) and for an image (decode, resize).
_TOKEN_SECONDS, _IMAGE_SECONDS = 1e-6, 10e-3
#: Bytes of one read where a data set is read in order.
_SEQUENTIAL_READ = 2.0**20


@dataclass(frozen=True, slots=True)
class HostNeed:
    """One need of the host for one GPU of the job, where ``name`` says no other."""

    name: str
    unit: str
    expected: float
    lower: float
    upper: float
    why: str


def host_needs(
    workload: Workload,
    known: Known | None = None,
    *,
    io_pattern: str = "random",
    checkpoint_interval_seconds: float = 1800.0,
    reached_tflop_s: float = _REACHED_TFLOP_S,
) -> tuple[HostNeed, ...]:
    """The needs beside the GPU's memory. UsageError where the model's size can't be told."""
    known = known or describe(workload)
    if known is None:
        raise UsageError(f"the size of model {workload.model!r} is unknown; say model-params=8.03B")
    s = settle(workload, known)
    seconds = step_seconds(s, reached_tflop_s)
    cores = _cores(s, seconds)
    return (
        _memory(s, math.ceil(cores.expected) - 1),
        cores,
        *_reads(s, seconds, io_pattern),
        *_writes(s, checkpoint_interval_seconds),
    )


def step_seconds(s: Settings, reached_tflop_s: float) -> float:
    """Seconds of one micro-batch on one GPU."""
    if s.architecture.family == "diffusion":
        per_sample = 6 * s.architecture.parameters * 4096
        return max(0.05, s.batch * per_sample / (reached_tflop_s * 1e12))
    a = s.architecture
    idle = (a.experts - a.active_experts) / a.experts
    active = a.parameters - idle * a.layers * a.layer_parameters
    passes = 2 if not s.trains else (8 if s.checkpointing else 6)
    per_gpu = passes * active * s.tokens / (s.tensor * s.pipeline)
    return max(0.01, per_gpu / (reached_tflop_s * 1e12))


def _memory(s: Settings, workers: int) -> HostNeed:
    a, share = s.architecture, s.tensor * s.pipeline
    bytes_of_file = 2.0 * a.parameters
    loading = bytes_of_file / share
    if s.stage == 3:  # one process reads and the others receive
        loading = bytes_of_file / s.replicas
    offloaded = 0.0
    if s.said.offload & {"optimizer", "parameters"}:
        offloaded = 16.0 * trained_parameters(s) / s.replicas
    if "parameters" in s.said.offload:
        offloaded += s.weight_bytes * a.parameters / s.replicas
    total = _PROCESS_BYTES + loading + workers * _WORKER_BYTES + 1.1 * offloaded
    why = (
        f"process 4 GB + weights while loading {loading / 1e9:.1f} GB + {workers} workers x 0.8 GB"
    )
    if offloaded:
        why += f" + offloaded {offloaded / 1e9:.1f} GB, pinned"
    upper = total + 2 * loading + workers * _WORKER_BYTES + 2e9
    return HostNeed("host memory", "GB", total / 1e9, 0.6 * total / 1e9, upper / 1e9, why)


def _cores(s: Settings, seconds: float) -> HostNeed:
    image = s.architecture.family == "diffusion"
    busy = s.batch * _IMAGE_SECONDS if image else s.tokens * _TOKEN_SECONDS
    workers = max(1.0, busy / seconds)
    what = "images decoded" if image else "tokens made"
    why = f"one for the trainer, {workers:.1f} for {what} in a step of {seconds:.2g} s"
    return HostNeed("cores", "", 1 + workers, 1.0, 2 + 4 * workers, why)


def _reads(s: Settings, seconds: float, io_pattern: str) -> tuple[HostNeed, HostNeed]:
    image = s.architecture.family == "diffusion"
    sample = _IMAGE_BYTES if image else _TOKEN_BYTES * s.length
    rate = s.batch * sample / seconds
    per_read = _SEQUENTIAL_READ if io_pattern.startswith("seq") else sample
    reads = rate / per_read
    why = f"{s.batch} samples of {sample / 1e3:.3g} kB in {seconds:.2g} s"
    return (
        HostNeed("SSD read", "MB/s", rate / 1e6, rate / 4e6, rate / 1e6 * 4, why),
        HostNeed("SSD read operations", "IOPS", reads, reads / 4, max(1.0, 8 * reads),
                 f"{io_pattern}: one read each {per_read / 1e3:.3g} kB"),
    )  # fmt: skip


def _writes(s: Settings, interval: float) -> tuple[HostNeed, ...]:
    """Of the whole job, since a checkpoint is one however many GPUs write it."""
    if not s.trains or interval <= 0:
        return ()
    count = trained_parameters(s)
    weights = count * (float(s.recipe.adapter_bytes) if s.adapters else 2.0)
    own = s.recipe.adapter_bytes if s.adapters else s.weight_bytes
    state = count * (12.0 if s.training == "mixed" and not s.adapters else 2.0 * own)
    size = weights + state
    rate = size / interval / 1e6
    why = (
        f"a checkpoint of {size / 1e9:.3g} GB (weights {weights / 1e9:.3g}, optimiser "
        f"{state / 1e9:.3g}) each {interval:g} s, whole job"
    )
    return (
        HostNeed("checkpoint", "GB", size / 1e9, weights / 1e9, 1.3 * size / 1e9, "one, whole job"),
        HostNeed("SSD write", "MB/s", rate, weights / interval / 1e6, 1.5 * rate, why),
    )
