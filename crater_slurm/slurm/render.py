"""Node profiles as Slurm configuration: node lines, gres.conf and cgroup.conf.

What a profile says in NUMA nodes and drives becomes what Slurm counts and enforces: sockets,
GPUs with the cores beside them, and CountOnly gres for memory bandwidth, NVMe IOPS and cache.
It renders text and refuses to write files: whoever asks decides where the text goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Literal

import jinja2

from crater_slurm import paths
from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import Gpu, NodeProfile, NumaNode
from crater_slurm.slurm import hostlist

Version = tuple[int, int]
#: CountOnly gres that crater adds to a node; the settings' ``filter.consume`` may ask for fewer.
COUNT_ONLY = ("membw", "nviops", "nvme")


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes of one make: a host list and the profile they share.

    ``attributes`` are further words of their NodeName line, such as ``Port`` or ``Feature``.
    """

    names: str
    profile: NodeProfile
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layout:
    """A node's processors as Slurm is told: its sockets in Slurm's order.

    ``numa_as_socket``: the sockets are NUMA nodes, so slurmd must count alike
    (``SlurmdParameters=numa_node_as_socket``), or the node is drained as misconfigured.
    """

    sockets: int
    cores_per_socket: int
    threads_per_core: int
    numa_as_socket: bool
    socket_of_numa: Mapping[int, int]

    def cores(self, socket: int) -> str:
        """Logical core indexes of a socket, as gres.conf's ``Cores=`` wants them."""
        first = socket * self.cores_per_socket
        return format_cpulist(range(first, first + self.cores_per_socket))


def group(profiles: Iterable[NodeProfile]) -> list[NodeGroup]:
    """Groups of nodes that Slurm can't tell apart, so that a big cluster has few lines."""
    makes: dict[tuple[object, ...], list[NodeProfile]] = {}
    for profile in profiles:
        makes.setdefault(_slurm_facts(profile), []).append(profile)
    return [NodeGroup(hostlist.compress(p.name for p in same), same[0]) for same in makes.values()]


def _slurm_facts(profile: NodeProfile) -> tuple[object, ...]:
    return (_node_words(NodeGroup("", profile)), tuple(_gpu_lines("", profile, Path("/dev"))))


def layout(profile: NodeProfile) -> Layout:
    """Slurm's sockets for a node: NUMA nodes where a package holds several, else packages.

    Slurm binds GPUs to cores by whole sockets only, so NUMA nodes inside a package can be told
    apart only this way. Unequal NUMA nodes can't be Slurm sockets; then packages are used.
    """
    cpu = profile.cpu
    ordered = _logical_order(profile)
    sizes = {len(domain.cpus) for domain in ordered}
    if len(ordered) > cpu.sockets and len(sizes) == 1 and cpu.cores % len(ordered) == 0:
        places = {domain.id: i for i, domain in enumerate(ordered)}
        return Layout(len(ordered), cpu.cores // len(ordered), cpu.threads_per_core, True, places)
    packages = list(dict.fromkeys(d.socket for d in ordered))
    if len(ordered) == cpu.sockets:
        places = {domain.id: i for i, domain in enumerate(ordered)}
    elif None not in packages and len(packages) == cpu.sockets:
        places = {domain.id: packages.index(domain.socket) for domain in ordered}
    else:  # one NUMA node over several packages: every core is as near as another
        places = {}
    return Layout(cpu.sockets, cpu.cores_per_socket, cpu.threads_per_core, False, places)


def _logical_order(profile: NodeProfile) -> list[NumaNode]:
    """NUMA nodes as hwloc numbers cores: by package, each by its lowest CPU."""
    lowest: dict[int | None, int] = {}
    for domain in profile.cpu_domains:
        key = domain.socket
        lowest[key] = min(lowest.get(key, domain.cpus[0]), min(domain.cpus))
    return sorted(profile.cpu_domains, key=lambda d: (lowest[d.socket], min(d.cpus)))


def gpu_socket(gpu: Gpu, profile: NodeProfile, form: Layout) -> int | None:
    """Slurm socket whose cores are nearest to a GPU, or None when no socket is nearer."""
    if form.sockets < 2 or gpu.numa_node is None:
        return None
    if gpu.numa_node in form.socket_of_numa:
        return form.socket_of_numa[gpu.numa_node]
    # A NUMA node without CPUs, such as a GPU's own memory: its nearest one with CPUs counts.
    ids = [node.id for node in profile.numa_nodes]
    own = next((node for node in profile.numa_nodes if node.id == gpu.numa_node), None)
    if own is None or len(own.distances) != len(ids):
        return None
    near = [(own.distances[ids.index(n)], n) for n in form.socket_of_numa]
    return form.socket_of_numa[min(near)[1]] if near else None


def count_only(profile: NodeProfile) -> dict[str, int]:
    """CountOnly gres of a node: ``membw`` GB/s, ``nviops`` random reads/s, ``nvme`` GB of cache.

    Rounded down, because a job must never be promised what is not there; unknown is left out.
    """
    sizes = [drive.size_gb for drive in profile.nvmes if drive.size_gb]
    counts = {
        "membw": int(round(profile.memory_bandwidth_gb_s or 0, 6)),
        "nviops": sum(drive.random_read_iops or 0 for drive in profile.nvmes),
        "nvme": profile.cache_gb if profile.cache_gb is not None else sum(sizes),
    }
    return {name: count for name, count in counts.items() if count > 0}


def node_gres(profile: NodeProfile, consume: Sequence[str] = COUNT_ONLY) -> str:
    """``Gres=`` of a node's line in slurm.conf; ``""`` for a node that has none."""
    types: dict[str | None, int] = {}
    for gpu in profile.gpus:
        types[gpu.gres_type] = types.get(gpu.gres_type, 0) + 1
    words = [f"gpu:{name}:{count}" if name else f"gpu:{count}" for name, count in types.items()]
    # shard goes here once GPU memory slices are requested through it.
    words += [f"{name}:{count}" for name, count in count_only(profile).items() if name in consume]
    return ",".join(words)


def gres_types(groups: Iterable[NodeGroup], consume: Sequence[str] = COUNT_ONLY) -> list[str]:
    """``GresTypes=`` for these nodes; a gres that is missing there is refused by slurmctld."""
    used: set[str] = set()
    for one in groups:
        used.update(word.split(":")[0] for word in node_gres(one.profile, consume).split(","))
    return [name for name in ("gpu", *COUNT_ONLY) if name in used]


def _node_words(one: NodeGroup, consume: Sequence[str] = COUNT_ONLY) -> tuple[str, ...]:
    form = layout(one.profile)
    memory = one.profile.memory_mib or sum(n.memory_mib or 0 for n in one.profile.numa_nodes)
    words = {
        "NodeName": one.names,
        "Sockets": str(form.sockets),
        "CoresPerSocket": str(form.cores_per_socket),
        "ThreadsPerCore": str(form.threads_per_core),
        "RealMemory": str(memory or ""),
        "Gres": node_gres(one.profile, consume),
        **one.attributes,
    }
    return tuple(f"{key}={value}" for key, value in words.items() if value)


def _gpu_lines(names: str, profile: NodeProfile, devices: Path) -> list[str]:
    form = layout(profile)
    links = _links(profile)
    facts = [
        (gpu.gres_type, gpu_socket(gpu, profile, form), links.get(gpu.index))
        for gpu in profile.gpus
    ]
    lines = []
    for (kind, socket, link), same in groupby(
        zip(facts, profile.gpus, strict=True), key=lambda pair: pair[0]
    ):
        numbers = format_cpulist(gpu.index for _, gpu in same)
        bracketed = f"[{numbers}]" if not numbers.isdigit() else numbers
        words = {
            "NodeName": names,
            "Name": "gpu",
            "Type": kind,
            "File": f"{devices}/nvidia{bracketed}",
            "Cores": None if socket is None else form.cores(socket),
            "Links": link,
        }
        lines.append(_words(words))
    return lines


def _words(words: Mapping[str, str | None]) -> str:
    return " ".join(f"{key}={value}" for key, value in words.items() if value)


def _links(profile: NodeProfile) -> dict[int, str]:
    """``Links=`` by GPU index: how many times the weakest link each peer has, -1 for itself.

    Left out where every pair is linked alike: then there is nothing for Slurm to choose.
    """
    size = len(profile.gpus)
    widths = {g.index: {n.peer: n.bandwidth_gb_s or 1.0 for n in g.nvlinks} for g in profile.gpus}
    present = [width for row in widths.values() for width in row.values()]
    if not present or (len(present) == size * (size - 1) and len(set(present)) == 1):
        return {}
    unit = min(present)
    order = [gpu.index for gpu in profile.gpus]
    return {
        index: ",".join(
            "-1" if peer == index else str(round(row.get(peer, 0) / unit)) for peer in order
        )
        for index, row in widths.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConf:
    """Lines that crater adds to slurm.conf; ``settings`` are further ``Key=Value`` lines."""

    version: Version
    groups: Sequence[NodeGroup]
    consume: Sequence[str] = COUNT_ONLY
    slurmd_parameters: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    def render(self) -> str:
        """Text for slurm.conf (or a file that it includes)."""
        parameters = list(self.slurmd_parameters)
        if any(layout(one.profile).numa_as_socket for one in self.groups):
            parameters.append("numa_node_as_socket")
        return _template("slurm.conf.j2").render(
            version="{}.{:02}".format(*self.version),
            gres_types=gres_types(self.groups, self.consume),
            slurmd_parameters=list(dict.fromkeys(parameters)),
            settings=self.settings,
            nodes=[" ".join(_node_words(one, self.consume)) for one in self.groups],
        )


def gres_conf(
    groups: Sequence[NodeGroup],
    consume: Sequence[str] = COUNT_ONLY,
    devices: Path = Path("/dev"),
    *,
    everywhere: bool = False,
) -> str:
    """gres.conf of these nodes; ``devices`` is the folder of the GPUs' device files.

    Written out rather than detected: detection needs a vendor's library in the Slurm build, and
    drains a node whose lines differ from what it finds. ``everywhere`` leaves the nodes' names
    out, for a cluster of one make: slurmctld matches every name with every line otherwise.
    """
    lines = []
    for one in groups:
        names = "" if everywhere else one.names
        lines += _gpu_lines(names, one.profile, devices)
        for name, count in count_only(one.profile).items():
            if name in consume:
                words = {"NodeName": names, "Name": name, "Count": str(count)}
                lines.append(_words(words | {"Flags": "CountOnly"}))
    return _template("gres.conf.j2").render(lines=lines)


def cgroup_conf(
    version: Version,
    hierarchy: Literal["autodetect", "v1", "v2", "none"] = "autodetect",
    *,
    systemd: bool = True,
    memory: bool = True,
) -> str:
    """cgroup.conf for a Slurm version.

    ``hierarchy`` none means that nothing is constrained; ``systemd`` False is for machines that
    have none (v2 only); ``memory`` False leaves memory limits to the kernel.
    """
    return _template("cgroup.conf.j2").render(
        version=version, hierarchy=hierarchy, systemd=systemd, memory=memory
    )


def named(profile: NodeProfile, name: str) -> NodeProfile:
    """The same hardware under another node's name."""
    return replace(profile, name=name)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(  # noqa: S701 - configuration files, not HTML
        loader=jinja2.FileSystemLoader(paths.share("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _template(name: str) -> jinja2.Template:
    return _environment().get_template(name)


def template(file: str, /, **values: object) -> str:
    """Any template of the installation, rendered; a variable that is missing is an error."""
    return _template(file).render(**values)
