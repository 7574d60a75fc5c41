"""Small profiles for the tests of rendering."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

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


@st.composite
def machines(draw: st.DrawFn) -> NodeProfile:
    """Packages of equal NUMA nodes, CPUs numbered in a random way, GPUs anywhere."""
    packages, parts, cores, threads = (draw(st.integers(1, n)) for n in (4, 4, 6, 2))
    count = packages * parts * cores * threads
    numbers = draw(st.permutations(range(count))) if draw(st.booleans()) else list(range(count))
    size = cores * threads
    nodes = [
        numa(2 * i, ",".join(map(str, numbers[size * i : size * (i + 1)])), i // parts)
        for i in range(packages * parts)
    ]
    places = draw(st.lists(st.sampled_from([None, *(n.id for n in nodes)]), max_size=8))
    cpu = Cpu(sockets=packages, cores_per_socket=parts * cores, threads_per_core=threads)
    gpus = tuple(gpu(i, place) for i, place in enumerate(places))
    return profile(*nodes, cpu=cpu, gpus=gpus)
