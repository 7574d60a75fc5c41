"""NVIDIA's GPUs as its management library (NVML) tells them, asked in a process of its own.

A call into a wedged driver never returns and can't be interrupted, so ``read`` starts this module
as a child, which prints JSON, and waits only so long. What a card or driver does not support is
unknown; one GPU that has fallen off the bus does not hide the others.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crater_slurm.errors import CraterError
from crater_slurm.probe.tools.nvidia_smi_links import carried_gb_s
from crater_slurm.probe.tools.run import run
from crater_slurm.probe.tools.values import Card, Peer, Report, json_document, pci_address

TIMEOUT_S = 30.0  # without the persistence daemon, each GPU takes seconds to wake
_CHILD = f"import sys; sys.path.append(sys.argv[1]); from {__name__} import main; main()"
_NODE_WORDS = 16  # of 64 NUMA nodes each


def read(notes: list[str]) -> Report | None:
    """This machine's GPUs; None, with the reason in ``notes``, when NVML tells nothing."""
    # -P: root may stand in a user's folder, where a pynvml.py must not be taken for the real one.
    package = str(Path(__file__).parents[2])
    output = run([sys.executable, "-P", "-c", _CHILD, package], timeout_s=TIMEOUT_S)
    if output.problem is not None:
        notes.append(f"NVML says nothing of the GPUs: its process {output.problem}")
        return None
    try:
        return decode(output.text, notes)
    except CraterError as error:
        notes.append(f"NVML says nothing of the GPUs: {error}")
        return None


def decode(text: str, notes: list[str]) -> Report:
    """The report that the child printed. Raises CraterError when it printed none."""
    import pydantic  # here, since the child needs none of it and starts in half the time

    # Driver libraries may print lines of their own before it.
    told = json_document((text.strip().splitlines() or [""])[-1], "NVML's process")
    if isinstance(told, dict) and "error" in told:
        raise CraterError(str(told["error"])[:200])
    try:
        printed = pydantic.TypeAdapter(_Printed).validate_python(told)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise CraterError(
            f"NVML's process printed no report: {where[:80]}: {first['msg']}"
        ) from None
    notes.extend(printed.notes)
    return printed.report


@dataclass(frozen=True, slots=True)
class _Printed:
    """What the child prints when all is well."""

    report: Report
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Links:
    """Active NVLinks of one GPU: to GPUs by address, to switches, and GB/s of one, both ways."""

    direct: Counter[str] = field(default_factory=Counter)
    switched: int = 0
    link_gb_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Library:
    """NVML with every call guarded: what fails is None."""

    nvml: Any

    def ask(self, function: str, *arguments: Any) -> Any:
        call = getattr(self.nvml, function, None)  # an older binding lacks newer functions
        try:
            return call(*arguments) if call is not None else None
        except self.nvml.NVMLError:
            return None


def survey(nvml: Any, notes: list[str]) -> Report:
    """All GPUs, asked of the module ``nvml``. Raises its NVMLError when it can't start at all."""
    nvml.nvmlInit()
    try:
        library = _Library(nvml)
        cards: list[tuple[Card, _Links]] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
                cards.append((_card(library, handle, bus or ""), _links(library, handle)))
            except (nvml.NVMLError, CraterError) as error:
                notes.append(f"NVML can't read the GPU with its number {index}: {error}")
        cuda = library.ask("nvmlSystemGetCudaDriverVersion_v2")
        return Report(
            cards=tuple(dataclasses.replace(c, peers=_peers(c, own, cards)) for c, own in cards),
            driver=_text(library.ask("nvmlSystemGetDriverVersion")),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        )
    finally:
        nvml.nvmlShutdown()


def _card(library: _Library, handle: Any, bus: str) -> Card:
    memory = library.ask("nvmlDeviceGetMemoryInfo", handle)
    capability = library.ask("nvmlDeviceGetCudaComputeCapability", handle)
    mode = library.ask("nvmlDeviceGetMigMode", handle)
    return Card(
        address=pci_address(bus),
        model=_text(library.ask("nvmlDeviceGetName", handle)),
        uuid=_text(library.ask("nvmlDeviceGetUUID", handle)),
        minor=library.ask("nvmlDeviceGetMinorNumber", handle),
        memory_mib=int(memory.total) // 2**20 if memory is not None else None,
        compute_capability=".".join(map(str, capability)) if capability is not None else None,
        numa_node=_near_node(library, handle),
        memory_node=library.ask("nvmlDeviceGetNumaNodeId", handle),
        mig=bool(mode[0]) if mode is not None else None,
        mig_instances=_mig_instances(library, handle) if mode is not None and mode[0] else (),
    )


def _near_node(library: _Library, handle: Any) -> int | None:
    """The first NUMA node whose memory is near the GPU."""
    words = library.ask("nvmlDeviceGetMemoryAffinity", handle, _NODE_WORDS, 0)
    for place, word in enumerate(words or ()):
        if word:
            return place * 64 + (int(word) & -int(word)).bit_length() - 1
    return None


def _mig_instances(library: _Library, handle: Any) -> tuple[str, ...]:
    """Profiles such as 1g.5gb, which NVML tells only as the end of the instance's name."""
    profiles = []
    for index in range(library.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        instance = library.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        name = _text(library.ask("nvmlDeviceGetName", instance)) if instance is not None else None
        if name:
            profiles.append(name.rpartition(" MIG ")[2])
    return tuple(profiles)


def _links(library: _Library, handle: Any) -> _Links:
    nvml, links = library.nvml, _Links()
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        state = library.ask("nvmlDeviceGetNvLinkState", handle, link)
        if state is None:
            break  # beyond the last link, or a card without NVLink
        if not state:
            continue
        kind = library.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        if kind == getattr(nvml, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2):
            links.switched += 1
        elif (remote := library.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)) is not None:
            links.direct[pci_address(_text(remote.busId) or "")] += 1
    if links.switched or links.direct:
        links.link_gb_s = _link_gb_s(library, handle)
    return links


def _link_gb_s(library: _Library, handle: Any) -> float | None:
    """GB/s of one link, both directions: the driver tells MB/s of one."""
    wanted = getattr(library.nvml, "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON", 90)
    values = library.ask("nvmlDeviceGetFieldValues", handle, [wanted])
    if not values or values[0].nvmlReturn != 0 or not values[0].value.uiVal:
        return None
    return 2 * carried_gb_s(values[0].value.uiVal / 1000)


def _peers(card: Card, own: _Links, cards: list[tuple[Card, _Links]]) -> tuple[Peer, ...]:
    """GPUs that NVLink reaches: directly, or all that hang on switches as this one does."""
    peers = []
    for other, theirs in cards:
        if other.address == card.address:
            continue
        count = own.direct[other.address] or min(own.switched, theirs.switched)
        if count:
            total = None if own.link_gb_s is None else round(count * own.link_gb_s, 1)
            peers.append(Peer(address=other.address, bandwidth_gb_s=total))
    return tuple(peers)


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def main() -> None:
    """What the child prints: the report, or why there is none."""
    notes: list[str] = []
    try:
        import pynvml
    except ImportError:
        told: dict[str, Any] = {"error": "Python's nvidia-ml-py is not installed"}
    else:
        try:
            told = dataclasses.asdict(_Printed(survey(pynvml, notes), tuple(notes)))
        except pynvml.NVMLError as error:
            told = {"error": str(error)}
    print(json.dumps(told))
