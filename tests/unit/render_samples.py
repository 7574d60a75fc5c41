"""Small profiles for the tests of rendering."""

from __future__ import annotations

from typing import Any

from crater_slurm.model.cpuset import parse_cpulist
from crater_slurm.model.profile import Cpu, Gpu, NodeProfile, NumaNode

TWO = Cpu(sockets=2, cores_per_socket=4)


def numa(number: int, cpus: str, socket: int | None = None, **more: Any) -> NumaNode:
    return NumaNode(id=number, cpus=parse_cpulist(cpus), socket=socket, **more)


def profile(*nodes: NumaNode, cpu: Cpu, gpus: tuple[Gpu, ...] = (), **more: Any) -> NodeProfile:
    return NodeProfile(**{"name": "n1", "cpu": cpu, "numa_nodes": nodes, "gpus": gpus, **more})


def gpu(index: int, numa_node: int | None = None, **more: Any) -> Gpu:
    return Gpu(
        **{"index": index, "model": "m", "gres_type": "a100", "numa_node": numa_node, **more}
    )
