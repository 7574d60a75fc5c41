"""CPUs of a machine as its kernel shows them: packages, cores, threads, last-level caches.

Siblings come from the kernel's masks, since ids are missing or repeat on some machines (s390,
virtual ones); where the masks contradict each other, the ids decide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.errors import CraterError
from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import Cache, Cpu
from crater_slurm.probe import files, processor

_BASE = "sys/devices/system/cpu"


@dataclass(frozen=True, slots=True)
class Topology:
    """CPUs that are online, in groups: one per package, one per core, ascending."""

    online: tuple[int, ...]
    packages: tuple[tuple[int, ...], ...]
    cores: tuple[tuple[int, ...], ...]
    package_ids: Mapping[int, int]


def online(root: Path) -> tuple[int, ...]:
    """CPUs that are online. Raises CraterError on a tree without any."""
    base = root / _BASE
    listed = files.cpulist(base / "online")
    present = files.numbered(base, "cpu")
    if not listed:  # kernels before 2.6.26
        listed = tuple(n for n in present if files.read(base / f"cpu{n}/online") != "0")
    # A captured tree may be trimmed; the kernel itself shows a folder for each CPU.
    found = tuple(n for n in listed if n in set(present)) if present else listed
    described = tuple(n for n in found if (base / f"cpu{n}/topology").is_dir())
    found = described or found
    if not found:
        raise CraterError(f"{base} lists no online CPU; is {root} the root of a Linux machine?")
    return found


def topology(root: Path) -> Topology:
    """Packages and cores. Raises CraterError on a tree without CPUs."""
    base = root / _BASE
    found = online(root)
    ids: dict[int, int] = {}
    core_ids: dict[int, tuple[object, ...]] = {}
    for cpu in found:
        folder = base / f"cpu{cpu}/topology"
        ids[cpu] = files.read_int(folder / "physical_package_id") or 0
        core = files.read_int(folder / "core_id")
        die = files.read_int(folder / "die_id")
        core_ids[cpu] = ("cpu", cpu) if core is None else (ids[cpu], die, core)
    cores = _siblings(base, found, ("core_cpus", "thread_siblings"))
    if cores and processor.has_compute_units(root):
        cores = {cpu: (*cores[cpu], core_ids[cpu]) for cpu in found}
    packages = _siblings(base, found, ("package_cpus", "core_siblings"))
    return Topology(found, _groups(found, packages or ids), _groups(found, cores or core_ids), ids)


def _siblings(
    base: Path, found: tuple[int, ...], names: tuple[str, str]
) -> dict[int, tuple[object, ...]]:
    """Each CPU's siblings by the masks of that name; none when the masks contradict each other."""
    known = set(found)
    masks: dict[int, tuple[object, ...]] = {}
    for cpu in found:
        folder = base / f"cpu{cpu}/topology"
        mask = None
        for name in names:
            mask = mask or files.cpus(folder, name, f"{name}_list")
        masks[cpu] = tuple(sorted(known.intersection(mask or ())))
    consistent = all(cpu in mask for cpu, mask in masks.items()) and all(
        masks[other] == mask for mask in set(masks.values()) for other in found if other in mask
    )
    return masks if consistent else {}


def _groups(found: tuple[int, ...], keys: Mapping[int, object]) -> tuple[tuple[int, ...], ...]:
    groups: dict[object, list[int]] = {}
    for cpu in found:
        groups.setdefault(keys[cpu], []).append(cpu)
    return tuple(tuple(group) for group in groups.values())


def l3_caches(root: Path, found: tuple[int, ...]) -> tuple[Cache, ...]:
    """Level 3 caches with their online CPUs; a set that cuts through an earlier one is no cache."""
    caches: dict[tuple[int, ...], Cache] = {}
    taken: set[int] = set()
    known = set(found)
    for cpu in found:
        base = root / _BASE / f"cpu{cpu}/cache"
        for index in files.numbered(base, "index"):
            folder = base / f"index{index}"
            if files.read(folder / "level") != "3" or files.read(folder / "type") == "Instruction":
                continue
            shared = files.cpus(folder, "shared_cpu_map", "shared_cpu_list")
            cpus = tuple(sorted(known.intersection(shared or ()))) or (cpu,)
            if cpu in cpus and not taken.intersection(cpus):
                size = re.match(r"([0-9]{1,9})K?$", files.read(folder / "size") or "")
                caches[cpus] = Cache(cpus=cpus, size_kib=int(size.group(1)) if size else None)
                taken |= set(cpus)
    return tuple(caches.values())


def cpu(root: Path, layout: Topology, notes: list[str]) -> Cpu:
    """The processors; adds a note where a shape of equal packages and cores does not fit."""
    sizes = {sum(core[0] in set(p) for core in layout.cores) for p in layout.packages}
    if len(sizes) > 1:
        notes.append(
            f"the packages have {min(sizes)} to {max(sizes)} cores online: the profile counts "
            f"{len(layout.cores) // len(layout.packages)} for each"
        )
    threads = {len(core) for core in layout.cores}
    if len(threads) > 1:
        odd = [core[0] for core in layout.cores if len(core) == min(threads)]
        notes.append(f"the cores of CPUs {format_cpulist(odd)} have fewer threads than the others")
    return Cpu(
        model=processor.model(root),
        arch=processor.arch(root),
        sockets=len(layout.packages),
        cores_per_socket=max(1, len(layout.cores) // len(layout.packages)),
        threads_per_core=max(1, len(layout.online) // len(layout.cores)),
        avx=processor.avx(root),
        l3_caches=l3_caches(root, layout.online),
    )
