"""Every setting of crater with its default. ``crater config show`` prints them with their origin.

The file is ``/etc/crater/crater.yaml``, or the one that ``CRATER_CONFIG`` names. The text beside
each field is its documentation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from crater_slurm.config.alldata import AllData
from crater_slurm.config.cache import Cache
from crater_slurm.config.checkpoints import Checkpoints
from crater_slurm.config.health import Health
from crater_slurm.config.prediction import Prediction
from crater_slurm.config.score import Score
from crater_slurm.config.section import OffIsAWord, Section
from crater_slurm.config.sharing import Sharing
from crater_slurm.config.submit import Submit


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

    mode: Annotated[Literal["off", "observe", "advise", "enforce"], OffIsAWord] = Field(
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
    queue_seconds: float = Field(
        default=30,
        gt=0,
        description="How often waiting jobs are read from Slurm, where sla or reconcile need them.",
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
    tls_cert_file: Path | None = Field(
        default=None,
        description="Certificate (and chain) in PEM; the API is then https only, and url says so.",
    )
    tls_key_file: Path | None = Field(default=None, description="Its key, mode 0600.")
    longest_body_kib: int = Field(
        default=256, ge=1, le=16384, description="A task that is larger is refused with 413."
    )
    requests_per_second: float = Field(
        default=50,
        gt=0,
        description="What one token may ask in the long run; beyond it 429 with Retry-After.",
    )
    requests_burst: int = Field(
        default=100, ge=1, description="What one token may ask at once after a pause."
    )


class Plan(Section):
    """The signed plan that travels in the job's comment."""

    key_file: Path = Field(
        default=Path("/etc/crater/plan.key"),
        description="One hex key per line, the first signs and all verify; same on every node.",
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
    checkpoints: Checkpoints = Checkpoints()
    listen: str = Field(
        default="0.0.0.0:9194",
        description="Address of crater-io-daemon's /metrics for Prometheus; empty: none.",
    )
    memory_binding: Annotated[Literal["hard", "soft", "off"], OffIsAWord] = Field(
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
    preprocessing_percent: int = Field(
        default=20,
        ge=0,
        le=90,
        description="Share of a task's cores that CRATER_PREPROC_CPUS names for preparing data, "
        "rounded up to whole cores; at least one core stays for computing. 0: none.",
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
        default=30,
        gt=0,
        description="How often running jobs are looked at: memory per NUMA node, and use.",
    )
    observe: bool = Field(
        default=True,
        description="Watch what running jobs need (memory, GPU memory and utilization, CPU, I/O) "
        "at sample_seconds and, with report, tell crater-scheduler, which predicts by it.",
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


class Sla(Section):
    """What is done for jobs whose max-wait is about to be broken."""

    enabled: bool = Field(
        default=False, description="Act for jobs with max-wait. Off: nothing is ever raised."
    )
    dry_run: bool = Field(default=False, description="Log and record each step, and change no job.")
    act_at: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Share of max-wait after which the first step is taken; further steps follow "
        "in equal parts of the rest.",
    )
    steps: tuple[Literal["priority", "qos"], ...] = Field(
        default=("priority",),
        description="What may be done, in this order, each once for a job. priority lowers the "
        "job's nice by priority_boost, qos sets the QOS that sla.qos names.",
    )
    priority_boost: int = Field(
        default=1000,
        ge=1,
        le=1_000_000_000,
        description="By how much a job's priority is raised; as nice, so that the site's own "
        "factors go on counting.",
    )
    priority_limit: int | None = Field(
        default=None,
        ge=1,
        description="No job's priority is raised above this; no limit when unset.",
    )
    qos: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.+-]{1,64}$",
        description="QOS of the step qos; what it may preempt is the site's own configuration of "
        "it. Without a name that step does nothing.",
    )
    least_wait_seconds: float = Field(
        default=600,
        ge=1,
        description="A shorter max-wait counts as this, so that nobody jumps the queue by asking "
        "for one second.",
    )
    jobs_per_user: int = Field(
        default=2,
        ge=1,
        description="Waiting jobs of one user (each array task is one) that are helped at a time.",
    )


class Reconcile(Section):
    """What is done for waiting jobs when nodes change."""

    enabled: bool = Field(
        default=True,
        description="When profiles or health change, replace the nodes that crater excluded from "
        "planned jobs that still wait. Only with filter.mode enforce.",
    )
    dry_run: bool = Field(
        default=False, description="Log and record each change, and change no job."
    )
    per_minute: int = Field(
        default=60, ge=1, description="At most so many jobs are changed per minute."
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
    prediction: Prediction = Prediction()
    score: Score = Score()
    scheduler: Scheduler = Scheduler()
    alldata: AllData = AllData()
    submit: Submit = Submit()
    health: Health = Health()
    plan: Plan = Plan()
    sla: Sla = Sla()
    reconcile: Reconcile = Reconcile()
    node: Node = Node()
    probe: Probe = Probe()
