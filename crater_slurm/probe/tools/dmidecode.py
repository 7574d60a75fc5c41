"""Memory modules as ``dmidecode -t memory`` prints them, and what they could carry at most.

Boards name slots as they like; the channel is told only where a name says it, never guessed from
a position. Empty slots are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import Dimm
from crater_slurm.probe.tools.run import run
from crater_slurm.probe.tools.values import known, number, whole

_FIELD = re.compile(r"\s{1,8}([A-Z][A-Za-z -]{0,40}):(.{0,200})")
_MIB = {"kB": 1 / 1024, "MB": 1, "GB": 1024, "TB": 1024 * 1024}
_BYTES_PER_TRANSFER = 8

#: Names that tell their channel, and where in the name it ends. Bank locators that spell the word
#: out come first: they number channels as the memory controllers do.
_CHANNELS = (
    re.compile(r"(.*\bchannel[ _-]?[0-9a-z]{1,2})(?:[ _/-].*)?", re.I),  # NODE 1 CHANNEL 2 DIMM 0
    re.compile(r"(.*_channel[0-9a-z]{1,2})(?:[ _/-].*)?", re.I),  # P0_Node0_Channel0_Dimm0
    re.compile(r"((?:cpu|proc|p)[ _-]?[0-9]{1,2}[ _-]dimm[ _-]?[a-z])[0-9]{0,2}", re.I),
    re.compile(r"(dimm[ _-]p[0-9]{1,2}[ _-][a-z])[0-9]{0,2}", re.I),  # DIMM_P0_A1
    re.compile(r"(dimm[ _-]?[a-z])[0-9]{0,2}", re.I),  # DIMM_A1
)
_NODE = re.compile(r"(?:node|cpu|p|proc)[ _]?[0-9]{1,2}", re.I)


def parse(text: str) -> tuple[Dimm, ...]:
    """Modules that are there. Raises CraterError when a module's size can't be read."""
    devices = [
        _fields(block)
        for block in re.split(r"\n\s*\n", text)
        if re.search(r"^Memory Device *$", block, re.MULTILINE)
    ]
    present = [(fields, size) for fields in devices if (size := _size_mib(fields)) is not None]
    slots = _slots([fields for fields, _ in present])
    repeated = Counter(slots)
    return tuple(
        Dimm(
            slot=slot,
            size_mib=size,
            kind=known(fields.get("Type")),
            speed_mt_s=_speed_mt_s(fields),
            # Two modules that the board calls the same may sit on two sockets.
            channel=channel_of(fields) if repeated[slot] == 1 else None,
        )
        for (fields, size), slot in zip(present, slots, strict=True)
    )


def read(notes: list[str]) -> tuple[Dimm, ...]:
    """This machine's modules; none, with the reason in ``notes``, when they can't be read."""
    output = run(["dmidecode", "-t", "memory"])
    if output.problem is not None:
        notes.append(f"memory modules are unknown: {output.problem}")
        return ()
    try:
        dimms = parse(output.text)
    except CraterError as error:
        notes.append(f"memory modules are unknown: {error}")
        return ()
    if not dimms:
        notes.append("memory modules are unknown: the firmware's tables list none")
    return dimms


def theoretical_bandwidth_gb_s(dimms: Sequence[Dimm]) -> float | None:
    """Populated channels x MT/s x 8 bytes, at the speed of the slowest module.

    A channel moves 64 data bits at each transfer (JEDEC JESD79-4; with DDR5, JESD79-5, as two
    sub-channels of 32), and all channels run at the slowest module's speed. None without modules
    or when a speed or channel is unknown. Non-volatile modules don't count.
    """
    memory = [dimm for dimm in dimms if "non-volatile" not in (dimm.kind or "").lower()]
    speeds = [dimm.speed_mt_s for dimm in memory if dimm.speed_mt_s is not None]
    channels = {dimm.channel for dimm in memory}
    if not memory or len(speeds) != len(memory) or None in channels:
        return None
    return len(channels) * min(speeds) * _BYTES_PER_TRANSFER / 1000


def channel_of(fields: Mapping[str, str]) -> str | None:
    """The channel that a module's ``Locator`` or ``Bank Locator`` names; None when neither does."""
    slot, bank = (known(fields.get(name)) or "" for name in ("Locator", "Bank Locator"))
    for pattern in _CHANNELS:
        for name in (bank, slot):
            if found := pattern.fullmatch(name):
                channel = found.group(1)
                # DIMM_A1 is there on every socket; the bank then names the socket.
                alone = channel.lower().startswith(("dimm", "channel"))
                return f"{bank} {channel}" if alone and _NODE.fullmatch(bank) else channel
    return None


def _fields(block: str) -> dict[str, str]:
    found = (_FIELD.fullmatch(line.rstrip()) for line in block.splitlines())
    return {entry.group(1): entry.group(2).strip() for entry in found if entry is not None}


def _size_mib(fields: Mapping[str, str]) -> int | None:
    text = fields.get("Size", "")
    if known(text) is None or text == "No Module Installed":
        return None
    size, unit = number(text), text.rpartition(" ")[2]
    if size is None or unit not in _MIB:
        raise CraterError(f"dmidecode: {text[:40]!r} is no size of a memory module")
    return int(size * _MIB[unit]) or None


def _speed_mt_s(fields: Mapping[str, str]) -> int | None:
    """What the module runs at. Releases before 3.2 say Clock Speed and MHz, and mean MT/s."""
    for name in ("Configured Memory Speed", "Configured Clock Speed"):
        speed = whole(fields.get(name))
        if speed:
            return speed
    return None


def _slots(modules: Sequence[Mapping[str, str]]) -> list[str]:
    """Each module's locator, with its bank where the board uses a locator more than once."""
    locators = [known(fields.get("Locator")) or "unnamed" for fields in modules]
    banks = [known(fields.get("Bank Locator")) or "" for fields in modules]
    often = Counter(locators)
    return [
        f"{bank} {locator}".strip() if often[locator] > 1 else locator
        for locator, bank in zip(locators, banks, strict=True)
    ]
