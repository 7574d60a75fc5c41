"""What changed on a node, as events: a module gone, a GPU lost, a drive slower than it was.

Parts are matched by what they are (UUID, serial number), not by their place, so that a lost GPU is
one event and not a change of all behind it. Small differences that every boot brings are none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from crater_slurm.model import drives
from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import Gpu, Method, NodeProfile, Nvme, PciKind
from crater_slurm.model.units import format_mib
from crater_slurm.store.diff import known, show_value
from crater_slurm.store.merge import MEMORY_TOLERANCE, same_parts
from crater_slurm.store.records import Event

#: A measurement repeats to within this much on a quiet node; more is a change.
MEASURED_TOLERANCE = 0.1
#: A drive that lost this share of what was measured before is told as slower.
SLOWER = 0.3
_WEAR_STEP = 10

_MEASURED = {
    "memory_bandwidth_gb_s": True,
    "random_read_iops": True,
    "random_write_iops": True,
    "sequential_write_mb_s": True,
    "iops_stability_ratio": True,
    "read_latency_us": False,
}
"""Measured fields, and whether more of it is better."""
_GPU_FIELDS = ("model", "memory_mib", "numa_node", "mig_capable", "mig_instances", "nvlinks")
_NVME_FIELDS = ("model", "firmware", "size_gb", "numa_node")


def drift(old: NodeProfile | None, new: NodeProfile, now: float) -> list[Event]:
    """Events of a node whose profile was ``old`` and is ``new``; ``now`` is seconds since 1970."""

    def event(kind: str, message: str, path: str, before: object, after: object) -> Event:
        return Event(
            node=new.name,
            time=now,
            kind=kind,
            message=message,
            path=path,
            old=_shown(path, before),
            new=_shown(path, after),
        )

    if old is None:
        first = Event(node=new.name, time=now, kind="node_new", message="First profile.")
        return [first, *(event(*entry) for entry in _steadiness(new, new, ()))]
    found = (*_machine(old, new), *_memory(old, new), *_devices(old, new), *_values(old, new))
    return [
        event(*entry) for entry in (*found, *_steadiness(old, new, same_parts(old, new)["nvmes"]))
    ]


Change = tuple[str, str, str, object, object]


def _shown(path: str, value: object) -> str | None:
    return show_value(path, value) if known(value) else None


def _machine(old: NodeProfile, new: NodeProfile) -> Iterator[Change]:
    for name in ("model", "sockets", "cores_per_socket", "threads_per_core", "avx"):
        before, after = getattr(old.cpu, name), getattr(new.cpu, name)
        if known(before) and before != after:
            yield "cpu_changed", f"The CPU's {name} changed.", f"cpu.{name}", before, after
    for name in ("kernel", "gpu_driver", "cuda"):
        before, after = getattr(old.software, name), getattr(new.software, name)
        if known(before) and before != after:
            yield "software_changed", f"{name} changed.", f"software.{name}", before, after


def _memory(old: NodeProfile, new: NodeProfile) -> Iterator[Change]:
    lost, came = _lost_and_came(
        Counter((d.slot, d.size_mib) for d in old.dimms),
        Counter((d.slot, d.size_mib) for d in new.dimms),
    )
    if new.dimms:  # a reader that may not ask dmidecode tells of none
        for slot, size in lost:
            yield "dimm_lost", f"The memory module in {slot} is gone.", "dimms", size, None
    if old.dimms:
        for slot, size in came:
            yield "dimm_new", f"There is a new memory module in {slot}.", "dimms", None, size
    before_nodes = {node.id: node for node in old.numa_nodes}
    ids = {node.id for node in new.numa_nodes}
    for i, node in enumerate(old.numa_nodes):
        if node.id not in ids:
            cpus = f"CPUs {format_cpulist(node.cpus)}" if node.cpus else "no CPUs"
            message = f"NUMA node {node.id} ({cpus}) is gone."
            yield "numa_changed", message, f"numa_nodes[{i}]", node.memory_mib, None
    for i, node in enumerate(new.numa_nodes):
        was = before_nodes.get(node.id)
        path = f"numa_nodes[{i}]"
        if was is None:
            yield "numa_changed", f"NUMA node {node.id} is new.", path, None, node.memory_mib
        elif was.cpus != node.cpus:
            message = f"NUMA node {node.id} has other CPUs."
            yield "numa_changed", message, f"{path}.cpus", was.cpus, node.cpus
        elif was.memory_mib and node.memory_mib:
            off = node.memory_mib / was.memory_mib - 1
            if abs(off) > MEMORY_TOLERANCE:
                message = (
                    f"NUMA node {node.id} has {format_mib(abs(node.memory_mib - was.memory_mib))} "
                    f"{'less' if off < 0 else 'more'} memory than before; its bandwidth has to be "
                    "measured again (crater-probe bench memory)."
                )
                path = f"{path}.memory_mib"
                yield "memory_changed", message, path, was.memory_mib, node.memory_mib


def _devices(old: NodeProfile, new: NodeProfile) -> Iterator[Change]:
    same = same_parts(old, new)
    kinds: tuple[tuple[str, str, tuple[str, ...], Callable[[Any], str]], ...] = (
        ("gpu", "gpus", _GPU_FIELDS, _gpu_name),
        ("nvme", "nvmes", _NVME_FIELDS, _nvme_name),
    )
    for kind, name, fields, named in kinds:
        before, after = getattr(old, name), getattr(new, name)
        pairs = same[name]
        for i in sorted(set(range(len(before))) - {old_place for old_place, _ in pairs}):
            yield (
                f"{kind}_lost",
                f"{named(before[i])} is gone.",
                f"{name}[{i}]",
                before[i].model,
                None,
            )
        for i in sorted(set(range(len(after))) - {new_place for _, new_place in pairs}):
            yield f"{kind}_new", f"{named(after[i])} is new.", f"{name}[{i}]", None, after[i].model
        for old_place, i in pairs:
            yield from _fields(kind, before[old_place], after[i], f"{name}[{i}]", fields, named)
    nics = [Counter(d.address for d in p.pci_devices if d.kind is PciKind.NIC) for p in (old, new)]
    if old.pci_devices and new.pci_devices:
        lost, came = _lost_and_came(*nics)
        for address in lost:
            yield "nic_lost", f"The NIC at {address} is gone.", "pci_devices", address, None
        for address in came:
            yield "nic_new", f"There is a new NIC at {address}.", "pci_devices", None, address


def _fields(
    kind: str,
    before: Any,
    after: Any,
    path: str,
    fields: tuple[str, ...],
    named: Callable[[Any], str],
) -> Iterator[Change]:
    for field in fields:
        was, now = getattr(before, field), getattr(after, field)
        if known(was) and was != now:
            yield (
                f"{kind}_changed",
                f"{field} of {named(after)} changed.",
                f"{path}.{field}",
                was,
                now,
            )
    if isinstance(after, Nvme) and before.wear_percent is not None:
        step = (after.wear_percent or 0) // _WEAR_STEP
        if step > before.wear_percent // _WEAR_STEP:
            message = f"{named(after)} has used {after.wear_percent} % of its rated endurance."
            yield (
                "nvme_wear",
                message,
                f"{path}.wear_percent",
                before.wear_percent,
                after.wear_percent,
            )


def _values(old: NodeProfile, new: NodeProfile) -> Iterator[Change]:
    """Measurements of parts that are the same, repeated with another result."""
    pairs = [("nvmes", *pair) for pair in same_parts(old, new)["nvmes"]]
    ids = {node.id: i for i, node in enumerate(old.numa_nodes)}
    pairs += [("numa_nodes", ids[n.id], i) for i, n in enumerate(new.numa_nodes) if n.id in ids]
    for name, before_place, place in pairs:
        before, after = getattr(old, name)[before_place], getattr(new, name)[place]
        label = _nvme_name(after) if name == "nvmes" else f"NUMA node {after.id}"
        for field, more_is_better in _MEASURED.items():
            was, now = getattr(before, field, None), getattr(after, field, None)
            path = f"{name}[{place}].{field}"
            measured = new.where_from(path).method is Method.MEASURED
            if not was or not now or not measured or abs(now / was - 1) <= MEASURED_TOLERANCE:
                continue
            loss = 1 - (now / was if more_is_better else was / now)
            kind = "slower" if loss >= SLOWER else "measured"
            message = f"{field} of {label} is {now / was - 1:+.0%} against before."
            yield f"{name.rstrip('s')}_{kind}", message, path, was, now


def _steadiness(
    old: NodeProfile, new: NodeProfile, pairs: Sequence[tuple[int, int]]
) -> Iterator[Change]:
    """Drives that became unsteady: their slowest second is far below their fastest."""
    places = {now: before for before, now in pairs}
    for i, drive in enumerate(new.nvmes):
        was = old.nvmes[places[i]].iops_stability_ratio if i in places else None
        ratio = drive.iops_stability_ratio
        if drives.steadiness(ratio) == "unsteady" != drives.steadiness(was):
            message = (
                f"The slowest second of {_nvme_name(drive)} has {ratio:.2f} of the IOPS of its "
                f"fastest; below {drives.UNSTEADY_RATIO} it counts with weight "
                f"{drives.UNSTEADY_WEIGHT}."
            )
            yield "nvme_unsteady", message, f"nvmes[{i}].iops_stability_ratio", was, ratio


def _lost_and_came(old: Counter[Any], new: Counter[Any]) -> tuple[list[Any], list[Any]]:
    return sorted(old - new), sorted(new - old)


def _gpu_name(gpu: Gpu) -> str:
    where = f" at {gpu.pci_bus_id}" if gpu.pci_bus_id else ""
    return f"GPU {gpu.index} ({gpu.model}{where})"


def _nvme_name(drive: Nvme) -> str:
    return f"{drive.name} ({drive.model or 'unknown model'})"
