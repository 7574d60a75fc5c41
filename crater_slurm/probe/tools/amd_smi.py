"""AMD GPUs as amd-smi tells them: ``list`` and ``static`` in JSON or text, ``metric`` in CSV.

Releases differ in the wrapping (a list, or ``gpu_data`` round it) and in numbers (12, "12", or
value and unit); all are read. A memory size of amd-smi is in MiB, whatever its unit says.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crater_slurm.errors import CraterError
from crater_slurm.probe.tools.run import run
from crater_slurm.probe.tools.values import (
    Card,
    Report,
    json_document,
    known,
    mappings,
    pci_address,
    refuse_repeats,
    whole,
)

_HEAD = re.compile(r"GPU:\s*(\d{1,6})\s*")
_ENTRY = re.compile(r"( *)([A-Za-z_][\w /()-]{0,80}):(.*)")
_MIB = {"mb": 1.0, "mib": 1.0, "gb": 1024.0, "gib": 1024.0, "kb": 1 / 1024, "b": 1 / 2**20}


@dataclass(frozen=True, slots=True, kw_only=True)
class AmdGpu:
    """One GPU (or partition of one) of amd-smi; ``address`` is None where only CSV was there."""

    index: int
    address: str | None = None
    uuid: str | None = None
    model: str | None = None
    memory_mib: int | None = None
    compute_units: int | None = None
    target: str | None = None
    numa_node: int | None = None
    driver: str | None = None


def parse(text: str) -> tuple[AmdGpu, ...]:
    """GPUs of any of the forms. Raises CraterError when it is none, or a GPU comes twice."""
    text = text.removeprefix("\ufeff").strip()
    if text.startswith(("[", "{")):
        entries = _json_entries(text)
    elif text.lower().startswith("gpu,"):
        entries = _csv_entries(text)
    else:
        entries = _text_entries(text)
    gpus = tuple(_gpu(entry) for entry in entries)
    refuse_repeats((gpu.address for gpu in gpus), "address", "amd-smi")
    refuse_repeats((str(gpu.index) for gpu in gpus), "number", "amd-smi")
    return gpus


def read(notes: list[str]) -> Report | None:
    """This machine's AMD GPUs; None, with the reason in ``notes``, when amd-smi tells nothing."""
    found: dict[int, list[AmdGpu]] = {}
    for command in ("static", "list"):
        output = run(["amd-smi", command, "--json"])
        if output.problem is not None:
            notes.append(f"amd-smi says nothing of the GPUs: {output.problem}")
            return None
        try:
            for gpu in parse(output.text):
                found.setdefault(gpu.index, []).append(gpu)
        except CraterError as error:
            notes.append(f"amd-smi {command}: {error}")
    cards = tuple(card for gpus in found.values() if (card := _card(gpus)) is not None)
    driver = next((gpu.driver for gpus in found.values() for gpu in gpus if gpu.driver), None)
    return Report(cards=cards, driver=driver)


def _card(told: list[AmdGpu]) -> Card | None:
    """One card of what ``static`` and ``list`` tell of it; None without an address."""
    values: dict[str, Any] = {}
    for gpu in told:
        for name in ("address", "uuid", "model", "memory_mib", "numa_node"):
            if values.get(name) is None:
                values[name] = getattr(gpu, name)
        values.setdefault("compute_capability", gpu.target)
    return Card(**values) if values.get("address") else None


def _json_entries(text: str) -> list[dict[str, Any]]:
    document = json_document(text, "amd-smi")
    if isinstance(document, dict):
        document = document.get("gpu_data", document)
    entries = mappings([document] if isinstance(document, dict) else document)
    return [entry for entry in entries if "gpu" in entry]


def _csv_entries(text: str) -> list[dict[str, Any]]:
    try:
        rows = list(csv.reader(text.splitlines()))
    except csv.Error as error:
        raise CraterError(f"amd-smi: the CSV can't be read: {error}") from error
    header = [name.strip().lower() for name in rows[0]]
    entries = []
    for row in filter(None, rows[1:]):
        cells = _join_lists(row)
        if len(cells) != len(header):
            raise CraterError(f"amd-smi: a row has {len(cells)} cells for {len(header)} columns")
        entry: dict[str, Any] = dict(zip(header, cells, strict=True))
        entries.append({**entry, "vram": {"size": entry.get("fb_total")}})
    return entries


def _join_lists(row: list[str]) -> list[str]:
    """Cells with lists such as [0, 0], which stand in a row unquoted, put together again."""
    joined: list[str] = []
    for cell in row:
        if joined and joined[-1].count("[") > joined[-1].count("]"):
            joined[-1] += "," + cell
        else:
            joined.append(cell)
    return joined


def _text_entries(text: str) -> list[dict[str, Any]]:
    """Indented ``NAME: value`` lines, as JSON has them: names in lower case, sections inside."""
    entries: list[dict[str, Any]] = []
    section: dict[str, Any] | None = None
    base = 0
    for line in filter(str.strip, text.splitlines()):
        if head := _HEAD.fullmatch(line):
            entries.append({"gpu": head.group(1)})
            section, base = None, 0
            continue
        entry = _ENTRY.fullmatch(line)
        if entry is None or not entries:
            raise CraterError(f"amd-smi: {line.strip()[:80]!r} tells of no GPU")
        depth, name, value = len(entry.group(1)), entry.group(2).lower(), entry.group(3).strip()
        base = base or depth
        if depth <= base:
            section = None if value else entries[-1].setdefault(name, {})
        target = entries[-1] if section is None else section
        if value and isinstance(target, dict):
            target.setdefault(name, value)
    return entries


def _gpu(entry: Mapping[str, Any]) -> AmdGpu:
    asic, bus, vram, numa, driver = (
        _section(entry, name) for name in ("asic", "bus", "vram", "numa", "driver")
    )
    index = whole(str(entry.get("gpu")))
    if index is None:
        raise CraterError(f"amd-smi: {str(entry.get('gpu'))[:40]!r} is no number of a GPU")
    address = _text(entry.get("bdf")) or _text(bus.get("bdf"))
    return AmdGpu(
        index=index,
        address=pci_address(address) if address else None,
        uuid=_text(entry.get("uuid")),
        model=_text(asic.get("market_name")),
        memory_mib=_mib(vram.get("size")),
        compute_units=whole(_text(asic.get("num_compute_units"))),
        target=_text(asic.get("target_graphics_version")),
        numa_node=whole(_text(numa.get("node"))),
        driver=_text(driver.get("version")) or _text(driver.get("driver_version")),
    )


def _section(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = entry.get(name)
    return section if isinstance(section, dict) else {}


def _text(value: object) -> str | None:
    return known(str(value)) if isinstance(value, str | int | float) else None


def _mib(value: object) -> int | None:
    """196592, "196592 MB" or {"value": 196592, "unit": "MB"}, in MiB."""
    unit = ""
    if isinstance(value, dict):
        unit = str(value.get("unit", ""))
        value = value.get("value")
    text = _text(value) or ""
    if not unit:
        text, _, unit = text.partition(" ")
    size = whole(text)
    factor = _MIB.get(unit.strip().lower() or "mb")
    return None if size is None or factor is None else int(size * factor)
