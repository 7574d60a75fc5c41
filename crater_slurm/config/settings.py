"""Every setting of crater with its default. ``crater config show`` prints them with their origin.

The file is ``/etc/crater/crater.yaml``, or the one that ``CRATER_CONFIG`` names. The text beside
each field is its documentation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

#: YAML 1.1 reads a bare ``off`` as false; here it is a word like the others.
_OffIsAWord = BeforeValidator(lambda value: "off" if value is False else value)


class Section(BaseModel):
    """A part of the tree; an unknown key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Slurm(Section):
    """How to reach Slurm."""

    conf: Path | None = Field(
        default=None, description="slurm.conf; Slurm's own default when unset."
    )
    bin_dir: Path | None = Field(
        default=None, description="Folder of the Slurm commands; PATH when unset."
    )
    timeout_seconds: float = Field(
        default=15, gt=0, description="A Slurm command that takes longer is given up, and said so."
    )


class Store(Section):
    """The node-profile store."""

    url: str = Field(
        default="sqlite:////var/lib/crater/crater.db",
        description="SQLAlchemy URL. SQLite serves one controller; several controllers share a "
        "PostgreSQL (postgresql+psycopg://) or MariaDB (mysql+pymysql://).",
    )
    keep_decisions_days: int = Field(
        default=90, ge=1, description="Decisions older than this are removed; explain needs them."
    )


class Filter(Section):
    """The submit filter, on the controller."""

    mode: Annotated[Literal["off", "observe", "advise", "enforce"], _OffIsAWord] = Field(
        default="observe",
        description="observe logs, advise tells the user, enforce changes jobs. A new "
        "installation observes, so that nothing changes before an admin has looked.",
    )
    socket: Path = Field(
        default=Path("/run/crater/filter.sock"),
        description="Where slurmctld's Lua finds the scheduler.",
    )
    allowed_users: tuple[str, ...] = Field(
        default=("root", "slurm"), description="Who may ask: SlurmUser and root."
    )
    allow_declared: bool = Field(
        default=True,
        description="Count values that an admin declared and nobody measured. False makes a "
        "requirement on them match no node.",
    )
    consume: tuple[Literal["membw", "nviops", "nvme"], ...] = Field(
        default=("membw", "nviops", "nvme"),
        description="Resources requested as CountOnly gres where slurm.conf has them.",
    )


class Sharing(Section):
    """Several jobs on one GPU, as Slurm's gres ``shard``. Nothing isolates them."""

    allow: Annotated[Literal["off", "shard"], _OffIsAWord] = Field(
        default="off",
        description="shard gives a job that says gpu-sharing=yes slices of a GPU, and refuses "
        "--gres=shard:N that no GPU has. Off by default: neighbours are not kept apart.",
    )
    rounding: Literal["ceil", "floor", "nominal"] = Field(
        default="ceil",
        description="Size of a slice, a 32nd of the memory and at least 512 MiB: rounded up, "
        "rounded down, or of the memory in whole GiB. Must be what gres.conf was rendered with.",
    )
    reserve: int = Field(
        default=1,
        ge=0,
        le=31,
        description="Slices of each GPU that no job gets, for the contexts of driver and jobs.",
    )
    mps: bool = Field(
        default=False,
        description="Nodes with shards run the CUDA MPS daemon: tasks get its limits of memory "
        "and threads for their slices in their environment.",
    )


class ScoreWeights(Section):
    """What each amount counts in a node's score; they sum to 1, and of what a job does not ask for
    the others take the part."""

    gpu_memory: float = Field(default=0.45, ge=0, le=1, description="Memory of each GPU.")
    cpu_cores: float = Field(default=0.20, ge=0, le=1, description="CPU cores.")
    memory_bandwidth: float = Field(default=0.20, ge=0, le=1, description="Memory bandwidth.")
    ssd_iops: float = Field(default=0.15, ge=0, le=1, description="Random-read IOPS of the NVMe.")

    @model_validator(mode="after")
    def _sum_is_one(self) -> Self:
        total = sum(self.model_dump().values())
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the weights sum to {total:.6g}, and must sum to 1")
        return self


class Score(Section):
    """Which of the nodes that can run a job it should rather get."""

    weights: ScoreWeights = ScoreWeights()
    prefer: bool = Field(
        default=True,
        description="Give a planned job --prefer with the node features that name the nodes that "
        "suit it best. Slurm takes other nodes when none of those is free.",
    )
    tolerance: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Nodes whose score is this close to the best are as good.",
    )


class Scheduler(Section):
    """crater-scheduler's HTTP API."""

    listen: str = Field(
        default="127.0.0.1:9192",
        description="Address of the HTTP API. 9091, which the first documents name, is "
        "Prometheus Pushgateway's; set it if nothing else uses it.",
    )
    url: str = Field(
        default="http://127.0.0.1:9192", description="Where nodes and commands find the API."
    )
    refresh_seconds: float = Field(
        default=30, gt=0, description="How often partitions and nodes are read from Slurm."
    )
    admin_users: tuple[str, ...] = Field(
        default=("root", "slurm", "crater"),
        description="Who may see other users' decisions, and report of the node that they are on.",
    )
    verify_node_host: bool = Field(
        default=True,
        description="Take a node's report only from that node, by the host in its MUNGE "
        "credential. False where nodes are containers that share one munged.",
    )


class Plan(Section):
    """The signed plan that travels in the job's comment."""

    key_file: Path = Field(
        default=Path("/etc/crater/plan.key"),
        description="One hex key per line, the first signs and all verify; same on every node.",
    )


class Cache(Section):
    """The node's NVMe cache: a mount that the admin made, or a device that already holds one."""

    mount_point: Path = Field(
        default=Path("/crater-cache"), description="Where the cache file system is mounted."
    )
    device: str | None = Field(
        default=None,
        pattern=r"^(/dev/disk/by-id/[^/\s]+|(UUID|LABEL)=[^/\s]+)$",
        description="Mounted there when nothing is: a stable name (/dev/disk/by-id/..., UUID=..., "
        "LABEL=...) of a device that holds a file system. Nothing is ever formatted.",
    )
    require_mount: bool = Field(
        default=True,
        description="Use the folder only if it is a mount point, never the system disk.",
    )
    size_gb: int | None = Field(
        default=None, ge=1, description="Use at most this much; all when unset."
    )
    min_free_percent: float = Field(
        default=2,
        ge=0,
        le=50,
        description="Below this a job gets no new cache folders, and is told so.",
    )
    keep: Literal["remove", "keep_checkpoints"] = Field(
        default="remove", description="What the end of a job leaves of its folders."
    )
    keep_checkpoints_hours: float = Field(
        default=72,
        gt=0,
        description="With keep_checkpoints: older ones are removed, or they would fill the drive.",
    )


class Node(Section):
    """crater-io-daemon, on every node."""

    socket: Path = Field(
        default=Path("/run/crater/node.sock"), description="Where the hooks find it."
    )
    state_dir: Path = Field(
        default=Path("/var/lib/crater/node"),
        description="What must survive a restart of the daemon.",
    )
    profile: Path = Field(
        default=Path("/var/lib/crater/profile.json"),
        description="This node's profile, for GPU UUIDs and NUMA nodes.",
    )
    cache: Cache = Cache()
    memory_binding: Annotated[Literal["hard", "soft", "off"], _OffIsAWord] = Field(
        default="hard",
        description="hard narrows cpuset.mems where the ledger shows that no job can be hurt and "
        "falls back to soft; soft only places cores and lets memory follow.",
    )
    memory_reserve_mib: int = Field(
        default=2048,
        ge=0,
        description="Per NUMA node, kept out of the ledger for the kernel and daemons; a full "
        "node under a hard limit makes the kernel kill.",
    )
    cpu_source: Literal["cpuset", "slurm"] = Field(
        default="cpuset",
        description="Where a job's CPU list comes from. slurm asks slurmctld, for labs whose "
        "nodes have more cores than the machine.",
    )
    report: bool = Field(default=True, description="Send what jobs really got to crater-scheduler.")
    environment_for_all: bool = Field(
        default=False,
        description="Give the CRATER_ variables and cache folders also to jobs without a plan.",
    )
    drain_on: tuple[Literal["cache_missing", "cache_read_only"], ...] = Field(
        default=(),
        description="Faults of the node for which Prolog exits non-zero, so that Slurm drains it. "
        "None by default: a job runs without its cache.",
    )
    sample_seconds: float = Field(
        default=30, gt=0, description="How often the memory of running jobs is read, per NUMA node."
    )
    keep_jobs_days: float = Field(
        default=7,
        gt=0,
        description="Records of ended jobs are kept this long; a plan token copied into another "
        "job is recognised as long as its first job's record is there.",
    )
    cgroup_root: Path = Field(
        default=Path("/sys/fs/cgroup"), description="Where cgroup v2 is mounted."
    )


class Probe(Section):
    """crater-probe serve, on every node."""

    listen: str = Field(
        default="0.0.0.0:9193",
        description="Address of /metrics for Prometheus; empty: none. 9090, which the first "
        "documents name, is Prometheus's own.",
    )
    sample_seconds: float = Field(
        default=15, ge=1, description="How often load, drives and GPUs are looked at."
    )
    scan_seconds: float = Field(
        default=900,
        ge=10,
        description="How often the hardware is read anew; SIGHUP does it at once.",
    )
    publish: bool = Field(
        default=True, description="Report profile and health to crater-scheduler (scheduler.url)."
    )
    publish_seconds: float = Field(
        default=30, ge=1, description="How often health is reported; a changed profile at once."
    )
    watch_latency: bool = Field(
        default=True,
        description="Read the cache drive a little at each report, for a latency that can be "
        "compared with the calibrated one. Writes one file of 64 MiB, once.",
    )
    state_dir: Path = Field(
        default=Path("/var/lib/crater/probe"),
        description="Profiles that the scheduler has not got yet.",
    )


class Settings(Section):
    """The whole tree."""

    off_switch: Path = Field(
        default=Path("/etc/crater/off"),
        description="While this file exists, filter and hooks do nothing at all.",
    )
    slurm: Slurm = Slurm()
    store: Store = Store()
    filter: Filter = Filter()
    sharing: Sharing = Sharing()
    score: Score = Score()
    scheduler: Scheduler = Scheduler()
    plan: Plan = Plan()
    node: Node = Node()
    probe: Probe = Probe()
