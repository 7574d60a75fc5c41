"""GPUs as ``nvidia-smi -q`` prints them: indented names and values, which name the sections too.

It is the form that admins send along with a question, so a saved one can be read like the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import PciLink
from crater_slurm.probe.tools.values import (
    Card,
    Report,
    known,
    pci_address,
    refuse_repeats,
    whole,
)

_WHERE = "nvidia-smi -q"
_GPU = re.compile(r"GPU ([0-9A-Fa-f]{1,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*")
_STEP = 4
#: GT/s of one lane by PCI Express generation.
GENERATIONS_GT_S = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class MigDevice:
    """A MIG instance as ``-q`` tells it: no profile name, but SMs and memory."""

    index: int
    gpu_instance: int | None = None
    compute_instance: int | None = None
    sm_count: int | None = None
    memory_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueriedGpu:
    """One GPU of ``nvidia-smi -q``; ``max_link`` is what GPU and slot can do at most."""

    card: Card
    max_link: PciLink | None = None
    c2c: bool | None = None
    mig_devices: tuple[MigDevice, ...] = ()


@dataclass(slots=True)
class _Section:
    """Values and sections below one line; a name may come more than once (MIG Device)."""

    values: dict[str, str] = field(default_factory=dict)
    sections: list[tuple[str, _Section]] = field(default_factory=list)

    def get(self, *path: str) -> str | None:
        """The value at a path of names; None where it is missing or unknown."""
        section = self
        for name in path[:-1]:
            below = next((inner for title, inner in section.sections if title == name), None)
            if below is None:
                return None
            section = below
        return known(section.values.get(path[-1]))

    def all(self, name: str) -> Iterator[_Section]:
        return (inner for title, inner in self.sections if title == name)


def parse(text: str) -> tuple[Report, tuple[QueriedGpu, ...]]:
    """The machine's report, and what only ``-q`` tells of each GPU.

    Raises CraterError when it isn't such output, is cut off, or repeats a bus id or UUID.
    """
    if "NVSMI LOG" not in text:
        first = text.strip().splitlines()[:1]
        raise CraterError(f"{_WHERE}: {first[0][:200] if first else 'nothing was printed'}")
    root = _tree(text)
    gpus = tuple(
        _gpu(match.group(1), section)
        for title, section in root.sections
        if (match := _GPU.fullmatch(title))
    )
    attached = whole(root.get("Attached GPUs"))
    if attached != len(gpus):
        raise CraterError(
            f"{_WHERE}: {'no number of' if attached is None else attached} attached GPUs, and "
            f"{len(gpus)} are described; the output is cut off"
        )
    refuse_repeats((gpu.card.address for gpu in gpus), "bus id", _WHERE)
    refuse_repeats((gpu.card.uuid for gpu in gpus), "UUID", _WHERE)
    # Since driver 610 the old names carry a remark in brackets, and new names the value.
    driver = root.get("KMD Version") or root.get("Driver Version")
    cuda = root.get("CUDA UMD Version") or root.get("CUDA Version")
    return Report(cards=tuple(gpu.card for gpu in gpus), driver=driver, cuda=cuda), gpus


def _tree(text: str) -> _Section:
    root = _Section()
    open_sections = [root]
    for line in text.splitlines():
        if not line.strip() or line.startswith("="):
            continue
        depth = (len(line) - len(line.lstrip(" "))) // _STEP
        del open_sections[depth + 1 :]
        name, colon, value = line.strip().partition(" : ")
        title = name.strip()
        if colon:
            # Values have sections below them as well: HW Slowdown has its two causes.
            open_sections[-1].values.setdefault(title, value.strip())
        else:
            section = _Section()
            open_sections[-1].sections.append((title, section))
            open_sections.append(section)
    return root


def _gpu(bus: str, section: _Section) -> QueriedGpu:
    mig = {"Enabled": True, "Disabled": False}.get(section.get("MIG Mode", "Current") or "")
    generation = whole(section.get("PCI", "GPU Link Info", "PCIe Generation", "Max"))
    width = whole(section.get("PCI", "GPU Link Info", "Link Width", "Max"))
    speed_gt_s = GENERATIONS_GT_S.get(generation or 0)
    card = Card(
        address=pci_address(bus),
        model=section.get("Product Name"),
        uuid=section.get("GPU UUID"),
        minor=whole(section.get("Minor Number")),
        memory_mib=whole(section.get("FB Memory Usage", "Total")),
        mig=mig,
    )
    return QueriedGpu(
        card=card,
        max_link=PciLink(speed_gt_s=speed_gt_s, width=width) if speed_gt_s and width else None,
        c2c={"Enabled": True, "Disabled": False}.get(section.get("GPU C2C Mode") or ""),
        mig_devices=tuple(
            _mig_device(number, device) for number, device in enumerate(section.all("MIG Device"))
        ),
    )


def _mig_device(number: int, section: _Section) -> MigDevice:
    index = whole(section.get("Index"))
    return MigDevice(
        index=number if index is None else index,
        gpu_instance=whole(section.get("GPU Instance ID")),
        compute_instance=whole(section.get("Compute Instance ID")),
        sm_count=whole(section.get("Device Attributes", "Shared", "Multiprocessor count")),
        memory_mib=whole(section.get("Shared FB Memory Usage", "Total"))
        or whole(section.get("FB Memory Usage", "Total")),
    )
