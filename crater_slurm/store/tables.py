"""The tables. Values have their unit in the column's name; times are microseconds since 1970, UTC.

A node's parts hang on its name, so that a person can read the tables without joins, and go with
it when the node is deleted. What is a list of numbers or words to crater is one text here. The
name ``job_grant`` avoids SQL's keyword GRANT.
"""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

# Imported so that Base knows the tables of both modules, whoever asks it.
from crater_slurm.store import task_tables as task_tables
from crater_slurm.store.base import DOCUMENT, MYSQL, NAME, SERIAL
from crater_slurm.store.base import Base as Base


def _node_key() -> Mapped[str]:
    return mapped_column(NAME, ForeignKey("node.name", ondelete="CASCADE"), primary_key=True)


def _position() -> Mapped[int]:
    """Place in the profile's list; provenance paths count by it."""
    return mapped_column(primary_key=True, autoincrement=False)


class MetaRow(Base):
    """Counters; ``profile_version`` grows with every change of a profile."""

    __tablename__ = "meta"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[int]


class NodeRow(Base):
    """A node, its processors, and the version at which its profile last changed."""

    __tablename__ = "node"
    __table_args__ = (Index(None, "version"), MYSQL)
    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    version: Mapped[int]
    digest: Mapped[str] = mapped_column(String(64))
    source_method: Mapped[str] = mapped_column(String(16))
    source_time_us: Mapped[int | None]
    memory_mib: Mapped[int | None]
    cache_gb: Mapped[int | None]
    cpu_model: Mapped[str | None]
    cpu_arch: Mapped[str | None]
    cpu_sockets: Mapped[int]
    cpu_cores_per_socket: Mapped[int]
    cpu_threads_per_core: Mapped[int]
    cpu_avx: Mapped[str | None] = mapped_column(Text)
    cpu_l3_caches: Mapped[str | None] = mapped_column(Text)
    kernel: Mapped[str | None]
    gpu_driver: Mapped[str | None]
    cuda: Mapped[str | None]


class NumaNodeRow(Base):
    """A NUMA node; ``cpus`` is a kernel list, distances and bandwidths are comma-separated."""

    __tablename__ = "numa_node"
    node: Mapped[str] = _node_key()
    position: Mapped[int] = _position()
    id: Mapped[int]
    cpus: Mapped[str] = mapped_column(Text)
    socket: Mapped[int | None]
    memory_mib: Mapped[int | None]
    memory_bandwidth_gb_s: Mapped[float | None]
    distances: Mapped[str] = mapped_column(Text)
    kind: Mapped[str | None] = mapped_column(String(16))
    remote_bandwidth_gb_s: Mapped[str | None] = mapped_column(Text)
    firmware_bandwidth_gb_s: Mapped[float | None]
    firmware_latency_ns: Mapped[int | None]


class GpuRow(Base):
    """A GPU; ``precisions`` are comma-separated, ``mig_instances`` a JSON list."""

    __tablename__ = "gpu"
    node: Mapped[str] = _node_key()
    position: Mapped[int] = _position()
    index: Mapped[int] = mapped_column("gpu_index", key="index")
    model: Mapped[str]
    gres_type: Mapped[str | None]
    uuid: Mapped[str | None]
    pci_bus_id: Mapped[str | None]
    numa_node: Mapped[int | None]
    sm_count: Mapped[int | None]
    tensor_cores: Mapped[bool | None]
    memory_mib: Mapped[int | None]
    memory_bandwidth_gb_s: Mapped[float | None]
    precisions: Mapped[str | None]
    compute_capability: Mapped[str | None]
    mig_capable: Mapped[bool | None]
    mig_instances: Mapped[str] = mapped_column(Text)


class NvLinkRow(Base):
    """Links of equal bandwidth from the GPU at place ``gpu``; ``peers`` are comma-separated.

    Grouped, because eight GPUs that all see each other have 56 links, and a cluster millions.
    """

    __tablename__ = "nvlink"
    node: Mapped[str] = _node_key()
    gpu: Mapped[int] = _position()
    position: Mapped[int] = _position()
    peers: Mapped[str] = mapped_column(Text)
    bandwidth_gb_s: Mapped[float | None]


class NvmeRow(Base):
    """An NVMe drive; ``uses`` is a JSON list."""

    __tablename__ = "nvme"
    node: Mapped[str] = _node_key()
    position: Mapped[int] = _position()
    name: Mapped[str]
    stable_id: Mapped[str | None]
    model: Mapped[str | None]
    size_gb: Mapped[int | None]
    numa_node: Mapped[int | None]
    random_read_iops: Mapped[int | None]
    random_write_iops: Mapped[int | None]
    read_latency_us: Mapped[float | None]
    iops_stability_ratio: Mapped[float | None]
    sequential_write_mb_s: Mapped[float | None]
    firmware: Mapped[str | None]
    pci_bus_id: Mapped[str | None]
    uses: Mapped[str | None] = mapped_column(Text)
    wear_percent: Mapped[int | None]


class PciDeviceRow(Base):
    """A device in the PCI tree; ``names`` and ``bridges`` are comma-separated."""

    __tablename__ = "pci_device"
    node: Mapped[str] = _node_key()
    position: Mapped[int] = _position()
    address: Mapped[str]
    kind: Mapped[str] = mapped_column(String(16))
    names: Mapped[str] = mapped_column(Text)
    model: Mapped[str | None]
    numa_node: Mapped[int | None]
    local_cpus: Mapped[str] = mapped_column(Text)
    root: Mapped[str | None]
    bridges: Mapped[str] = mapped_column(Text)
    link_speed_gt_s: Mapped[float | None]
    link_width: Mapped[int | None]
    max_link_speed_gt_s: Mapped[float | None]
    max_link_width: Mapped[int | None]


class DimmRow(Base):
    """A memory module."""

    __tablename__ = "dimm"
    node: Mapped[str] = _node_key()
    position: Mapped[int] = _position()
    slot: Mapped[str]
    size_mib: Mapped[int]
    kind: Mapped[str | None]
    speed_mt_s: Mapped[int | None]
    channel: Mapped[str | None]


class ProvenanceRow(Base):
    """Where values of a node come from; ``paths`` are separated by spaces.

    Values without a row have the node's source. Grouped by method and time, because a node has
    dozens of values but few moments at which they were taken.
    """

    __tablename__ = "provenance"
    node: Mapped[str] = _node_key()
    position: Mapped[int] = _position()
    method: Mapped[str] = mapped_column(String(16))
    time_us: Mapped[int | None]
    paths: Mapped[str] = mapped_column(DOCUMENT)
    is_override: Mapped[bool | None]


class DecisionRow(Base):
    """A decision as JSON, with what it is looked up by."""

    __tablename__ = "decision"
    __table_args__ = (
        Index(None, "time_us"),
        Index(None, "user_id", "time_us"),
        Index(None, "job_id"),
        MYSQL,
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    time_us: Mapped[int]
    user_id: Mapped[int]
    job_id: Mapped[int | None]
    verdict: Mapped[str] = mapped_column(String(16))
    mode: Mapped[str] = mapped_column(String(16))
    document: Mapped[str] = mapped_column(DOCUMENT)


class GrantRow(Base):
    """What a job really got on one node, as JSON; a job id may come again after years."""

    __tablename__ = "job_grant"
    __table_args__ = (Index(None, "plan_id"), Index(None, "time_us"), MYSQL)
    job_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    node: Mapped[str] = mapped_column(NAME, primary_key=True)
    plan_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    time_us: Mapped[int]
    document: Mapped[str] = mapped_column(DOCUMENT)


class ObservationRow(Base):
    """What a job was seen to need on one node; ``workload`` is JSON, the rest is unknown if NULL.

    ``workload_key`` is that of the workload's model, method and framework.
    """

    __tablename__ = "observation"
    __table_args__ = (
        Index(None, "workload_key", "time_us"),
        Index(None, "plan_id"),
        Index(None, "time_us"),
        MYSQL,
    )
    job_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    node: Mapped[str] = mapped_column(NAME, primary_key=True)
    plan_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    time_us: Mapped[int]
    workload_key: Mapped[str | None]
    workload: Mapped[str] = mapped_column(Text)
    seconds: Mapped[float]
    ended: Mapped[bool]
    succeeded: Mapped[bool | None]
    oom_kills: Mapped[int]
    samples: Mapped[int]
    gpus: Mapped[int]
    host_memory_peak_mib: Mapped[int | None]
    host_memory_total_peak_mib: Mapped[int | None]
    gpu_memory_peak_mib: Mapped[int | None]
    gpu_memory_size_mib: Mapped[int | None]
    cpu_cores_mean: Mapped[float | None]
    gpu_utilization_mean_percent: Mapped[float | None]
    gpu_utilization_max_percent: Mapped[float | None]
    gpu_utilization_recent_percent: Mapped[float | None]
    ssd_read_mb_s_peak: Mapped[float | None]
    ssd_write_mb_s_peak: Mapped[float | None]
    ssd_read_mb_s_mean: Mapped[float | None]
    ssd_write_mb_s_mean: Mapped[float | None]
    ssd_iops_peak: Mapped[float | None]


class EventRow(Base):
    """Something that happened to a node, in one sentence; where a value changed, both of it."""

    __tablename__ = "event"
    __table_args__ = (Index(None, "node", "time_us"), Index(None, "time_us"), MYSQL)
    id: Mapped[int] = mapped_column(SERIAL, primary_key=True, autoincrement=True)
    node: Mapped[str] = mapped_column(NAME)
    time_us: Mapped[int]
    kind: Mapped[str] = mapped_column(String(32))
    message: Mapped[str] = mapped_column(Text)
    path: Mapped[str | None]
    old: Mapped[str | None] = mapped_column(Text)
    new: Mapped[str | None] = mapped_column(Text)


class JobActionRow(Base):
    """What crater-scheduler did to a job after its submission; ``job`` is Slurm's label of it."""

    __tablename__ = "job_action"
    __table_args__ = (Index(None, "plan_id"), Index(None, "time_us"), MYSQL)
    id: Mapped[int] = mapped_column(SERIAL, primary_key=True, autoincrement=True)
    job: Mapped[str] = mapped_column(DOCUMENT)
    plan_id: Mapped[str] = mapped_column(String(64))
    user_id: Mapped[int]
    time_us: Mapped[int]
    kind: Mapped[str] = mapped_column(String(16))
    action: Mapped[str] = mapped_column(String(32))
    outcome: Mapped[str] = mapped_column(String(16))
    value: Mapped[str] = mapped_column(DOCUMENT)
    message: Mapped[str] = mapped_column(Text)
