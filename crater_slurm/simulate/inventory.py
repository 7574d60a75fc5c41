"""Nodes to simulate, from profiles of real ones: what is counted of each, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterable

from crater_slurm.errors import UsageError
from crater_slurm.model.profile import NodeProfile
from crater_slurm.simulate.trace import MOST_GPUS, OPENB_KINDS, Nodes

#: MB/s of memory bandwidth that a job is taken to use for each CPU (traces don't say).
BANDWIDTH_MB_S_PER_CPU = 4000


def of_profiles(profiles: Iterable[NodeProfile]) -> Nodes:
    """Nodes with CPU and memory, and bandwidth and NVMe IOPS where every node has them known."""
    nodes = list(profiles)
    notes = ["NVMe IOPS: none in traces, no job takes any"]
    kinds: tuple[str, ...] = OPENB_KINDS
    unknown = next((n.name for n in nodes if n.memory_bandwidth_gb_s is None), None)
    per_core = 0
    if unknown:
        notes.append(f"memory bandwidth: not known of node {unknown}, not counted")
    else:
        kinds += ("bandwidth_mb_s",)
        least = min(int((n.memory_bandwidth_gb_s or 0) * 1000) // _cpus(n) for n in nodes)
        per_core = min(BANDWIDTH_MB_S_PER_CPU, least)
        notes.append(f"memory bandwidth: none in traces, {per_core / 1000:g} GB/s a CPU")
    models: dict[str, int] = {}
    rest, of_model = [], []
    for node in nodes:
        label = node.gpus[0].gres_type or node.gpus[0].model if node.gpus else "none"
        if any((gpu.gres_type or gpu.model) != label for gpu in node.gpus):
            notes.append(f"GPU models: node {node.name} has several, all are taken as {label}")
        of_model.append(models.setdefault(label, len(models)))
        rest.append(tuple(_capacity(node, kind) for kind in (*kinds, "read_iops")))
    if max((len(node.gpus) for node in nodes), default=0) > MOST_GPUS:
        raise UsageError(f"a node has more than {MOST_GPUS} GPUs, which can't be simulated")
    if len(models) > 60:
        raise UsageError(f"the nodes have {len(models)} GPU models; at most 60 can be simulated")
    return Nodes(
        names=tuple(node.name for node in nodes),
        gpus=tuple(len(node.gpus) for node in nodes),
        models=tuple(of_model),
        rest=tuple(rest),
        model_names=tuple(models),
        kinds=(*kinds, "read_iops"),
        bandwidth_mb_s_per_cpu=per_core,
        notes=tuple(notes),
    )


def _cpus(node: NodeProfile) -> int:
    """CPUs as Slurm counts them: hardware threads."""
    return node.cpu.cores * node.cpu.threads_per_core


def _capacity(node: NodeProfile, kind: str) -> int:
    """What a node has of a counted kind."""
    if kind == "cpu_milli":
        return _cpus(node) * 1000
    if kind == "memory_mib":
        return node.memory_mib or sum(numa.memory_mib or 0 for numa in node.numa_nodes)
    if kind == "bandwidth_mb_s":
        return int((node.memory_bandwidth_gb_s or 0) * 1000)
    return sum(drive.random_read_iops or 0 for drive in node.nvmes)
