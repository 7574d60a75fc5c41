"""Reads a job's options from the job_desc fields that the submit filter sends."""

from __future__ import annotations

from collections.abc import Mapping

from crater_slurm.model.job import GpuOption, GpuScope, Job, JobKind
from crater_slurm.slurm import gres

_ENFORCE_BINDING = 1 << 4  # GRES_ENFORCE_BIND of slurm.h, the same in 22.05 to 26.05
_DISABLE_BINDING = 1 << 19  # GRES_DISABLE_BIND

_SCOPES = (
    ("tres_per_node", GpuScope.NODE),
    ("tres_per_job", GpuScope.JOB),
    ("tres_per_socket", GpuScope.SOCKET),
    ("tres_per_task", GpuScope.TASK),
)
#: What only jobs with whole GPUs may say; Slurm refuses it beside shards.
_PER_GPU = {
    "cpus_per_tres": "--cpus-per-gpu",
    "mem_per_tres": "--mem-per-gpu",
    "ntasks_per_gpu": "--ntasks-per-gpu",
    "tres_bind": "--gpu-bind",
}

#: Keys of a filter message that planning reads, here and in the levers.
PLANNING = (
    *("uid", "kind", "het", "gres_style", "field.gres"),
    *("field.ntasks_per_socket", "field.threads_per_core"),
    *("field.num_tasks", "field.ntasks_per_node", "field.cpus_per_task", "field.min_cpus"),
    *("field.min_nodes", "field.max_nodes", "field.min_mem_per_node", "field.min_mem_per_cpu"),
    *("field.features", "field.exc_nodes", "field.req_nodes", "field.shared", "field.partition"),
    *("field.prefer", "field.reservation", "field.time_limit", "field.immediate"),
    *(f"field.{name}" for name in _PER_GPU),
    *("field.sockets_per_node", "field.cores_per_socket", "field.bitflags", "field.array_inx"),
    *(f"field.{name}" for name, _ in _SCOPES),
)


def planning_fields(message: Mapping[str, str]) -> dict[str, str]:
    """The part of a filter message from which the job can be planned again."""
    return {key: message[key] for key in PLANNING if message.get(key)}


def job_from_fields(message: Mapping[str, str]) -> Job:
    """A Job from one filter message (see docs/protocols.md), ``field.NAME`` keys and all.

    Raises ValueError when a gres string can't be read; Slurm will refuse it in its own words.
    """

    def text(name: str) -> str | None:
        return message.get(f"field.{name}") or None

    def number(name: str) -> int | None:
        value = message.get(f"field.{name}")
        try:
            found = int(float(value)) if value else None
        except (ValueError, OverflowError):
            return None
        return found if found is not None and found >= 0 else None

    gpus: list[GpuOption] = []
    others: dict[str, int] = {}
    for name, scope in _SCOPES:
        raw = text(name) or (text("gres") if name == "tres_per_node" else None)
        for entry in gres.parse(raw or ""):
            if entry.name in ("gpu", "shard"):
                gpus.append(GpuOption(scope, entry.count, entry.type, entry.name == "shard"))
            elif scope is GpuScope.NODE:
                others[entry.name] = others.get(entry.name, 0) + entry.count
    if (per_gpu := number("ntasks_per_gpu")) and gpus and number("num_tasks") is None:
        gpus_total = sum(g.count for g in gpus)
        message = {**message, "field.num_tasks": str(per_gpu * gpus_total)}
    per_gpu_cpus = [g.count for g in gres.parse(text("cpus_per_tres") or "") if g.name == "gpu"]
    flags = number("bitflags") or 0
    partitions = text("partition")
    return Job(
        user_id=int(message.get("uid", "-1")),
        user_name=message.get("user", ""),
        kind=JobKind(message.get("kind", "batch")),
        partitions=tuple(p for p in (partitions or "").split(",") if p),
        min_nodes=number("min_nodes"),
        max_nodes=number("max_nodes"),
        tasks=number("num_tasks"),
        tasks_per_node=number("ntasks_per_node"),
        cpus_per_task=number("cpus_per_task"),
        cpus_per_gpu=per_gpu_cpus[0] if per_gpu_cpus else None,
        per_gpu=tuple(option for name, option in _PER_GPU.items() if text(name)),
        min_cpus=number("min_cpus"),
        gpus=tuple(gpus),
        gres=others,
        memory_per_node_mib=number("min_mem_per_node") or None,
        memory_per_cpu_mib=number("min_mem_per_cpu") or None,
        features=text("features"),
        exclude=text("exc_nodes"),
        node_list=text("req_nodes"),
        exclusive=message.get("field.shared") == "0",
        sockets_per_node=number("sockets_per_node"),
        cores_per_socket=number("cores_per_socket"),
        threads_per_core=number("threads_per_core") or None,
        time_limit_minutes=number("time_limit"),
        reservation=text("reservation"),
        immediate=bool(number("immediate")),
        enforce_binding=bool(flags & _ENFORCE_BINDING),
        disable_binding=bool(flags & _DISABLE_BINDING),
        array=bool(text("array_inx")),
        het_component=int(message["het"]) if message.get("het", "").isdigit() else None,
        comment=message.get("field.comment", ""),
    )
