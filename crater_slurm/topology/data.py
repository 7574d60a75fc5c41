"""The physical graph as plain data for JSON: nodes, edges, matrix, nearest pairs.

Unlike a drawing it leaves nothing out: every bridge is a node, and no equal things are merged.
The form is documented in docs/topology.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import NodeProfile, PciLink
from crater_slurm.topology.devices import Device, Kind, devices, numa_devices, of_kind
from crater_slurm.topology.graph import kernel_distance, matrix, nearest, nvlink_class, nvlink_gb_s
from crater_slurm.topology.words import below_maximum

Entry = dict[str, Any]


def graph(profile: NodeProfile) -> Entry:
    """Nodes, edges, matrix and nearest pairs of a node; unknown values are null."""
    found = devices(profile)
    everything = (*found, *numa_devices(profile))
    return {
        "name": profile.name,
        "nodes": _unique((*_places(profile), *(n for d in found for n in _pci_nodes(d)))),
        "edges": _unique((*_contains(profile), *_pci_edges(profile, found), *_nvlink_edges(found))),
        "matrix": {
            "devices": [device.id for device in everything],
            "classes": matrix(everything),
            "numa_distances": [
                [kernel_distance(profile, a, b) for b in everything] for a in everything
            ],
        },
        "nearest": [
            {"gpu": gpu.id, **{kind.value: _near(profile, gpu, kind) for kind in _PAIRED}}
            for gpu in of_kind(found, Kind.GPU)
        ],
    }


_PAIRED = (Kind.NIC, Kind.NVME)


def _near(profile: NodeProfile, gpu: Device, kind: Kind) -> list[Entry]:
    return [{"id": device.id, "class": how} for device, how in nearest(profile, gpu, kind)]


def _unique(entries: tuple[Entry, ...]) -> list[Entry]:
    """Each entry once: devices share the bridges above them."""
    return list({repr(entry): entry for entry in entries}.values())


def _places(profile: NodeProfile) -> Iterator[Entry]:
    yield {"id": "machine", "kind": "machine", "memory_mib": profile.memory_mib}
    for socket in sorted({n.socket for n in profile.numa_nodes if n.socket is not None}):
        yield {"id": f"package:{socket}", "kind": "package"}
    for i, node in enumerate(profile.numa_nodes):
        yield {
            "id": f"NUMA{node.id}",
            "kind": "numa",
            "memory_kind": node.kind.value if node.kind else None,
            "cpus": format_cpulist(node.cpus),
            "memory_mib": node.memory_mib,
            "memory_bandwidth_gb_s": node.memory_bandwidth_gb_s,
            "memory_bandwidth_method": profile.where_from(
                f"numa_nodes[{i}].memory_bandwidth_gb_s"
            ).method.value
            if node.memory_bandwidth_gb_s is not None
            else None,
        }
    for i, cache in enumerate(profile.cpu.l3_caches):
        cpus = format_cpulist(cache.cpus)
        yield {"id": f"L3:{i}", "kind": "l3", "cpus": cpus, "size_kib": cache.size_kib}


def _pci_nodes(device: Device) -> Iterator[Entry]:
    pci = device.pci
    if pci and pci.root:
        yield {"id": f"root:{pci.root}", "kind": "pci_root"}
    if pci:
        yield from ({"id": f"bridge:{b}", "kind": "bridge"} for b in pci.bridges)
    yield {
        "id": device.id,
        "kind": device.kind.value,
        "names": list(device.names),
        "model": device.model,
        "numa_node": device.numa_node,
        "pci_address": pci.address if pci else None,
    }


def _contains(profile: NodeProfile) -> Iterator[Entry]:
    """Containment: machine, package, NUMA node, L3. A cache that spans NUMA nodes has several."""
    for node in profile.numa_nodes:
        inside = "machine" if node.socket is None else f"package:{node.socket}"
        if node.socket is not None:
            yield {"from": "machine", "to": inside, "kind": "contains"}
        yield {"from": inside, "to": f"NUMA{node.id}", "kind": "contains"}
        for i, cache in enumerate(profile.cpu.l3_caches):
            if set(cache.cpus) & set(node.cpus):
                yield {"from": f"NUMA{node.id}", "to": f"L3:{i}", "kind": "contains"}


def _pci_edges(profile: NodeProfile, found: tuple[Device, ...]) -> Iterator[Entry]:
    """From the NUMA node down to the device; the last edge carries the device's link."""
    ids = {node.id for node in profile.numa_nodes}
    for device in found:
        pci = device.pci
        path = [f"NUMA{device.numa_node}"] if device.numa_node in ids else []
        if pci and pci.root:
            path.append(f"root:{pci.root}")
        path += [f"bridge:{b}" for b in pci.bridges] if pci else []
        for one, two in pairwise(path):
            kind = "local" if one.startswith("NUMA") else "pci"
            yield {"from": one, "to": two, "kind": kind}
        if not path:
            continue
        if path[-1].startswith("NUMA"):
            yield {"from": path[0], "to": device.id, "kind": "local"}
            continue
        yield {"from": path[-1], "to": device.id, "kind": "pci", **_link(device)}


def _link(device: Device) -> Entry:
    pci = device.pci
    if pci is None:
        return {}
    return {
        "link": _lanes(pci.link),
        "max_link": _lanes(pci.max_link),
        "below_maximum": below_maximum(pci.link, pci.max_link),
    }


def _lanes(link: PciLink | None) -> Entry | None:
    if link is None:
        return None
    return {
        "speed_gt_s": link.speed_gt_s,
        "width": link.width,
        "bandwidth_gb_s": round(link.bandwidth_gb_s, 3),
    }


def _nvlink_edges(found: tuple[Device, ...]) -> Iterator[Entry]:
    for a, b in combinations(of_kind(found, Kind.GPU), 2):
        if name := nvlink_class(a, b):
            yield {
                "from": a.id,
                "to": b.id,
                "kind": "nvlink",
                "class": name,
                "bandwidth_gb_s": nvlink_gb_s(a, b),
            }
