"""A node's processors as Slurm counts them: sockets, and the sockets nearest to each GPU.

Slurm binds a GPU to whole sockets only. Where a GPU is near a part of a package, slurmd must be
told to take NUMA nodes or L3 caches for sockets; this says which, and refuses to guess: where the
parts are unequal or unknown, packages are used and no GPU is near anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import Gpu, NodeProfile, NumaNode

Cpus = frozenset[int]


class SocketUnit(StrEnum):
    """What slurmd takes for a socket."""

    PACKAGE = "package"
    NUMA = "NUMA node"
    L3 = "L3 cache"

    @property
    def parameter(self) -> str | None:
        """The word of SlurmdParameters that makes slurmd count so; 22.05 to 26.05 have both."""
        return {"NUMA node": "numa_node_as_socket", "L3 cache": "l3cache_as_socket"}.get(self)


@dataclass(frozen=True, slots=True)
class Layout:
    """A node's sockets in Slurm's order; ``cpus`` is empty where their CPUs aren't known."""

    unit: SocketUnit
    sockets: int
    cores_per_socket: int
    threads_per_core: int
    cpus: tuple[Cpus, ...] = ()

    def cores(self, sockets: Iterable[int]) -> str:
        """Logical core indexes of sockets, as gres.conf's ``Cores=`` wants them."""
        size = self.cores_per_socket
        return format_cpulist(c for s in sockets for c in range(s * size, (s + 1) * size))


def layout(profile: NodeProfile, unit: SocketUnit | None = None) -> Layout:
    """Slurm's sockets for a node; ``unit`` is what slurmd counts, None for what it should."""
    unit = unit or wanted(profile)
    return _layouts(profile, unit) or _packages(profile)


def wanted(profile: NodeProfile) -> SocketUnit:
    """The coarsest unit that tells apart what is near from what is far on this node."""
    base = _packages(profile)
    numa = _numa(profile)
    if numa and numa.sockets > base.sockets:
        base = numa
    near = [gpu_cpus(gpu, profile) for gpu in profile.gpus]
    cut = any(cpus and any(cpus < socket for socket in base.cpus) for cpus in near)
    l3 = _l3(profile) if cut else None
    if l3 and l3.sockets > base.sockets and any(_is_union(cpus, l3.cpus) for cpus in near):
        return SocketUnit.L3
    return base.unit


def settle(profiles: Sequence[NodeProfile]) -> SocketUnit | None:
    """The unit for a whole cluster, since SlurmdParameters holds for all of it.

    None when there is none: two units are needed, or the one that some nodes need would make
    slurmd count others wrongly.
    """
    units = {wanted(profile) for profile in profiles} - {SocketUnit.PACKAGE}
    if len(units) > 1:
        return None
    for unit in units:
        return unit if all(_layouts(profile, unit) for profile in profiles) else None
    return SocketUnit.PACKAGE


def gpu_sockets(gpu: Gpu, profile: NodeProfile, form: Layout) -> tuple[int, ...]:
    """Slurm's sockets nearest to a GPU; none when no socket is nearer than another."""
    near = gpu_cpus(gpu, profile)
    found = tuple(i for i, cpus in enumerate(form.cpus) if cpus & near)
    return found if len(found) < form.sockets else ()


def gpu_cpus(gpu: Gpu, profile: NodeProfile) -> Cpus:
    """The CPUs nearest to a GPU, as the kernel numbers them; empty when unknown.

    Those of its NUMA node, or the fewer that the PCI tree names: an L3 cache's.
    """
    node = _nearest(gpu.numa_node, profile)
    whole = frozenset(node.cpus) if node else frozenset[int]()
    device = next((d for d in profile.pci_devices if d.address == gpu.pci_bus_id), None)
    online = frozenset(cpu for n in profile.cpu_domains for cpu in n.cpus)
    local = frozenset(device.local_cpus) & online if device else frozenset[int]()
    if not node and local < online:
        return local
    return local if local and local < whole else whole


def _nearest(number: int | None, profile: NodeProfile) -> NumaNode | None:
    """A NUMA node, or for one without CPUs (a GPU's own memory) the nearest that has some."""
    ids = [node.id for node in profile.numa_nodes]
    own = next((node for node in profile.numa_nodes if node.id == number), None)
    if own is None or own.cpus:
        return own
    if len(own.distances) != len(ids):
        return None
    near = [(own.distances[ids.index(n.id)], n.id, n) for n in profile.cpu_domains]
    return min(near, key=lambda pair: pair[:2])[2] if near else None


def _layouts(profile: NodeProfile, unit: SocketUnit) -> Layout | None:
    make = {SocketUnit.PACKAGE: _packages, SocketUnit.NUMA: _numa, SocketUnit.L3: _l3}
    return make[unit](profile)


def _packages(profile: NodeProfile) -> Layout:
    cpu = profile.cpu
    ordered = _logical_order(profile)
    packages = list(dict.fromkeys(domain.socket for domain in ordered))
    cpus: tuple[Cpus, ...] = ()
    if None not in packages and len(packages) == cpu.sockets:
        cpus = tuple(
            frozenset(c for d in ordered if d.socket == package for c in d.cpus)
            for package in packages
        )
    elif len(ordered) == cpu.sockets:
        cpus = tuple(frozenset(domain.cpus) for domain in ordered)
    # Otherwise a NUMA node lies over several packages, and every core is as near as another.
    even = len({len(package) for package in cpus}) == 1
    return Layout(
        SocketUnit.PACKAGE,
        cpu.sockets,
        cpu.cores_per_socket,
        cpu.threads_per_core,
        cpus if even else (),
    )


def _numa(profile: NodeProfile) -> Layout | None:
    return _parts(profile, SocketUnit.NUMA, [frozenset(d.cpus) for d in _logical_order(profile)])


def _l3(profile: NodeProfile) -> Layout | None:
    online = [cpu for node in profile.cpu_domains for cpu in node.cpus]
    caches = [frozenset(cache.cpus) for cache in profile.cpu.l3_caches]
    if sorted(cpu for cache in caches for cpu in cache) != sorted(online):
        return None
    domains = _logical_order(profile)

    def place(cache: Cpus) -> tuple[int, int]:
        return next(i for i, d in enumerate(domains) if cache & set(d.cpus)), min(cache)

    return _parts(profile, SocketUnit.L3, sorted(caches, key=place))


def _parts(profile: NodeProfile, unit: SocketUnit, parts: Sequence[Cpus]) -> Layout | None:
    """Sockets of these CPUs; None where they are unequal, which Slurm's sockets can't be."""
    cpu = profile.cpu
    if len({len(part) for part in parts}) != 1 or cpu.cores % len(parts):
        return None
    return Layout(unit, len(parts), cpu.cores // len(parts), cpu.threads_per_core, tuple(parts))


def _logical_order(profile: NodeProfile) -> list[NumaNode]:
    """NUMA nodes as hwloc numbers cores: by package, each by its lowest CPU."""
    lowest: dict[int | None, int] = {}
    for domain in profile.cpu_domains:
        lowest[domain.socket] = min(lowest.get(domain.socket, min(domain.cpus)), min(domain.cpus))
    return sorted(profile.cpu_domains, key=lambda d: (lowest[d.socket], min(d.cpus)))


def _is_union(cpus: Cpus, parts: Sequence[Cpus]) -> bool:
    """Whether the CPUs are some of the parts, none of them cut."""
    return bool(cpus) and all(part <= cpus or not part & cpus for part in parts)
