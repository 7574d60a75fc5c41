"""The matrix of ``nvidia-smi topo -m``: what lies between each two GPUs and NICs.

The header line comes underlined by ANSI escapes, even into a file; newer drivers call the NICs
NIC0, NIC1 and name them in a legend, older ones name them in the matrix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crater_slurm.errors import CraterError
from crater_slurm.model.cpuset import parse_cpulist
from crater_slurm.probe.tools.run import run
from crater_slurm.probe.tools.values import known, whole

_WHERE = "nvidia-smi topo -m"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LINK = re.compile(r"X|PIX|PXB|PHB|NODE|SYS|SOC|NV\d{1,3}")
_DEVICE = re.compile(r"(?:GPU|NIC)\d{1,4}|[A-Za-z][A-Za-z0-9]*_\w{1,32}")
_NIC_LEGEND = re.compile(r"\s*(NIC\d{1,4}):\s*(\S+)\s*")
_MAX_LIST_CHARS = 4096
_AFFINITIES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A row: a GPU (``GPU0``) or NIC (``mlx5_0``), and what lies between it and the others.

    ``links`` maps names to X, NV# (# NVLinks), PIX, PXB, PHB, NODE or SYS. ``gpu_numa_node`` is
    the NUMA node that the GPU's own memory is, on machines where it is one.
    """

    name: str
    links: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    numa_nodes: tuple[int, ...] = ()
    gpu_numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    """All rows, GPUs first."""

    devices: tuple[Device, ...]

    def link(self, one: str, other: str) -> str | None:
        """What lies between two devices; None when one is not there."""
        return next((d.links.get(other) for d in self.devices if d.name == one), None)


def parse(text: str) -> Topology:
    """The matrix. Raises CraterError when it isn't one, is cut off or contradicts itself."""
    lines = [line.rstrip() for line in _ESCAPES.sub("", text).splitlines()]
    start = next((i for i, line in enumerate(lines) if _columns(line)), None)
    if start is None:
        first = text.strip().splitlines()[:1]
        raise CraterError(f"{_WHERE}: {first[0][:200] if first else 'nothing was printed'}")
    columns = _columns(lines[start])
    rows = []
    for line in lines[start + 1 :]:
        cells = _split(line)
        if not cells or cells[0].endswith("Legend:"):
            break
        rows.append(cells)
    if [row[0] for row in rows] != list(columns):
        raise CraterError(
            f"{_WHERE}: columns {_short(columns)}, but rows {_short([row[0] for row in rows])}"
        )
    nics = {m.group(1): m.group(2) for line in lines if (m := _NIC_LEGEND.fullmatch(line))}
    names = [nics.get(column, column) for column in columns]
    if len(set(names)) != len(names):
        raise CraterError(f"{_WHERE}: two devices have one name in {_short(names)}")
    topology = Topology(
        tuple(_device(name, names, row) for name, row in zip(names, rows, strict=True))
    )
    _refuse_contradictions(topology)
    return topology


def read(notes: list[str]) -> Topology | None:
    """This machine's matrix; None, with the reason in ``notes``, when there is none."""
    output = run(["nvidia-smi", "topo", "-m"])
    if output.problem is not None:
        notes.append(f"nvidia-smi topo -m says nothing: {output.problem}")
        return None
    try:
        return parse(output.text)
    except CraterError as error:
        notes.append(str(error))
        return None


def _short(names: Sequence[str]) -> str:
    return " ".join(names)[:400]


def _split(line: str) -> list[str]:
    """Cells between tabs, or between two and more spaces where somebody pasted the text."""
    return [cell.strip() for cell in re.split(r"\t|\s{2,}", line.strip()) if cell.strip()]


def _columns(line: str) -> tuple[str, ...]:
    """Devices of a header line; none when the line is no header."""
    cells = [cell for cell in _split(line) if cell not in _AFFINITIES]
    fits = bool(cells) and cells[0].startswith("GPU") and all(map(_DEVICE.fullmatch, cells))
    return tuple(cells) if fits else ()


def _device(name: str, names: Sequence[str], row: Sequence[str]) -> Device:
    cells, rest = row[1 : len(names) + 1], row[len(names) + 1 :]
    # A MIG or virtual GPU has N/A for what the driver can't tell.
    wrong = [cell for cell in cells if known(cell) and not _LINK.fullmatch(cell)]
    if wrong:
        raise CraterError(f"{_WHERE}: row {row[0]}: {wrong[0][:40]!r} is no link such as PIX")
    if len(cells) != len(names):
        raise CraterError(f"{_WHERE}: row {row[0]} has {len(cells)} links of {len(names)}")
    cpus, numa_nodes, gpu_node = [known(cell) for cell in (*rest[:3], "", "", "")[:3]]
    try:
        return Device(
            name=name,
            links={n: cell for n, cell in zip(names, cells, strict=True) if known(cell)},
            cpus=_numbers(cpus),
            numa_nodes=_numbers(numa_nodes),
            gpu_numa_node=whole(gpu_node),
        )
    except ValueError as error:
        raise CraterError(f"{_WHERE}: row {row[0]}: {error}") from error


def _numbers(text: str | None) -> tuple[int, ...]:
    """A cpulist. Raises ValueError when it is none, or counts beyond what any machine has."""
    if text is None:
        return ()
    if len(text) > _MAX_LIST_CHARS or re.search(r"\d{6}", text):
        raise ValueError(f"{text[:40]!r} is no list of CPUs or NUMA nodes")
    return parse_cpulist(text)


def _refuse_contradictions(topology: Topology) -> None:
    links = {device.name: device.links for device in topology.devices}
    for device in topology.devices:
        for other, link in device.links.items():
            back = links[other].get(device.name)
            if (link == "X") != (other == device.name) or (back is not None and back != link):
                raise CraterError(
                    f"{_WHERE}: {device.name} has {link} to {other}, which has {back} back"
                )
