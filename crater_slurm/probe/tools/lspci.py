"""PCI devices as ``lspci -vv`` prints them: class, name, NUMA node, link and driver.

The kernel's own files tell the same and more; this is for saved output of other machines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import PciLink
from crater_slurm.probe.tools.run import run
from crater_slurm.probe.tools.values import pci_address, whole

_DEVICE = re.compile(
    r"((?:[0-9a-f]{1,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ([^:]{1,80}): (.{1,300})"
)
_PROPERTY = re.compile(r"\s{1,40}(NUMA node|LnkCap|LnkSta|Kernel driver in use):\s{0,8}(.{1,300})")
_SPEED = re.compile(r"Speed (\d{1,3}(?:\.\d)?)GT/s")
_WIDTH = re.compile(r"Width x(\d{1,2})\b")
_IDS = re.compile(r"\s*\[([0-9a-f]{4}):([0-9a-f]{4})\]")
_TRAILERS = re.compile(r"\s*\((?:rev|prog-if) [^)]*\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device. ``name`` holds vendor and model in words, ``ids`` both in hex (with ``-nn``).

    ``slower`` and ``narrower`` are lspci's marks that the link runs below what the device can do;
    a link that is asleep, or a virtual function's, has no speed and so is None.
    """

    address: str
    class_name: str
    name: str
    ids: tuple[str, str] | None = None
    numa_node: int | None = None
    link: PciLink | None = None
    max_link: PciLink | None = None
    slower: bool = False
    narrower: bool = False
    driver: str | None = None


def parse(text: str) -> tuple[Device, ...]:
    """All devices. Raises CraterError when the text isn't lspci's or repeats an address."""
    devices: list[Device] = []
    for block in re.split(r"\n(?=\S)", text.strip("\n")):
        head, _, rest = block.partition("\n")
        if head.strip():
            devices.append(_device(head.strip(), rest))
    addresses = [device.address for device in devices]
    repeated = next((a for a in addresses if addresses.count(a) > 1), None)
    if repeated:
        raise CraterError(f"lspci tells two devices with the address {repeated}")
    return tuple(devices)


def read(notes: list[str]) -> tuple[Device, ...]:
    """This machine's devices; none, with the reason in ``notes``, when lspci tells nothing."""
    output = run(["lspci", "-D", "-vv", "-nn"])
    if output.problem is not None:
        notes.append(f"lspci says nothing: {output.problem}")
        return ()
    if "<access denied>" in output.text:
        notes.append("lspci tells no link speeds without root")
    try:
        return parse(output.text)
    except CraterError as error:
        notes.append(str(error))
        return ()


def _device(head: str, rest: str) -> Device:
    found = _DEVICE.fullmatch(head)
    if found is None:
        raise CraterError(f"lspci: {head[:80]!r} is no device")
    address, class_name, name = found.groups()
    told: dict[str, str] = {}
    for line in rest.splitlines():
        # A bridge behind a bridge tells its link once; what comes first is the device's own.
        if (entry := _PROPERTY.fullmatch(line)) is not None:
            told.setdefault(entry.group(1), entry.group(2))
    state = told.get("LnkSta", "")
    ids = _IDS.search(name)
    return Device(
        address=pci_address(address),
        class_name=re.sub(r"\s*\[[0-9a-f]{4}\]$", "", class_name),
        name=_IDS.sub("", _TRAILERS.sub("", name)).strip(),
        ids=(ids.group(1), ids.group(2)) if ids else None,
        numa_node=whole(told.get("NUMA node")),
        link=_link(state),
        max_link=_link(told.get("LnkCap", "")),
        slower=bool(re.search(r"Speed [^,]*\(downgraded\)", state)),
        narrower=bool(re.search(r"Width x\d+ \(downgraded\)", state)),
        driver=told.get("Kernel driver in use"),
    )


def _link(text: str) -> PciLink | None:
    speed, width = _SPEED.search(text), _WIDTH.search(text)
    if not speed or not width or width.group(1) == "0":
        return None
    return PciLink(speed_gt_s=float(speed.group(1)), width=int(width.group(1)))
