"""GPUs as nvidia-smi's table (``--query-gpu --format=csv``) and list (``-L``) print them.

``read`` asks for a table of few columns, which every driver since 450 knows, and for the list,
which alone has the names of MIG instances. NVML tells more; this is for where it is missing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crater_slurm.errors import CraterError
from crater_slurm.probe.tools.run import Output, run
from crater_slurm.probe.tools.values import (
    Card,
    Report,
    known,
    pci_address,
    refuse_repeats,
    whole,
)

FIELDS = (
    "index",
    "name",
    "uuid",
    "pci.bus_id",
    "driver_version",
    "memory.total",
    "compute_cap",
    "mig.mode.current",
)
#: Older drivers refuse a whole query for one field they don't know.
OLD_FIELDS = FIELDS[:6]
TIMEOUT_S = 30.0  # a machine with eight GPUs and no persistence daemon takes ten or more

#: Sentences that nvidia-smi prints in place of what was asked.
_FAILURES = (
    "NVIDIA-SMI has failed",
    "Failed to initialize NVML",
    "Unable to determine the device handle",
    "Field ",
    "Error:",
    "ERROR:",
)
_LIST_GPU = re.compile(r"GPU (\d{1,6}): (.{0,200}?) ?\(UUID: (\S{1,80})\)")
_LIST_MIG = re.compile(
    r"\s{1,8}MIG (\S{1,40})\s{1,40}Device\s{1,8}(\d{1,6}): ?\(UUID: (\S{1,80})\)"
)


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A MIG instance: its profile (``3g.40gb``), its number on its GPU, its UUID."""

    profile: str
    index: int
    uuid: str


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """One GPU of ``nvidia-smi -L``."""

    index: int
    name: str
    uuid: str
    mig_instances: tuple[MigInstance, ...] = ()


def parse_list(text: str) -> tuple[ListedGpu, ...]:
    """GPUs and MIG instances of ``nvidia-smi -L``. Raises CraterError on any other line."""
    gpus: list[ListedGpu] = []
    for line in _lines(text, "nvidia-smi -L"):
        if gpu := _LIST_GPU.fullmatch(line.strip()):
            gpus.append(ListedGpu(int(gpu.group(1)), gpu.group(2), gpu.group(3)))
        elif (mig := _LIST_MIG.fullmatch(line)) and gpus:
            instance = MigInstance(mig.group(1), int(mig.group(2)), mig.group(3))
            gpus[-1] = dataclasses.replace(
                gpus[-1], mig_instances=(*gpus[-1].mig_instances, instance)
            )
        else:
            raise CraterError(f"nvidia-smi -L: {line.strip()[:80]!r} is no GPU or MIG instance")
    refuse_repeats((gpu.uuid for gpu in gpus), "UUID", "nvidia-smi -L")
    refuse_repeats((mig.uuid for gpu in gpus for mig in gpu.mig_instances), "UUID", "nvidia-smi -L")
    return tuple(gpus)


def parse_table(text: str, fields: Sequence[str] = ()) -> list[dict[str, str | None]]:
    """Rows of ``--query-gpu --format=csv`` by field name without unit, None for what is unknown.

    Without ``fields`` the first line is the header; with them there is none (``noheader``).
    Raises CraterError on nvidia-smi's own errors and on rows of another length.
    """
    lines = _lines(text, "nvidia-smi --query-gpu")
    if not lines:
        return []
    names = [name.partition(" [")[0] for name in fields or _cells(lines.pop(0))]
    if len(set(names)) != len(names):
        raise CraterError("nvidia-smi --query-gpu: two columns have one name")
    rows = []
    for line in lines:
        cells = _cells(line)
        if len(cells) != len(names):
            raise CraterError(
                f"nvidia-smi --query-gpu: {line[:60]!r} has {len(cells)} cells for "
                f"{len(names)} columns"
            )
        rows.append({name: known(cell) for name, cell in zip(names, cells, strict=True)})
    return rows


def cards(rows: Sequence[Mapping[str, str | None]]) -> Report:
    """GPUs of a table. Raises CraterError without bus ids, or when two GPUs share a name."""
    found = []
    for row in rows:
        bus = row.get("pci.bus_id") or row.get("gpu_bus_id")
        if bus is None:
            raise CraterError("nvidia-smi --query-gpu: a GPU has no pci.bus_id")
        mig = row.get("mig.mode.current")
        found.append(
            Card(
                address=pci_address(bus),
                model=row.get("name") or row.get("gpu_name"),
                uuid=row.get("uuid") or row.get("gpu_uuid"),
                memory_mib=whole(row.get("memory.total")),
                compute_capability=row.get("compute_cap"),
                mig={"Enabled": True, "Disabled": False}.get(mig or ""),
            )
        )
    refuse_repeats((card.address for card in found), "bus id", "nvidia-smi --query-gpu")
    refuse_repeats((card.uuid for card in found), "UUID", "nvidia-smi --query-gpu")
    driver = next((row["driver_version"] for row in rows if row.get("driver_version")), None)
    return Report(cards=tuple(found), driver=driver)


def with_instances(report: Report, listed: Sequence[ListedGpu]) -> Report:
    """``report`` with the MIG instances of ``nvidia-smi -L``, GPUs matched by UUID."""
    profiles = {
        gpu.uuid: tuple(mig.profile for mig in gpu.mig_instances) for gpu in listed if gpu.uuid
    }
    return dataclasses.replace(
        report,
        cards=tuple(
            dataclasses.replace(card, mig_instances=profiles.get(card.uuid or "", ()))
            for card in report.cards
        ),
    )


def read(notes: list[str]) -> Report | None:
    """GPUs of this machine; None, with the reason in ``notes``, when nvidia-smi tells nothing."""
    for fields in (FIELDS, OLD_FIELDS):
        output = _query(fields)
        if output.problem is None or "not a valid field" not in output.text:
            break
    if output.problem is not None:
        notes.append(f"nvidia-smi says nothing of the GPUs: {output.problem}")
        return None
    try:
        report = cards(parse_table(output.text))
        if any(card.mig for card in report.cards):
            report = with_instances(report, parse_list(run(["nvidia-smi", "-L"]).text))
    except CraterError as error:
        notes.append(f"nvidia-smi says nothing of the GPUs: {error}")
        return None
    return report


def _query(fields: Sequence[str]) -> Output:
    return run(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv"], timeout_s=TIMEOUT_S
    )


def _lines(text: str, where: str) -> list[str]:
    """Lines that aren't blank; none where there is no GPU. CraterError on nvidia-smi's errors."""
    lines = [line for line in text.removeprefix("\ufeff").splitlines() if line.strip()]
    if lines and lines[0].startswith("No devices were found"):
        return []
    for line in lines:
        if line.startswith(_FAILURES):
            raise CraterError(f"{where}: {line.strip()[:200]}")
    return lines


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]
