"""NVMe drives as nvme-cli tells them: model and firmware, and how worn a drive is.

Releases up to 2.10 print a flat list of devices; later ones, and ``-v`` of all, print hosts with
subsystems, controllers and namespaces. Numbers may come as strings in any of them.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from crater_slurm.errors import CraterError
from crater_slurm.probe.tools.run import run
from crater_slurm.probe.tools.values import json_document, known, mappings, whole

_BLOCK = re.compile(r"nvme\d{1,6}n\d{1,6}")
_ZERO_CELSIUS_K = 273


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The drive's own log: endurance used (may pass 100), temperature, warning bits (0 is well)."""

    wear_percent: int | None = None
    temperature_c: int | None = None
    critical_warning: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """A namespace as a block device (``nvme0n1``), with its controller's facts."""

    name: str
    model: str | None = None
    serial: str | None = None
    firmware: str | None = None
    pci_bus_id: str | None = None
    wear_percent: int | None = None
    temperature_c: int | None = None
    critical_warning: int | None = None


def parse_list(text: str) -> tuple[Drive, ...]:
    """Drives of ``nvme list -o json``, either form. Raises CraterError when it is neither."""
    if not text.strip():
        return ()  # what 1.x prints on a machine without drives
    document = json_document(text, "nvme list")
    devices = document.get("Devices") if isinstance(document, dict) else None
    if not isinstance(devices, list):
        raise CraterError("nvme list printed no Devices")
    drives: dict[str, Drive] = {}
    for device in mappings(devices):
        for drive in _nested(device) if "Subsystems" in device else _flat(device):
            drives.setdefault(drive.name, drive)
    return tuple(drives.values())


def parse_smart_log(text: str) -> Health:
    """The log of ``nvme smart-log -o json``. Raises CraterError when it is none."""
    log = json_document(text, "nvme smart-log")
    if not isinstance(log, dict) or not log.keys() & {"percent_used", "percentage_used"}:
        raise CraterError("nvme smart-log printed no percent_used")
    warning = log.get("critical_warning")
    if isinstance(warning, dict):  # since 2.0 with -v: the bits one by one
        warning = warning.get("value")
    kelvin = _int(log.get("temperature"))
    worn = _int(log.get("percent_used"))
    return Health(
        wear_percent=_int(log.get("percentage_used")) if worn is None else worn,
        temperature_c=kelvin - _ZERO_CELSIUS_K if kelvin else None,
        critical_warning=_int(warning),
    )


def read(notes: list[str]) -> dict[str, Drive]:
    """This machine's drives by block name; what can't be read is told in ``notes``."""
    output = run(["nvme", "list", "-o", "json"])
    if output.problem is not None:
        notes.append(f"nvme-cli says nothing of the drives: {output.problem}")
        return {}
    try:
        drives = parse_list(output.text)
    except CraterError as error:
        notes.append(f"nvme-cli says nothing of the drives: {error}")
        return {}
    if not drives and os.geteuid() != 0:
        notes.append("nvme-cli lists no drive; releases before 2.0 list none without root")
    silent: dict[str, list[str]] = {}
    found = {drive.name: _with_health(drive, silent) for drive in drives}
    notes.extend(f"wear of {', '.join(names)} is unknown: {why}" for why, names in silent.items())
    return found


def _with_health(drive: Drive, silent: dict[str, list[str]]) -> Drive:
    output = run(["nvme", "smart-log", f"/dev/{drive.name}", "-o", "json"])
    problem = output.problem
    if problem is None:
        try:
            health = parse_smart_log(output.text)
        except CraterError as error:
            problem = str(error)
        else:
            return dataclasses.replace(drive, **dataclasses.asdict(health))
    silent.setdefault(problem, []).append(drive.name)
    return drive


def _flat(device: dict[str, Any]) -> Iterator[Drive]:
    yield from _drives([_text(device.get("DevicePath")) or ""], device)


def _nested(device: dict[str, Any]) -> Iterator[Drive]:
    for subsystem in mappings(device.get("Subsystems")):
        controllers = mappings(subsystem.get("Controllers"))
        for controller in controllers:
            yield from _drives(_namespaces(controller), controller)
        # With native multipath, namespaces stand beside the controllers that lead to them.
        if controllers:
            yield from _drives(_namespaces(subsystem), controllers[0])


def _namespaces(owner: dict[str, Any]) -> list[str]:
    return [_text(space.get("NameSpace")) or "" for space in mappings(owner.get("Namespaces"))]


def _drives(paths: list[str], controller: dict[str, Any]) -> Iterator[Drive]:
    address = _text(controller.get("Address")) or ""
    for path in paths:
        name = path.removeprefix("/dev/")
        if _BLOCK.fullmatch(name):
            yield Drive(
                name=name,
                model=_text(controller.get("ModelNumber")),
                serial=_text(controller.get("SerialNumber")),
                firmware=_text(controller.get("Firmware")),
                # Over a network the address is traddr=...; only PCI's is of use here.
                pci_bus_id=address if re.fullmatch(r"[0-9a-f:.]{12,13}", address) else None,
            )


def _text(value: object) -> str | None:
    return known(value) if isinstance(value, str) else None


def _int(value: object) -> int | None:
    return whole(str(value)) if isinstance(value, int | str) else None
