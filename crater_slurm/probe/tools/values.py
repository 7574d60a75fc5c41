"""Single values as tools print them, and the GPU that the tools of every vendor tell of.

A tool says in many ways that it does not know; all of them become None here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from crater_slurm.errors import CraterError

_UNKNOWN = {"", "n/a", "none", "unknown", "not supported", "not available", "not specified", "err!"}
_MAX_DIGITS = 18  # more is no number of a machine, and beyond what int() reads quickly
_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.ASCII)
_QUANTITY = re.compile(rf"([0-9]{{1,{_MAX_DIGITS}}})(\.[0-9]{{1,9}})?\s*([A-Za-z/%]*)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Links to the GPU at ``address``: how much they carry, both directions together."""

    address: str
    bandwidth_gb_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU as one tool tells it. ``minor`` is the number of its device file /dev/nvidiaN.

    ``memory_node`` is the NUMA node that the GPU's own memory is (Grace), ``numa_node`` the one
    whose CPUs are near. ``mig`` is None where the tool knows no MIG of this GPU.
    """

    address: str
    model: str | None = None
    uuid: str | None = None
    minor: int | None = None
    memory_mib: int | None = None
    compute_capability: str | None = None
    numa_node: int | None = None
    memory_node: int | None = None
    mig: bool | None = None
    mig_instances: tuple[str, ...] = ()
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All GPUs that one tool tells of, with the versions of driver and CUDA."""

    cards: tuple[Card, ...] = ()
    driver: str | None = None
    cuda: str | None = None


def known(text: str | None) -> str | None:
    """``text`` without space round it; None where it says that the tool doesn't know."""
    # Escape sequences and broken characters would reach terminals and files.
    told = "".join(filter(str.isprintable, text or "")).strip()
    # [N/A], [Not Supported], [GPU is lost], <inactive>: what stands in brackets is a reason.
    if told[:1] + told[-1:] in ("[]", "<>") or told.lower() in _UNKNOWN:
        return None
    return None if told.startswith("Requested functionality") else told


def whole(text: str | None) -> int | None:
    """The whole number that ``text`` is or begins with (``81559 MiB``, ``16x``); None if none."""
    found = _QUANTITY.fullmatch(known(text) or "")
    return int(found.group(1)) if found and not found.group(2) else None


def number(text: str | None) -> float | None:
    """The number that ``text`` is or begins with (``26.562 GB/s``); None if none."""
    found = _QUANTITY.fullmatch(known(text) or "")
    return float(found.group(1) + (found.group(2) or "")) if found else None


def pci_address(text: str) -> str:
    """The kernel's form, ``0000:0a:00.0``, of any tool's form. Raises CraterError for others."""
    found = _ADDRESS.fullmatch(text.strip().lower())
    if found is None:
        raise CraterError(f"{text.strip()[:40]!r} is no PCI address such as 0000:0a:00.0")
    domain, bus, device, function = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def refuse_repeats(values: Iterable[str | None], what: str, where: str) -> None:
    """Raises CraterError when a value that names one GPU names two."""
    seen: set[str] = set()
    for value in filter(None, values):
        if value in seen:
            raise CraterError(f"{where} tells two GPUs with the {what} {value}; each has its own")
        seen.add(value)


def json_document(text: str, where: str) -> Any:
    """The JSON in ``text``. Raises CraterError with the place where it is damaged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CraterError(f"{where} printed no JSON: {error}") from error


def mappings(value: object) -> list[dict[str, Any]]:
    """The mappings among the entries of a JSON list; none where it is no list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
