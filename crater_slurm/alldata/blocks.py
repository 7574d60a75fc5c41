"""The blocks of a task: which fields there are, which of them must be there, what each may hold.

The source text's fields all have to be there, so that none is forgotten by accident; ``null``
says that there is no wish. Fields and blocks beyond the source text have defaults and may be
left out. Amounts are per node of the job and minimum needs, as those of the directives are.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from crater_slurm.alldata.rules import Choice, Directive, Flag, Number, Text, Words

#: How ``io_pattern`` is also written; the directive has one word for each.
_PATTERNS = {
    "sequential_read": "sequential",
    "random_read": "random",
    "many_small_files": "many_small",
    "small_files": "many_small",
}
#: Names of accounts, partitions and the like, as slurmdbd and slurm.conf take them.
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}"
#: Without what can't stand in quotation marks behind #SBATCH.
_FOR_SBATCH = r"[^\"'\\`$#]"
_NAME_FORM = "a name: letters, digits, _ . + -, at most 64"


class Block(BaseModel):
    """A part of a task; an unknown key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def _absolute(path: str) -> None:
    if not path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise ValueError("must be an absolute path without ..")


def _mount(mount: str) -> None:
    parts = mount.split(":")
    if len(parts) not in (2, 3) or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
        raise ValueError("must be host:container, with :ro or :rw behind it or nothing")
    if "," in mount:
        raise ValueError("must not hold commas, which separate mounts")
    for path in parts[:2]:
        _absolute(path)


class ModelConfig(Block):
    """What is trained or served."""

    name: Annotated[str | None, Directive(key="model")]
    precision: Annotated[str | None, Directive(key="precision")]
    quantization: Annotated[str | None, Directive(key="quantization", also={False: "none"})]
    parameters: Annotated[int | None, Directive(key="model-params", example=8030000000)] = None


class DataConfig(Block):
    """What it reads."""

    train_dataset: Annotated[
        str | None,
        Text(meaning="Where the training data is; the job finds it in TASK_TRAIN_DATASET."),
    ]
    val_dataset: Annotated[
        str | None,
        Text(meaning="Where the validation data is; the job finds it in TASK_VAL_DATASET."),
    ]
    io_pattern: Annotated[str | None, Directive(key="io-pattern", also=_PATTERNS)]
    stage_to_cache: Annotated[str | None, Directive(key="stage")] = None
    dataset_size_gb: Annotated[
        int | None,
        Number(minimum=1, maximum=10**9, meaning="Size of the data, GB (10^9 bytes)."),
    ] = None
    mean_sample_tokens: Annotated[
        int | None,
        Number(minimum=1, maximum=2**24, meaning="Mean length of a sample, in tokens."),
    ] = None


class Gpu(Block):
    """GPUs on each node."""

    count: Annotated[int, Directive(key="gpus", nullable=False)]
    memory_mb: Annotated[int | None, Directive(key="gpu-memory", example=16384)]
    type: Annotated[str | None, Directive(key="gpu-type", example="a100-pcie-40gb")]
    tensor_cores: Annotated[bool | None, Directive(key="tensor-cores")] = None
    sharing: Annotated[bool | None, Directive(key="gpu-sharing")] = None
    mig: Annotated[str | None, Directive(key="mig")] = None
    driver_min: Annotated[str | None, Directive(key="driver")] = None
    cuda_min: Annotated[str | None, Directive(key="cuda")] = None


class Cpu(Block):
    """Cores on each node."""

    cores: Annotated[int | None, Directive(key="cpus")]
    avx_support: Annotated[str | None, Directive(key="avx", also={True: "avx", False: None})]
    physical_cores: Annotated[bool | None, Directive(key="physical-cores")] = None


class Memory(Block):
    """Memory bandwidth on each node; the name's gbps are GB/s (bytes), as the values show."""

    bandwidth_gbps: Annotated[float | None, Directive(key="memory-bandwidth")]


class Ssd(Block):
    """The local NVMe of each node."""

    iops_min: Annotated[int | None, Directive(key="ssd-iops")]
    latency_us_max: Annotated[float | None, Directive(key="ssd-latency")]
    cache_gb: Annotated[int | None, Directive(key="cache")] = None


class ResourceRequirements(Block):
    """What each node of the job must have at least."""

    gpu: Gpu
    cpu: Cpu
    memory: Memory | None
    ssd: Ssd | None


class Sla(Block):
    """What was promised to the task's user."""

    max_queue_time_seconds: Annotated[int | None, Directive(key="max-wait", example=1440)]
    min_gpu_utilization_percent: Annotated[int | None, Directive(key="min-gpu-utilization")]
    displayed_wait_seconds: Annotated[
        int | None,
        Number(
            minimum=1,
            maximum=366 * 86400,
            meaning="The wait that the platform shows its user, to check max_queue_time by.",
        ),
    ] = None


class TrainingConfig(Block):
    """How it is trained; most of it decides how much memory is needed."""

    method: Annotated[str | None, Directive(key="method")] = None
    stage: Annotated[
        str | None,
        Choice(
            choices=("pretrain", "sft", "lora", "rlhf", "dpo", "inference"),
            meaning="Stage of the model's life; it stands for the method where none is given.",
        ),
    ] = None
    framework: Annotated[str | None, Directive(key="framework")] = None
    optimizer: Annotated[str | None, Directive(key="optimizer")] = None
    lora_rank: Annotated[int | None, Directive(key="lora-rank")] = None
    lora_alpha: Annotated[
        int | None,
        Number(minimum=1, maximum=2**20, meaning="Alpha of LoRA; the job finds it in TASK_."),
    ] = None
    micro_batch: Annotated[int | None, Directive(key="micro-batch")] = None
    sequence_length: Annotated[int | None, Directive(key="sequence-length")] = None
    activation_checkpointing: Annotated[bool | None, Directive(key="activation-checkpointing")] = (
        None
    )
    sharding: Annotated[str | None, Directive(key="sharding")] = None
    tensor_parallel: Annotated[int | None, Directive(key="tensor-parallel")] = None
    pipeline_parallel: Annotated[int | None, Directive(key="pipeline-parallel")] = None
    traced_memory_mb: Annotated[int | None, Directive(key="traced-memory", example=21504)] = None


class TopologyAwareness(Block):
    """How strictly GPUs, cores and memory are kept on the same NUMA nodes."""

    enable_numa_binding: Annotated[bool | None, Flag(meaning="false: no wish.")] = None
    numa_binding_policy: Annotated[str | None, Directive(key="numa")] = None


class CheckpointConfig(Block):
    """Checkpoints that leave the training process at memory speed."""

    destination: Annotated[str | None, Directive(key="checkpoint")] = None
    credentials: Annotated[str | None, Directive(key="checkpoint-credentials")] = None
    keep_last: Annotated[int | None, Directive(key="checkpoint-keep")] = None
    keep_every: Annotated[int | None, Directive(key="checkpoint-keep-every")] = None
    ring_gb: Annotated[int | None, Directive(key="ring")] = None


class SchedulingConfig(Block):
    """Slurm's own options."""

    partition: Annotated[
        str | None,
        Text(pattern=f"{_NAME}(,{_NAME})*", form=_NAME_FORM, meaning="Partition, or several."),
    ] = None
    account: Annotated[
        str | None, Text(pattern=_NAME, form=_NAME_FORM, meaning="Account that pays.")
    ] = None
    qos: Annotated[str | None, Text(pattern=_NAME, form=_NAME_FORM, meaning="QOS.")] = None
    reservation: Annotated[
        str | None, Text(pattern=_NAME, form=_NAME_FORM, meaning="Reservation.")
    ] = None
    time_limit_seconds: Annotated[
        int | None,
        Number(minimum=60, maximum=366 * 86400, meaning="Longest run; Slurm ends it then."),
    ] = None
    nodes: Annotated[int | None, Number(minimum=1, maximum=100_000, meaning="Nodes.")] = None
    preemptible: Annotated[bool | None, Directive(key="preemptible")] = None
    crater_mode: Annotated[str | None, Directive(key="mode")] = None


class Container(Block):
    """The image that the program runs in."""

    image: Annotated[
        str,
        Text(
            # Not a dash first: it would be an option of the runtime.
            pattern=r"[A-Za-z0-9/_.][A-Za-z0-9/_.:@#+=-]{0,511}",
            form="a path or a registry's name of an image",
            meaning="Path, or name in a registry as the runtime takes it.",
            example="/images/torch.sif",
            nullable=False,
        ),
    ]
    runtime: Annotated[
        str | None,
        Choice(
            choices=("apptainer", "pyxis"),
            meaning="What starts it: Apptainer, or Slurm's Pyxis; apptainer when null.",
        ),
    ] = None
    mounts: Annotated[
        tuple[str, ...] | None,
        Words(
            each=_mount,
            most=64,
            meaning="Folders of the node that it sees: /from:/to, or /from:/to:ro.",
        ),
    ] = None


class RunConfig(Block):
    """What runs."""

    name: Annotated[
        str | None,
        Text(
            pattern=r"[A-Za-z0-9_.:+-]{1,128}",
            form="a name: letters, digits, _ . : + -",
            meaning="Name of the job; the task's id when null.",
        ),
    ] = None
    command: Annotated[
        tuple[str, ...] | None,
        Words(meaning="The program and its arguments, each a text of its own; no shell."),
    ] = None
    script: Annotated[
        str | None,
        Text(
            pattern=r"[^-].*",
            form="a file whose name does not begin with -",
            meaning="A program instead of command: a file; .py files are run by python3.",
        ),
    ] = None
    arguments: Annotated[
        tuple[str, ...] | None, Words(meaning="Arguments behind script or command.")
    ] = None
    working_directory: Annotated[
        str | None,
        Text(
            pattern=rf"/{_FOR_SBATCH}*",
            form="an absolute path without \" ' \\ ` $ #, which sbatch reads in its own way",
            meaning="Folder that it runs in.",
        ),
    ] = None
    output: Annotated[
        str | None,
        Text(
            pattern=rf"{_FOR_SBATCH}+",
            form="a path without \" ' \\ ` $ #, which sbatch reads in its own way",
            meaning="File of what it prints; Slurm's %j and so on are known.",
        ),
    ] = None
    container: Container | None = None
