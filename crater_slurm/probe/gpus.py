"""The GPUs of a machine, NVIDIA's and AMD's, by whatever still tells of them.

NVML is asked first, then nvidia-smi; what the kernel shows of PCI devices and of NVIDIA's driver
fills the rest, and is all there is of a captured machine. A GPU whose driver doesn't work stays
in the list, so that the others keep their places, and is told in the notes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from crater_slurm import catalogue
from crater_slurm.model.profile import Gpu, NvLink, PciDevice, PciKind, Software
from crater_slurm.probe import files, nvml
from crater_slurm.probe.tools import amd_smi, nvidia_smi
from crater_slurm.probe.tools.values import Card, Report, known, whole

_NVIDIA, _AMD = "10de", "1002"
_LIVE = Path("/")
#: Class of a VGA controller: the display of an AMD processor is one, its accelerators aren't.
_VGA = "0x0300"
_DRIVERS = {"nvidia", "amdgpu"}
_VERSION = re.compile(r"NVRM version:.*?\s(\d{3,4}(?:\.\d{1,4}){1,3})\s")


def read(
    root: Path, pci_devices: tuple[PciDevice, ...], notes: list[str]
) -> tuple[tuple[Gpu, ...], Software]:
    """GPUs by PCI address, and the versions of driver and CUDA (the kernel's is left unknown).

    ``pci_devices`` are the machine's; what could not be read is told in ``notes``. The order is
    Slurm's for ``File=/dev/nvidia[0-N]`` where the driver numbers its files so.
    """
    devices = {d.address: d for d in pci_devices if d.kind is PciKind.GPU}
    nvidia = _nvidia(root, [d for d in devices.values() if _ids(root, d)[0] == _NVIDIA], notes)
    amd = _amd(root, [d for d in devices.values() if _ids(root, d)[0] == _AMD], notes)
    cards = sorted((*nvidia.cards, *amd.cards), key=lambda card: _place(card.address))
    _tell_minors(cards, notes)
    places = {card.address: place for place, card in enumerate(cards)}
    found = tuple(_gpu(card, devices.get(card.address), places) for card in cards)
    return found, Software(gpu_driver=nvidia.driver or amd.driver, cuda=nvidia.cuda)


def _nvidia(root: Path, devices: Sequence[PciDevice], notes: list[str]) -> Report:
    shown = [_kernel_card(root, device) for device in _usable(root, devices, notes)]
    driver = _VERSION.search(files.read(root / "proc/driver/nvidia/version") or "")
    report: Report | None = None
    if root == _LIVE and (devices or driver):
        reasons: list[str] = []
        report = nvml.read(reasons) or nvidia_smi.read(reasons)
        told = {card.address for card in report.cards} if report else set()
        silent = [card.address for card in shown if card.address not in told]
        notes.extend([_no_driver(silent, reasons)] if silent else reasons)
    report = report or Report()
    return Report(
        cards=_merge(report.cards, shown),
        driver=report.driver or (driver.group(1) if driver else None),
        cuda=report.cuda,
    )


def _amd(root: Path, devices: Sequence[PciDevice], notes: list[str]) -> Report:
    usable = _usable(root, devices, notes)
    report = amd_smi.read(notes) if root == _LIVE and usable else None
    report = report or Report()
    told = {card.address for card in report.cards}
    shown = []
    for device in usable:
        kind = files.read(_folder(root, device.address) / "class") or ""
        if device.address in told or not kind.startswith(_VGA):
            shown.append(_kernel_card(root, device))
    return Report(cards=_merge(report.cards, shown), driver=report.driver)


def _usable(root: Path, devices: Iterable[PciDevice], notes: list[str]) -> list[PciDevice]:
    """Devices that jobs could use: not lent to a virtual machine, not excluded by the admin."""
    usable, other = [], {}
    for device in devices:
        link = _folder(root, device.address) / "driver"
        driver = link.readlink().name if link.is_symlink() else None
        if _information(root, device.address).get("GPU Excluded") == "Yes":
            other[device.address] = "excluded in the driver's settings"
        elif driver is None or driver in _DRIVERS:
            usable.append(device)
        else:
            other[device.address] = f"bound to {driver}"
    notes.extend(f"the GPU at {address} is left out: {why}" for address, why in other.items())
    return usable


def _kernel_card(root: Path, device: PciDevice) -> Card:
    """A GPU as PCI and, for NVIDIA's, the driver's files in /proc show it."""
    told = _information(root, device.address)
    uuid = known(told.get("GPU UUID"))
    ids = ":".join(_ids(root, device))
    model = catalogue.by_pci_id(ids)
    return Card(
        address=device.address,
        model=known(told.get("Model")) or (model.id if model else None) or device.model or ids,
        # Question marks until something has used the GPU for the first time.
        uuid=uuid if uuid and "?" not in uuid else None,
        minor=whole(told.get("Device Minor")),
    )


def _merge(told: Iterable[Card], shown: Iterable[Card]) -> tuple[Card, ...]:
    """Cards of both, each with what a tool told, or else with what the kernel shows."""
    cards = {card.address: card for card in shown}
    for card in told:
        below = cards.get(card.address, card)
        filled = {
            entry.name: getattr(below, entry.name)
            for entry in dataclasses.fields(Card)
            if getattr(card, entry.name) is None
        }
        cards[card.address] = dataclasses.replace(card, **filled)
    return tuple(cards.values())


def _gpu(card: Card, device: PciDevice | None, places: dict[str, int]) -> Gpu:
    name = card.model or "unknown"
    model = catalogue.lookup(name)
    node = device.numa_node if device is not None else None
    # On Grace a GPU's own memory is a NUMA node too, without CPUs: it is no place for a job.
    if node is None or node == card.memory_node:
        node = card.numa_node
    return Gpu(
        index=places[card.address],
        model=catalogue.model_id(name),
        # Users name GPUs by the first word of the id (a100), as most sites' gres types do.
        gres_type=model.id.split("-")[0] if model else None,
        uuid=card.uuid,
        pci_bus_id=card.address,
        numa_node=node,
        memory_mib=card.memory_mib,
        compute_capability=card.compute_capability,
        nvlinks=tuple(
            NvLink(peer=places[peer.address], bandwidth_gb_s=peer.bandwidth_gb_s)
            for peer in card.peers
            if peer.address in places
        ),
        mig_capable=None if card.mig is None else True,
        mig_instances=card.mig_instances,
    )


def _tell_minors(cards: Iterable[Card], notes: list[str]) -> None:
    minors = [card.minor for card in cards if card.minor is not None]
    if minors != sorted(minors):
        notes.append(
            f"by PCI address the GPUs are /dev/nvidia{', '.join(map(str, minors))}; gres.conf must "
            "list the files in this order, or Slurm's GPU numbers are others than crater's"
        )


def _no_driver(addresses: Sequence[str], reasons: Sequence[str]) -> str:
    many = f"{len(addresses)} NVIDIA GPUs at {', '.join(addresses)} have"
    one = f"the NVIDIA GPU at {addresses[0]} has"
    why = "; ".join(reasons) or "the driver does not list it"
    return f"{one if len(addresses) == 1 else many} no working driver: {why}"


def _information(root: Path, address: str) -> dict[str, str]:
    text = files.read(root / "proc/driver/nvidia/gpus" / address / "information") or ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _ids(root: Path, device: PciDevice) -> tuple[str, str]:
    """Vendor and device in four hex digits each; empty where the kernel doesn't say."""
    folder = _folder(root, device.address)
    vendor, model = (files.read(folder / name) or "" for name in ("vendor", "device"))
    return vendor.removeprefix("0x").lower(), model.removeprefix("0x").lower()


def _folder(root: Path, address: str) -> Path:
    return root / "sys/bus/pci/devices" / address


def _place(address: str) -> tuple[int, str]:
    domain, _, rest = address.partition(":")
    return int(domain, 16), rest
