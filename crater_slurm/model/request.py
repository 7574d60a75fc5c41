"""What a user asks for: one table of requirements that every spelling of a request shares.

The table feeds the ``#CRATER`` parser, ``crater directives``, the documentation and the JSON
schema, so a requirement is added in one place. All amounts are per node of the job, the way
Slurm's gres are; they are minimum needs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crater_slurm.model import units


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one job. ``None`` means that the user said nothing about it."""

    task: str | None = None
    model: str | None = None
    model_params: int | None = None
    method: str | None = None
    framework: str | None = None
    precision: str | None = None
    quantization: str | None = None
    optimizer: str | None = None
    lora_rank: int | None = None
    micro_batch: int | None = None
    sequence_length: int | None = None
    activation_checkpointing: bool | None = None
    sharding: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    traced_memory_mib: int | None = None
    gpus: int | None = None
    gpu_memory_mib: int | None = None
    gpu_type: str | None = None
    tensor_cores: bool | None = None
    mig: str | None = None
    gpu_sharing: bool | None = None
    driver: str | None = None
    cuda: str | None = None
    cpus: int | None = None
    physical_cores: bool | None = None
    avx: str | None = None
    memory_bandwidth_gb_s: float | None = None
    ssd_iops: int | None = None
    ssd_latency_us: float | None = None
    io_pattern: str | None = None
    cache_gb: int | None = None
    checkpoint: str | None = None
    checkpoint_keep: int | None = None
    checkpoint_keep_every: int | None = None
    checkpoint_credentials: str | None = None
    stage: str | None = None
    ring_gb: int | None = None
    numa: str | None = None
    max_wait_seconds: int | None = None
    min_gpu_utilization_percent: int | None = None
    preemptible: bool | None = None
    mode: str | None = None

    def given(self) -> dict[str, Any]:
        """The requirements that were stated, by attribute name."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) is not None
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One row of the table: how a requirement is written, checked and explained."""

    key: str
    attribute: str
    kind: str
    meaning: str
    example: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    def parse(self, text: str) -> Any:
        """The typed value of ``text``; ValueError says what is valid."""
        text = text.strip()
        if not text:
            raise ValueError(f"needs a value, such as {self.key}={self.example}")
        if self.choices:
            return self._choice(text)
        value = _PARSERS[self.kind](text)
        return self.check(value)

    def check(self, value: Any) -> Any:
        """``value`` when it lies in the requirement's bounds; ValueError otherwise."""
        if self.minimum is not None and value < self.minimum:
            raise ValueError(
                f"must be at least {units.format_number(self.minimum)}{_spaced(self.unit)}"
            )
        if self.maximum is not None and value > self.maximum:
            raise ValueError(
                f"must be at most {units.format_number(self.maximum)}{_spaced(self.unit)}"
            )
        return value

    def format(self, value: Any) -> str:
        """``key=value`` as a user would write it, with the unit: ``gpu-memory=16GiB``."""
        if isinstance(value, bool):
            return f"{self.key}={'yes' if value else 'no'}"
        if self.kind == "mib":
            return f"{self.key}={_mib(value)}"
        if self.kind == "parameters":
            return f"{self.key}={value / 1e9:.12g}B"
        text = f"{value:.12g}" if isinstance(value, float) else str(value)
        unit = {"GB": "GB", "GB/s": "GB/s", "µs": "us", "s": "s"}.get(self.unit, "")
        return f"{self.key}={text}{unit}"

    def _choice(self, text: str) -> str:
        word = text.lower().replace("-", "_")
        for choice in self.choices:
            if choice.replace("-", "_") == word:
                return choice
        from crater_slurm.errors import nearest

        close = nearest(word, self.choices)
        hint = f"; did you mean {close}?" if close else ""
        raise ValueError(f"takes {', '.join(self.choices)}{hint}")

    def json_schema(self) -> dict[str, Any]:
        """JSON Schema of the value, for the documentation and for tasks in JSON."""
        if self.choices:
            return {"enum": list(self.choices), "description": self.meaning}
        schema: dict[str, Any] = {"description": self.meaning, "examples": [self.example]}
        schema["type"] = _JSON_TYPES.get(self.kind, "number")
        if self.unit:
            schema["x-unit"] = self.unit
        if self.minimum is not None:
            schema["minimum"] = self.minimum
        if self.maximum is not None:
            schema["maximum"] = self.maximum
        return schema


def _mib(value: int) -> str:
    """Without loss: 16384 is 16GiB, 15259 stays."""
    return f"{value // 1024}GiB" if value % 1024 == 0 else f"{value}MiB"


def _spaced(unit: str) -> str:
    return f" {unit}" if unit else ""


def _integer(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError("must be a whole number")
    return int(text.lstrip("0")[:18] or 0)  # more digits are above every maximum anyway


def _boolean(text: str) -> bool:
    word = text.lower()
    if word in {"yes", "true", "on", "1"}:
        return True
    if word in {"no", "false", "off", "0"}:
        return False
    raise ValueError("takes yes or no")


def _word(text: str) -> str:
    if len(text) > 128 or not text.isprintable():
        raise ValueError("must be one printable word of at most 128 characters")
    return text


def _version(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4}){0,3}", text):
        raise ValueError("must be a version: numbers with dots, such as 12.2")
    return text


def _mig(text: str) -> str:
    """A MIG profile as NVIDIA names it: compute slices and memory."""
    word = text.lower().removeprefix("mig-").removeprefix("mig_")
    if not re.fullmatch(r"[1-9]g\.[0-9]{1,3}gb(\+me)?", word):
        raise ValueError("must be a MIG profile, such as 1g.5gb or 3g.40gb")
    return word


def _destination(text: str) -> str:
    """``on``, ``off``, an absolute path or a URL: where checkpoints go."""
    word = text.lower()
    if word in {"on", "yes", "true"}:
        return "on"
    if word in {"off", "no", "false"}:
        return "off"
    return _place(text, "on, off, an absolute path")


def _place(text: str, takes: str = "an absolute path") -> str:
    """An absolute path or the URL of an object store's prefix, placeholders in it or not."""
    if not text.isprintable() or len(text) > 512:
        raise ValueError("must be printable and at most 512 characters")
    url = re.match(r"(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]{1,254}(?=/|$)([^?#]*)\Z", text)
    if not url and not text.startswith("/"):
        raise ValueError(f"takes {takes} or s3://bucket/prefix (also gs:// and az://)")
    if ".." in text.split("/"):
        raise ValueError("must not contain ..")
    if odd := re.search(r"%(?![ujAaxc%]).?", text):
        raise ValueError(
            f"has {odd.group()!r}; it may hold %u (user), %j (job), %A and %a (array job and "
            "task), %x (job name), %c (cluster), and %% for %"
        )
    return text


def _stage(text: str) -> str:
    """Paths or URLs with commas between them."""
    places = [place.strip() for place in text.split(",")]
    if len(text) > 512 or len(places) > 16:
        raise ValueError("must be at most 16 places in 512 characters")
    return ",".join(_place(place) for place in places)


def _credentials(text: str) -> str:
    if not re.fullmatch(r"site|own(:[A-Za-z0-9][A-Za-z0-9_.@-]{0,63})?", text):
        raise ValueError("takes site, own, or own:PROFILE")
    return text


_PARSERS: dict[str, Callable[[str], Any]] = {
    "integer": _integer,
    "boolean": _boolean,
    "word": _word,
    "destination": _destination,
    "stage": _stage,
    "credentials": _credentials,
    "mib": units.parse_mib,
    "gb": units.parse_gb,
    "bandwidth": units.parse_bandwidth_gb_s,
    "count": units.parse_count,
    "parameters": units.parse_parameters,
    "version": _version,
    "mig": _mig,
    "latency": units.parse_latency_us,
    "seconds": units.parse_seconds,
}

_JSON_TYPES = {
    "boolean": "boolean",
    "integer": "integer",
    "count": "integer",
    "parameters": "integer",
    **dict.fromkeys(("word", "destination", "stage", "credentials", "version", "mig"), "string"),
}

TASKS = (
    "llm_pretrain",
    "llm_finetune",
    "rlhf",
    "inference",
    "multimodal",
    "time_series",
    "generic",
)

REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        key="task",
        attribute="task",
        kind="word",
        choices=TASKS,
        example="llm_finetune",
        meaning="What kind of work this is.",
    ),
    Requirement(
        key="model",
        attribute="model",
        kind="word",
        example="Llama-3-8B",
        meaning="Name of the model that is trained or served.",
    ),
    Requirement(
        key="model-params",
        attribute="model_params",
        kind="parameters",
        example="8.03B",
        minimum=1,
        maximum=100000000000000,
        meaning="Parameters of the model, where its name is not a known one.",
    ),
    Requirement(
        key="method",
        attribute="method",
        kind="word",
        example="lora",
        choices=("full", "lora", "qlora", "rlhf", "dpo", "pretrain", "inference"),
        meaning="How the model is trained.",
    ),
    Requirement(
        key="framework",
        attribute="framework",
        kind="word",
        example="torchtune",
        meaning="What trains or serves the model; its recipe decides much of the memory.",
    ),
    Requirement(
        key="precision",
        attribute="precision",
        kind="word",
        example="bf16",
        choices=("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4"),
        meaning="Number format of the computation; the GPU must support it.",
    ),
    Requirement(
        key="quantization",
        attribute="quantization",
        kind="word",
        example="none",
        choices=("none", "int8", "int4", "nf4", "gptq", "awq"),
        meaning="Weight-only quantisation of the model.",
    ),
    Requirement(
        key="optimizer",
        attribute="optimizer",
        kind="word",
        example="adamw",
        choices=("adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd", "lion"),
        meaning="Optimiser, whose state takes memory.",
    ),
    Requirement(
        key="lora-rank",
        attribute="lora_rank",
        kind="integer",
        example="16",
        minimum=1,
        maximum=65536,
        meaning="Rank of the LoRA adapters.",
    ),
    Requirement(
        key="micro-batch",
        attribute="micro_batch",
        kind="integer",
        example="2",
        minimum=1,
        maximum=1048576,
        meaning="Samples that each GPU works on at once.",
    ),
    Requirement(
        key="sequence-length",
        attribute="sequence_length",
        kind="integer",
        example="2048",
        minimum=1,
        maximum=16777216,
        meaning="Longest sample, in tokens.",
    ),
    Requirement(
        key="activation-checkpointing",
        attribute="activation_checkpointing",
        kind="boolean",
        example="yes",
        meaning="Whether activations are computed again instead of kept.",
    ),
    Requirement(
        key="sharding",
        attribute="sharding",
        kind="word",
        example="zero2",
        choices=("none", "ddp", "fsdp", "zero1", "zero2", "zero3"),
        meaning="How parameters and states are shared out among the GPUs.",
    ),
    Requirement(
        key="tensor-parallel",
        attribute="tensor_parallel",
        kind="integer",
        example="2",
        minimum=1,
        maximum=1024,
        meaning="GPUs that share each layer.",
    ),
    Requirement(
        key="pipeline-parallel",
        attribute="pipeline_parallel",
        kind="integer",
        example="2",
        minimum=1,
        maximum=1024,
        meaning="GPUs that share the layers out among them.",
    ),
    Requirement(
        key="traced-memory",
        attribute="traced_memory_mib",
        kind="mib",
        unit="MiB",
        example="21GiB",
        minimum=1,
        maximum=16 * 2**20,
        meaning="Peak of one GPU's tensors that crater_slurm.job.trace_memory found for a step "
        "of these settings; counts more than a formula.",
    ),
    Requirement(
        key="gpus",
        attribute="gpus",
        kind="integer",
        example="2",
        minimum=0,
        maximum=1024,
        meaning="GPUs on each node of the job.",
    ),
    Requirement(
        key="gpu-memory",
        attribute="gpu_memory_mib",
        kind="mib",
        unit="MiB",
        example="16GiB",
        minimum=1,
        maximum=16 * 2**20,
        meaning="Memory that each GPU must have at least; of a shared one, the job's part.",
    ),
    Requirement(
        key="gpu-type",
        attribute="gpu_type",
        kind="word",
        example="a100",
        meaning="GPU model, or the beginning of one: a100 matches a100-pcie-40gb.",
    ),
    Requirement(
        key="tensor-cores",
        attribute="tensor_cores",
        kind="boolean",
        example="yes",
        meaning="Whether the GPU must have tensor cores.",
    ),
    Requirement(
        key="mig",
        attribute="mig",
        kind="mig",
        example="1g.5gb",
        meaning="MIG profile that each GPU of the job is an instance of; without it the job gets "
        "whole GPUs only.",
    ),
    Requirement(
        key="gpu-sharing",
        attribute="gpu_sharing",
        kind="boolean",
        example="yes",
        meaning="Whether the job may share a GPU with others, where the site allows it.",
    ),
    Requirement(
        key="driver",
        attribute="driver",
        kind="version",
        example="535.104",
        meaning="Oldest GPU driver that the job can live with.",
    ),
    Requirement(
        key="cuda",
        attribute="cuda",
        kind="version",
        example="12.2",
        meaning="Oldest CUDA version that the driver must support.",
    ),
    Requirement(
        key="cpus",
        attribute="cpus",
        kind="integer",
        example="8",
        minimum=1,
        maximum=8192,
        meaning="CPU cores on each node of the job; with physical-cores=no hardware threads.",
    ),
    Requirement(
        key="physical-cores",
        attribute="physical_cores",
        kind="boolean",
        example="yes",
        meaning="yes: each CPU is a core of its own, also those of Slurm's options; no: cpus "
        "counts hardware threads.",
    ),
    Requirement(
        key="avx",
        attribute="avx",
        kind="word",
        example="avx512",
        choices=("avx", "avx2", "avx512", "avx512_vnni", "avx512_bf16"),
        meaning="Vector instructions that the CPU must have.",
    ),
    Requirement(
        key="memory-bandwidth",
        attribute="memory_bandwidth_gb_s",
        kind="bandwidth",
        unit="GB/s",
        example="140GB/s",
        minimum=1,
        maximum=100000,
        meaning="Memory bandwidth reserved for the job; with numa=strict on its NUMA nodes.",
    ),
    Requirement(
        key="ssd-iops",
        attribute="ssd_iops",
        kind="count",
        unit="IOPS",
        example="800k",
        minimum=1,
        maximum=10**9,
        meaning="4 KiB random-read IOPS of the local NVMe reserved for the job.",
    ),
    Requirement(
        key="ssd-latency",
        attribute="ssd_latency_us",
        kind="latency",
        unit="µs",
        example="100us",
        minimum=0.1,
        maximum=10**7,
        meaning="Highest read latency of the local NVMe that the job can live with.",
    ),
    Requirement(
        key="io-pattern",
        attribute="io_pattern",
        kind="word",
        example="sequential",
        choices=("sequential", "random", "many_small"),
        meaning="How the job reads its data.",
    ),
    Requirement(
        key="cache",
        attribute="cache_gb",
        kind="gb",
        unit="GB",
        example="200GB",
        minimum=1,
        maximum=10**6,
        meaning="Space in the node's NVMe cache reserved for the job.",
    ),
    Requirement(
        key="checkpoint",
        attribute="checkpoint",
        kind="destination",
        example="/project/ckpt",
        meaning="Checkpoint offload: on, off, or where checkpoints go: a path, or "
        "s3://bucket/prefix (also gs:// and az://); %u %j %A %a %x %c stand for user, job, array "
        "job, array task, job name and cluster.",
    ),
    Requirement(
        key="checkpoint-keep",
        attribute="checkpoint_keep",
        kind="integer",
        example="3",
        minimum=1,
        maximum=100000,
        meaning="So many of the newest checkpoints are kept; older ones are removed, in the cache "
        "and at the destination.",
    ),
    Requirement(
        key="checkpoint-keep-every",
        attribute="checkpoint_keep_every",
        kind="integer",
        example="1000",
        minimum=1,
        maximum=10**9,
        meaning="Checkpoints whose step is a multiple of this are kept, whatever checkpoint-keep "
        "says.",
    ),
    Requirement(
        key="checkpoint-credentials",
        attribute="checkpoint_credentials",
        kind="credentials",
        example="own:research",
        meaning="How to get into an object store: site (the site's own store, below its URL and "
        "your user name), own (your files in your home), or own:PROFILE of them.",
    ),
    Requirement(
        key="stage",
        attribute="stage",
        kind="stage",
        example="/project/data/imagenet",
        meaning="Data to copy into the node's cache when the job starts: a path or URL, several "
        "with commas between them.",
    ),
    Requirement(
        key="ring",
        attribute="ring_gb",
        kind="gb",
        unit="GB",
        example="16GB",
        minimum=1,
        maximum=10**5,
        meaning="Memory of the job on each node that checkpoints may pass through; the site's "
        "limits count too.",
    ),
    Requirement(
        key="numa",
        attribute="numa",
        kind="word",
        example="strict",
        choices=("strict", "best_effort"),
        meaning="strict: GPUs, cores and memory on as few NUMA nodes as the GPUs need, "
        "or the job is refused; best_effort: preferred only.",
    ),
    Requirement(
        key="max-wait",
        attribute="max_wait_seconds",
        kind="seconds",
        unit="s",
        example="30m",
        minimum=1,
        maximum=366 * 86400,
        meaning="Longest time the job should wait in the queue.",
    ),
    Requirement(
        key="min-gpu-utilization",
        attribute="min_gpu_utilization_percent",
        kind="integer",
        unit="%",
        example="65",
        minimum=1,
        maximum=100,
        meaning="GPU utilisation below which the job is reported while it runs.",
    ),
    Requirement(
        key="preemptible",
        attribute="preemptible",
        kind="boolean",
        example="no",
        meaning="Whether the job may be preempted.",
    ),
    Requirement(
        key="mode",
        attribute="mode",
        kind="word",
        example="off",
        choices=("off", "observe", "advise", "enforce"),
        meaning="Lowers crater's mode for this job; off leaves the job as it is.",
    ),
)

BY_KEY: dict[str, Requirement] = {r.key: r for r in REQUIREMENTS}
BY_ATTRIBUTE: dict[str, Requirement] = {r.attribute: r for r in REQUIREMENTS}


def json_schema() -> dict[str, Any]:
    """JSON Schema of a request, keyed as the directives are."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "crater request",
        "type": "object",
        "additionalProperties": False,
        "properties": {r.key: r.json_schema() for r in REQUIREMENTS},
    }


def markdown_table() -> str:
    """The table as the documentation has it; a test keeps the two equal."""
    rows = ["| directive | values | meaning |", "|---|---|---|"]
    for requirement in REQUIREMENTS:
        values = ", ".join(requirement.choices) or f"such as `{requirement.example}`"
        if requirement.unit:
            values += f" (without a unit: {requirement.unit})"
        rows.append(f"| `{requirement.key}` | {values} | {requirement.meaning} |")
    return "\n".join(rows)
